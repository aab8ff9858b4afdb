"""Wrong input to `attend`, one by one."""

import numpy as np
import pytest
import torch

from qattn import attend

POINTS = torch.randn(10, 3)
NAN = torch.tensor([[0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.zeros((4, 3)), POINTS), {}, TypeError, "`query` should be a torch.Tensor; got ndarray. Convert it with"),
        ((POINTS, POINTS.long()), {}, ValueError, "`key` should be of floating point; got int64"),
        ((POINTS[0], POINTS), {}, ValueError, r"`query` should have shape \(\*batch, N, D\); got \(3,\)"),
        ((POINTS[:, :0], POINTS[:, :0]), {}, ValueError, "at least one coordinate"),
        ((POINTS, POINTS[:, :2]), {}, ValueError, r"as many coordinates as `query` \(10, 3\).*got \(10, 2\)"),
        ((POINTS, POINTS, POINTS[:4]), {}, ValueError, r"a row for each key of `key` \(10, 3\).*got \(4, 3\)"),
        (
            (POINTS, POINTS),
            {"bias": POINTS[:3, 0]},
            ValueError,
            r"a number for each key of `key` \(10, 3\).*got \(3,\)",
        ),
        (
            (torch.randn(2, 5, 3), torch.randn(3, 5, 3)),
            {},
            ValueError,
            r"should broadcast.*`query` \(2,\), `key` \(3,\)",
        ),
        ((POINTS, POINTS.double()), {}, ValueError, "`key` should have the dtype of `query`, float32; got float64"),
        ((POINTS, POINTS.to("meta")), {}, ValueError, "`key` should be on the device of `query`, cpu; got meta"),
        ((NAN, POINTS), {}, ValueError, "`query` should be finite; 2 of its 6 numbers are NaN or infinite"),
        ((POINTS, NAN), {}, ValueError, "`key` should be finite; 2 of its 6 numbers"),
        ((POINTS, POINTS), {"bias": torch.full((10,), torch.nan)}, ValueError, "`bias` should be finite, or −inf"),
        ((POINTS, POINTS), {"bias": torch.full((10,), torch.inf)}, ValueError, "`bias` should be finite, or −inf"),
        ((POINTS, POINTS), {"tol": 0.0}, ValueError, "`tol` should be positive"),
    ],
)
def test_wrong_input_is_worded(arguments, options, error, message):
    with pytest.raises(error, match=message):
        attend(*arguments, **options)
