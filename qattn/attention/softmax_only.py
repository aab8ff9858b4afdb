r"""Log-sum-exp of kernels that return softmax averages only.

One more key, the *sink*, has a score c_i of our choice. Two more value channels measure the weight w of the sink and
the weight u of all other keys, so that lse_i = c_i + log u − log w, and out_i is divided by u. Both weights are
relative to the larger one, so c_i may differ from lse_i by up to ±`_REACH`. Beyond that one of the weights vanishes,
which tells the direction in which to move c_i.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.inputs import Inputs
from qattn.attention.score import pair_score

__all__ = ["attend_with_sink"]

_SMALLEST = 1e-30  # smallest weight that float32 holds to full precision
_REACH = 69.0  # −log(_SMALLEST)
_SAMPLE = 32  # keys from which the lse is guessed


def _guess(inputs: Inputs) -> Tensor:
    """Compute the lse over a few evenly spaced keys, shape (B, N), to start from."""
    stride = -(-inputs.key.shape[1] // _SAMPLE)
    key = inputs.key[:, ::stride].to(inputs.dtype)[:, None].unbind(-1)  # D × (B, 1, m)
    sigma = None if inputs.sigma is None else inputs.sigma.to(inputs.dtype)[:, None, None]
    scores = pair_score(inputs.score, inputs.query.to(inputs.dtype)[:, :, None].unbind(-1), key, sigma)  # (B, N, m)
    if inputs.bias is not None:
        scores = scores + inputs.bias[:, None, ::stride].to(inputs.dtype)
    lse = scores.logsumexp(-1)
    return torch.where(lse == -torch.inf, 0, lse)


def attend_with_sink(inputs: Inputs, average: Callable[[Tensor, Tensor], Tensor]) -> Attended:
    """Attend with a function that computes softmax averages over the keys and a sink.

    Args:
        inputs: Inputs of the attention.
        average: Function from sink (B, N) and value (B, M + 1, C + 2) to softmax averages (B, N, C + 2) over all keys
            and one more, whose score is the sink.
    """
    B, M, _ = inputs.key.shape
    C = inputs.channels
    value = inputs.key.new_zeros(B, M + 1, C + 2, dtype=inputs.dtype)
    if inputs.value is not None:
        value[:, :M, :C] = inputs.value
    value[:, :M, C] = 1
    value[:, M, C + 1] = 1
    sink = _guess(inputs)
    low, high = torch.full_like(sink, -torch.inf), torch.full_like(sink, torch.inf)
    step = _REACH
    is_empty = torch.zeros(B, 1, dtype=torch.bool, device=sink.device)
    if inputs.bias is not None:
        is_empty = (inputs.bias == -torch.inf).all(-1, keepdim=True)
    while True:
        out = average(sink, value)  # (B, N, C + 2)
        others, own = out[..., C], out[..., C + 1]
        too_low, too_high = own < _SMALLEST, (others < _SMALLEST) & ~is_empty
        if not (too_low | too_high).any():
            break
        low, high = torch.where(too_low, sink, low), torch.where(too_high, sink, high)
        moved = torch.where(
            high == torch.inf, low + step, torch.where(low == -torch.inf, high - step, (low + high) / 2)
        )
        sink = torch.where(too_low | too_high, moved, sink)
        step *= 2
    lse = sink + torch.log(others) - torch.log(own)
    if inputs.value is None:
        return Attended(None, lse)
    mean = out[..., :C] / torch.where(others == 0, 1, others)[..., None]
    return Attended(mean.to(inputs.value.dtype), lse)
