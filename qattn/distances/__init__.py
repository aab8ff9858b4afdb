"""Distances between clouds: the Energy Distance and the Chamfer distance."""

from qattn.distances.chamfer import chamfer_distance
from qattn.distances.energy import energy_distance

__all__ = ["chamfer_distance", "energy_distance"]
