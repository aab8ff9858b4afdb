"""Which backend serves: the first without a reason against it, in an order that stands here for all to see."""

from qattn.attention.backend import Backend
from qattn.attention.flash_attn import FlashAttn
from qattn.attention.flex import Flex
from qattn.attention.inputs import Inputs
from qattn.attention.native import Native
from qattn.attention.reference import Reference
from qattn.attention.sdpa import Sdpa
from qattn.attention.xformers import Xformers

__all__ = ["BACKENDS", "ORDER", "select"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Native(), FlashAttn(), Sdpa(), Xformers(), Flex(), Reference())
}

# What `backend="auto"` tries, by device. Compiled Flex is left to those who ask for it on a CPU: it compiles for
# seconds a shape.
ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "sdpa", "reference"),
    "cuda": ("flash_attn", "sdpa", "xformers", "flex", "reference"),
    "other": ("sdpa", "reference"),
}


def select(inputs: Inputs, name: str) -> Backend:
    """The backend called `name`, or for "auto" the first in `ORDER` that takes the inputs."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f'`backend` should be "auto" or one of {", ".join(BACKENDS)}; got {name!r}.')
    candidates = ORDER.get(inputs.device.type, ORDER["other"]) if name == "auto" else (name,)
    for candidate in candidates:
        if not BACKENDS[candidate].not_supported_reasons(inputs):
            return BACKENDS[candidate]
    raise NotImplementedError(_message(inputs, name))


def _message(inputs: Inputs, name: str) -> str:
    """What came, and what each backend says to it."""
    subject = "No attention backend takes" if name == "auto" else f'`backend="{name}"` does not take'
    width = max(map(len, BACKENDS)) + 1
    lines = [f"{subject} these inputs:", inputs.describe()]
    for other, backend in BACKENDS.items():
        reasons = backend.not_supported_reasons(inputs)
        lines.append(f"  {other + ':':{width}} {'; '.join(reasons) or 'takes them'}")
    return "\n".join(lines)
