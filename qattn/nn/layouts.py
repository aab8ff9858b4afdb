"""Features at points, in the layouts that people keep them in, as one padded batch and back.

| layout | features | points | how clouds are told apart |
|---|---|---|---|
| one cloud | (N, C) | (N, d) | |
| a batch | (B, N, C) | (B, N, d) | padding has mass 0 |
| packed | (T, C) | (T, d) | `offset`, where each cloud ends, or `batch`, the cloud of each point |
| a dict, as Pointcept's | `feat` | `coord` | `offset` or `batch`; masses, if any, in `mass` |
| an object or a dict, as PyG's | `x` | `pos` | `batch`, or one cloud; masses, if any, in `mass` |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qattn import _checks
from qattn.nn.records import Record
from qattn.ragged import to_packed, to_padded
from qattn.ranks import ALONE, Ranks

__all__ = ["PointModule"]


class PointModule(nn.Module):
    """From features at points to features at points, or of whole clouds, in any layout.

    Subclasses have `at_points(features, points, mass, **options)`, which takes features (B, N, C), points (B, N, d) and
    masses (B, N) to features (B, N, C') or (B, C').
    """

    at_points: Callable[..., Tensor]

    @property
    def ranks(self) -> Ranks:
        """Who holds the points of a cloud."""
        return ALONE

    def forward(
        self,
        features: Any,
        points: Tensor | None = None,
        mass: Tensor | None = None,
        *,
        offset: Any = None,
        batch: Any = None,
        **options: Any,
    ) -> Any:
        """New features, in the layout of the given ones.

        Args:
            features: Features (N, C), (B, N, C) or packed (T, C), in the dtype of the parameters. Or a dict or an
                object with `feat`, `coord` and `offset` or `batch`, or with `x`, `pos` and perhaps `batch`, as a
                `torch_geometric.data.Data`; and perhaps `mass`. A copy of it with new features comes back.
            points: Positions, in the same layout.
            mass: Masses, in the same layout, 0 for padding; equal within each cloud by default.
            offset: Where each cloud ends in a packed layout, B integers.
            batch: The cloud of each point in a packed layout, T sorted integers.
            **options: As `at_points` has them.
        """
        if (record := Record.of(features, points, mass, offset, batch)) is not None:
            return record.replaced(self(*record.arguments, **record.clouds, **options))
        is_packed = offset is not None or batch is not None
        points = _checks.features_at_points(features, points, mass, is_packed)
        if (parameter := next(self.parameters(), None)) is not None:
            _checks.dtype_of_parameters(features, parameter.dtype)
        if is_packed:
            padded, present = to_padded(features, offset=offset, batch=batch)
            _checks.no_empty_clouds(self.ranks.total(present.long()), "batch" if offset is None else "offset")
            x = to_padded(points, offset=offset, batch=batch)[0]
            x = torch.where(present[..., None], x, x[:, :1])  # padding stays within its cloud
            m = present.to(x) if mass is None else to_padded(mass, offset=offset, batch=batch)[0]
            out = self.at_points(padded, x, m / self.ranks.total(m)[..., None].clamp(min=1e-30), **options)
            return to_packed(out, present) if out.ndim == 3 else out
        if mass is None:
            ones = torch.ones(points.shape[:-1], dtype=points.dtype, device=points.device)
            mass = ones / self.ranks.total(ones)[..., None]
        if features.ndim == 3:
            return self.at_points(features, points, mass, **options)
        return self.at_points(features[None], points[None], mass[None], **options)[0]
