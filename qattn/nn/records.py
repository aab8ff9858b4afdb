"""Features at points in one dict or object, under the names that libraries give them.

| | features | points | clouds |
|---|---|---|---|
| Pointcept | `feat` | `coord` | `offset` or `batch` |
| PyG | `x` | `pos` | `batch`, or one cloud |

Masses, if any, are `mass`. Names are all that counts: neither library is imported.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qattn import _checks

__all__ = ["Record"]

_FEATURES = {"feat": "coord", "x": "pos"}  # and the points that come with them
_NAMES = ("feat", "coord", "x", "pos", "offset", "batch", "mass")


@dataclass(frozen=True)
class Record:
    """A dict or an object that has been found to hold features at points."""

    given: Any
    name: str  # of the features

    @staticmethod
    def of(features: Any, *others: Any) -> "Record | None":
        """The record that features are; None if they are a tensor. `others` are what came beside it, none if right."""
        if isinstance(features, Tensor) or not (isinstance(features, Mapping) or hasattr(features, "pos")):
            return None
        names = [name for name in _NAMES if _get(features, name) is not None]
        found = next((name for name, points in _FEATURES.items() if name in names and points in names), None)
        _checks.point_record(found, names, "offset" in names or "batch" in names, others)
        return Record(features, str(found))

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """Features, points and masses."""
        points = _FEATURES[self.name]
        return _get(self.given, self.name), _get(self.given, points), _get(self.given, "mass")

    @property
    def clouds(self) -> dict[str, Any]:
        """`offset` or `batch`, as keywords; neither for one cloud."""
        offset = _get(self.given, "offset")
        return {"batch": _get(self.given, "batch")} if offset is None else {"offset": offset}

    def replaced(self, features: Tensor) -> Any:
        """A copy with new features, under the name of the given ones."""
        new = copy.copy(self.given)
        if isinstance(new, Mapping):
            new[self.name] = features  # type: ignore[index]
        else:
            setattr(new, self.name, features)
        return new


def _get(record: Any, name: str) -> Any:
    """What a dict or an object has under a name, or None."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)
