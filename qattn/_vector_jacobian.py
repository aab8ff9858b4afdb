"""Vector-Jacobian products of functions, independent of the graph in which their inputs were computed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["vector_jacobian"]


def vector_jacobian(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    cotangents: Tensor | tuple[Tensor, ...],
) -> list[Tensor | None]:
    """Compute the vector-Jacobian product of `function` at `inputs`, differentiably if gradients are enabled.

    Args:
        function: Function of all inputs.
        inputs: Tensors, or None.
        cotangents: Cotangents of the results.

    Returns:
        One tensor per input, or None if it requires no gradient or the results do not depend on it.
    """
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
        results = function(*aliases)
        results = results if isinstance(results, tuple) else (results,)
        cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
        leaves = [alias for alias in aliases if alias is not None and alias.requires_grad]
        # Results may depend on some of the inputs only, none of which requires a gradient.
        pairs = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
        if not leaves or not pairs:
            return [None] * len(inputs)
        outputs, grad_outputs = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(outputs, leaves, grad_outputs, create_graph=is_recorded, allow_unused=True))
    return [next(grads) if alias is not None and alias.requires_grad else None for alias in aliases]
