"""Distances: along one cloud (`geodesic_distance`), and between two (`energy_distance`, `chamfer_distance`)."""

from qattn.distances.chamfer import chamfer_distance
from qattn.distances.energy import energy_distance
from qattn.distances.geodesic import geodesic_distance

__all__ = ["chamfer_distance", "energy_distance", "geodesic_distance"]
