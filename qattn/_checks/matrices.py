"""Similarity matrices and graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qattn._checks.numbers import as_tensor, finite, floating, integer, shape_of

__all__ = ["edges", "is_sparse", "products", "similarity", "sorted_edges"]


def is_sparse(given: Any) -> bool:
    """Whether something is a sparse matrix of torch or SciPy."""
    return given.layout != torch.strided if isinstance(given, Tensor) else hasattr(given, "tocoo")


def similarity(numbers: Any) -> Tensor:
    """A symmetric matrix ≥ 0, (*batch, N, N)."""
    tensor = floating("similarity", numbers)
    if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] == 0:
        raise ValueError(f"`similarity` should have shape (*batch, N, N); got {shape_of(tensor)}.")
    finite("similarity", tensor, "Set them to 0 to leave those pairs out.")
    if (tensor < 0).any():
        raise ValueError(
            f"`similarity` should not be negative; {int((tensor < 0).sum())} of its {tensor.numel()} entries are. "
            "Take `similarity.clamp(min=0)`, or `exp` of a signed score."
        )
    gap = (tensor - tensor.mT).abs().amax()
    if gap > 1e-5 * tensor.abs().amax():
        raise ValueError(
            f"`similarity` should be symmetric; entries differ from their mirror image by up to {float(gap):.3g}. "
            "Take `(similarity + similarity.mT) / 2`."
        )
    return tensor


def products(given: Any, size: int | None) -> tuple[Callable[[Tensor], Tensor], Tensor, int]:
    """A symmetric matrix ≥ 0 by its products, tried on random signals: a function, an empty tensor like its, a size."""
    if hasattr(given, "matmat"):  # SciPy's
        if len(given.shape) != 2 or given.shape[0] != given.shape[1]:
            raise ValueError(f"`similarity` should be a square operator; got shape {tuple(given.shape)}.")
        size = given.shape[0]

        def product(x: Tensor) -> Tensor:
            return torch.as_tensor(np.asarray(given @ x.numpy(force=True)), dtype=x.dtype, device=x.device)

        like = torch.empty(0, dtype=torch.float32 if given.dtype == np.float32 else torch.float64)
    else:
        if size is None:
            raise ValueError("`size`, the number of rows, should be given with a function that multiplies.")
        product, like = given, torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    signals = torch.rand(integer("size", size, 1), 8, generator=generator).to(like.dtype)
    signals[:, :4] -= 0.5
    with torch.no_grad():
        found = product(signals)
    if not isinstance(found, Tensor) or found.shape != signals.shape:
        got = shape_of(found) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"The product of `similarity` with a tensor {shape_of(signals)} should have its shape; got {got}."
        )
    finite("similarity", found, "These are products with random signals.")
    if (found[:, 4:] < -1e-5 * found.abs().amax()).any():
        raise ValueError("`similarity` should not be negative; its product with positive signals is, in places.")
    gram = signals[:, :4].double().T @ found[:, :4].double()
    if ((gram - gram.T).abs() > 1e-4 * (signals[:, :4].norm() * found[:, :4].norm())).any():
        raise ValueError("`similarity` should be symmetric; ⟨u, Kv⟩ and ⟨Ku, v⟩ differ for random signals u and v.")
    return product, like, size


def edges(name: str, given: Any, size: int | None = None) -> tuple[Tensor, Tensor, int]:
    """The edges (2, E) sorted by rows, their weights (E,) and the number of vertices, of a symmetric matrix ≥ 0."""
    if isinstance(given, tuple):
        index, weight = given
        index = as_tensor("edge_index", index)
        if index.ndim != 2 or len(index) != 2 or index.is_floating_point():
            raise ValueError(
                f"`edge_index` should hold integers of shape (2, E); got {index.dtype} of {shape_of(index)}."
            )
        weight = torch.ones(index.shape[1], device=index.device) if weight is None else floating("edge_weight", weight)
        if weight.shape != index.shape[1:]:
            raise ValueError(
                f"`edge_weight` should have one number an edge, shape ({index.shape[1]},); got {shape_of(weight)}."
            )
        last = int(index.max()) if index.numel() else -1
        size = last + 1 if size is None else size
        if size < 1:
            raise ValueError("`edge_index` holds no edge. Give `size`, the number of vertices, with it.")
        if last >= size or (index < 0).any():
            raise ValueError(f"`edge_index` should name vertices from 0 to {size - 1}; got some that do not exist.")
        shape: tuple[int, ...] = (size, size)
    else:
        if is_sparse(given) and isinstance(given, Tensor):
            entries = given.to_sparse_coo().coalesce()
            index, weight, shape = entries.indices(), floating(name, entries.values()), tuple(given.shape)
        elif is_sparse(given):
            entries = given.tocoo()
            index = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
            weight, shape = floating(name, entries.data), tuple(given.shape)
        else:
            dense = floating(name, given)
            index = dense.nonzero().T
            weight, shape = dense[tuple(index)], tuple(dense.shape)
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
            remedy = " For an edge_index, give the pair `(edge_index, None)`." if shape[:1] == (2,) else ""
            raise ValueError(f"`{name}` should have shape (N, N); got {tuple(shape)}.{remedy}")
        if size is not None and size != shape[0]:
            raise ValueError(f"`size` is for an edge_index; this matrix has {shape[0]} vertices, not {size}.")
    finite(name, weight, "Leave those edges out.")
    if (weight < 0).any():
        raise ValueError(
            f"`{name}` should not be negative; {int((weight < 0).sum())} of its {len(weight)} entries are. "
            "Take their absolute values, or `exp` of a signed score."
        )
    if not _is_symmetric(index, weight.detach(), shape[0]):
        raise ValueError(
            f"`{name}` should be symmetric, with both directions of every edge and one weight for them. "
            "Take `(A + A.T) / 2`, or add the reversed edges."
        )
    return *sorted_edges(index, weight, shape[0]), shape[0]


def sorted_edges(index: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Edges (2, E) in the order of their rows and then columns, each once, with the sum of its weights (E,)."""
    keys, order = torch.sort(index[0] * size + index[1])  # a third of the time that `coalesce` takes
    weight = weight[order]
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    if not is_first.all():
        keys, number = keys[is_first], torch.cumsum(is_first, 0) - 1
        weight = weight.new_zeros(len(keys)).index_add(0, number, weight)
    return torch.stack([keys // size, keys % size]), weight


def _is_symmetric(index: Tensor, weight: Tensor, size: int) -> bool:
    """Whether Ax = Aᵀx for a random x, to five digits in each row: tells as much as all entries, without sorting."""
    x = 0.5 + torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    forth, back = (
        x.new_zeros(size).index_add(0, rows, weight.double() * x[columns]) for rows, columns in (index, index.flip(0))
    )
    return bool(((forth - back).abs() <= 1e-5 * torch.maximum(forth, back)).all())
