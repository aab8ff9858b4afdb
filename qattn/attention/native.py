"""The `native` backend: our own loop for CPUs, compiled by Numba, with differences taken directly.

No lift, so no cancellation; the work is shared by as many threads as torch uses. The threads live for one call only,
so the backend is safe in several Python threads at once and in forked workers. The loop is compiled on its first use
for a dtype and dimension, and kept on disk.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from qattn.attended import Attended
from qattn.attention.backend import Backend
from qattn.attention.inputs import Inputs
from qattn.lift import centre

__all__ = ["LOWEST", "TILE", "Native", "TilePairs", "attend_pairs"]

TILE = 64
_UNROLLED = 4  # dimensions up to this have a loop of their own
# Pairs of points handed to a thread at a time: the least pays for starting it, the most keeps threads equally busy.
_LEAST_PAIRS, _MOST_PAIRS = 2**21, 2**22
LOWEST = {32: -100.0, 64: -960.0}  # weights below 2 to this, by the bits of their dtype, count as 0


class TilePairs(NamedTuple):
    """Which tiles of keys each tile of queries attends to: keys[first[I]:last[I]] for the tile I of `TILE` rows.

    Tiles are numbered through the batch, each item's last tile filled up.
    """

    first: Tensor  # (T,) int64
    last: Tensor  # (T,) int64
    keys: Tensor  # (P,) int64


class Native(Backend):
    """Tiles of queries against tiles of keys."""

    name: ClassVar[str] = "native"
    tolerance: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-13,
        torch.float32: 1e-5,  # rounding of ½‖q − k‖² ≤ 200
        torch.float16: 1e-3,  # the same, and out rounded to its dtype
        torch.bfloat16: 1e-2,
    }

    def not_supported_reasons(self, inputs: Inputs) -> list[str]:
        reasons = []
        if inputs.device.type != "cpu":
            reasons.append(f"device is {inputs.device.type} (takes cpu)")
        if not inputs.is_gaussian:
            reasons.append("the score is not the Gaussian one, which is compiled in")
        return reasons

    def attend(self, inputs: Inputs) -> Attended:
        return attend_pairs(inputs, None)


def _tiles(x: Tensor) -> Tensor:
    """(B, N, E) in tiles (B, T, TILE, E), the last point repeated up to a full tile."""
    missing = -x.shape[1] % TILE
    x = torch.cat([x, x[:, -1:].expand(-1, missing, -1)], dim=1)
    return rearrange(x, "b (t i) e -> b t i e", i=TILE)


def _all_pairs(T: int, S: int, is_present: Tensor) -> TilePairs:
    """T tiles of queries with S tiles of keys in each item of a batch; items without any key (B,) cost nothing."""
    B = len(is_present)
    first = (S * torch.arange(B)).repeat_interleave(T)
    return TilePairs(first, first + S * is_present.repeat_interleave(T), torch.arange(B * S))


def attend_pairs(inputs: Inputs, pairs: TilePairs | None) -> Attended:
    """Attention over the given pairs of tiles; over all of them if None."""
    from qattn.attention import _loops, _simd  # here, because importing Numba takes a while

    B, N, D = inputs.query.shape
    M = inputs.key.shape[1]
    dtype = inputs.dtype
    # exp(b − ½‖q − k‖²) = 2^(β − ‖q − k‖²) once coordinates carry √(½ log₂e) and biases log₂e. The largest β of a
    # cloud is made 0.
    factor = math.sqrt(0.5 / math.log(2))
    centred = centre(inputs.query.to(dtype), inputs.key.to(dtype))  # small coordinates lose less to the factor
    query, key = (_tiles(x * factor) for x in centred)  # (B, T, TILE, D), (B, S, TILE, D)
    T, S = query.shape[1], key.shape[1]
    bias = torch.zeros(B, M, dtype=dtype) if inputs.bias is None else inputs.bias.to(dtype)
    top = bias.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)  # (B, 1)
    beta = pad((bias - top) / math.log(2), (0, S * TILE - M), value=-torch.inf).reshape(B, S, TILE)
    keys = rearrange([*key.unbind(-1), beta], "c b s i -> (b s) c i").contiguous()  # (B·S, D + 1, TILE)

    lanes = _simd.REGISTER_BYTES // dtype.itemsize
    channels = -(-inputs.channels // lanes) * lanes
    values = torch.zeros(B, S * TILE, channels, dtype=dtype)
    if inputs.value is not None:
        values[:, :M, : inputs.channels] = inputs.value
    lse = torch.empty(B * T, TILE, dtype=dtype)
    out = torch.empty(B * T, TILE, channels, dtype=dtype)

    if pairs is None:
        pairs = _all_pairs(T, S, bias.isfinite().any(-1))
    arrays = [x.numpy() for x in (query.flatten(0, 1), keys, values.reshape(B * S, TILE, channels), *pairs, lse, out)]
    # The least sum of a row that is not changed by weights counted as 0.
    tiny = M * 2.0 ** LOWEST[8 * dtype.itemsize] / torch.finfo(dtype).eps
    dims = (0,) * D if D <= _UNROLLED else ()
    total = max(1, TILE * TILE * int((pairs.last - pairs.first).sum()))
    share = min(_MOST_PAIRS, max(_LEAST_PAIRS, total // (4 * torch.get_num_threads())))
    chunk = max(1, share * len(pairs.first) // total)

    def run(begin: int) -> None:
        _loops.attend_tiles(*arrays[:6], begin, min(begin + chunk, B * T), tiny, dims, *arrays[6:])

    _share(run, range(0, B * T, chunk))
    lse = lse.reshape(B, -1)[:, :N] * math.log(2) + top
    if inputs.value is None:
        return Attended(None, lse)
    return Attended(out.reshape(B, T * TILE, channels)[:, :N, : inputs.channels].to(inputs.value.dtype), lse)


def _share(run: Callable[[int], None], chunks: range) -> None:
    """Runs all chunks on as many threads as torch would use, this one among them; an error drops those not begun."""
    waiting, lock = iter(chunks), threading.Lock()

    def work() -> None:
        try:
            while True:
                with lock:
                    begin = next(waiting, None)
                if begin is None:
                    return
                run(begin)
        except BaseException:  # an interrupt too
            with lock:
                for _ in waiting:
                    pass
            raise

    helpers = min(torch.get_num_threads(), len(chunks)) - 1
    if helpers <= 0:
        return work()
    with ThreadPoolExecutor(helpers) as pool:
        others = [pool.submit(work) for _ in range(helpers)]
        work()
        for other in others:
            other.result()
