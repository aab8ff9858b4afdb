"""Pull-backs of functions at given inputs, as if nothing before those existed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["vector_jacobian"]


def vector_jacobian(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    cotangents: Tensor | tuple[Tensor, ...],
) -> list[Tensor | None]:
    """The pull-back of `function` at `inputs`, and of nothing that they in turn depend on; itself differentiable."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
        results = function(*aliases)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [alias for alias in aliases if alias is not None and alias.requires_grad]
        if not wanted or not any(result.requires_grad for result in results):
            return [None] * len(inputs)
        found = iter(torch.autograd.grad(results, wanted, cotangents, create_graph=is_recorded, allow_unused=True))
    return [next(found) if alias is not None and alias.requires_grad else None for alias in aliases]
