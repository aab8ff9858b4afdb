r"""The log-sum-exp of a kernel that returns only softmax averages.

One more key, the *sink*, gets a score c_i of our choice, and two more value channels tell the weight of the sink, w,
from that of all other keys, u: then lse_i = c_i + log u − log w, and out_i is divided by u. Both weights are sums of
exponentials taken relative to the larger, so c_i may be off by ±`_REACH`; where it is farther off, one of the two
vanishes, which tells in which direction to move it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qattn.attended import Attended
from qattn.attention.inputs import Inputs
from qattn.attention.score import pair_score

__all__ = ["attend_with_sink"]

_SMALLEST = 1e-30  # of a weight that float32 still holds to full precision
_REACH = 69.0  # −log(_SMALLEST)
_SAMPLE = 32


def _guess(inputs: Inputs) -> Tensor:
    """lse over a few keys, as if the others were like them; shape (B, N)."""
    stride = -(-inputs.key.shape[1] // _SAMPLE)
    key = inputs.key[:, ::stride].to(inputs.dtype)[:, None].unbind(-1)  # D × (B, 1, m)
    sigma = None if inputs.sigma is None else inputs.sigma.to(inputs.dtype)[:, None, None]
    scores = pair_score(inputs.score, inputs.query.to(inputs.dtype)[:, :, None].unbind(-1), key, sigma)  # (B, N, m)
    if inputs.bias is not None:
        scores = scores + inputs.bias[:, None, ::stride].to(inputs.dtype)
    lse = scores.logsumexp(-1)
    return torch.where(lse == -torch.inf, 0, lse)


def attend_with_sink(inputs: Inputs, average: Callable[[Tensor, Tensor], Tensor]) -> Attended:
    """Attention from a function `average(sink, value)`.

    It is given sink (B, N) and value (B, M + 1, C + 2) and returns softmax averages (B, N, C + 2) over all keys and one
    more, whose score is the sink.
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
