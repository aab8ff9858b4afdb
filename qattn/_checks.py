"""Wrong input, worded once: what was expected, what came, and the remedy."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "all_or_none_sharded",
    "attention_arguments",
    "bandwidth",
    "bias_of_kernel",
    "blocks_are_few",
    "channels",
    "counts_of_clouds",
    "covariances",
    "divisible",
    "edges",
    "engine_takes",
    "features",
    "features_at_points",
    "floating",
    "frequencies",
    "frequencies_suffice",
    "functional_map",
    "gradients",
    "heads",
    "held_alone",
    "integer",
    "is_sparse",
    "kernel_of",
    "kernels_of_one_size",
    "mass",
    "mesh",
    "not_negative",
    "on_grid",
    "one_bandwidth",
    "one_cloud",
    "one_of",
    "point_dict",
    "point_kernel",
    "point_map",
    "points",
    "positive",
    "positive_rows",
    "potential",
    "products",
    "range_of_bandwidths",
    "range_of_biases",
    "same_dimension",
    "same_on_all_ranks",
    "same_points",
    "shape_on_grid",
    "signal",
    "similarity",
    "simplices",
    "sizes_of_bases",
    "spacing",
    "splats",
    "times",
    "voxels",
    "weights",
    "whole_part",
    "with_gradients",
]


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _floating_tensor(name: str, tensor: Any, least_axes: int, axes: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"`{name}` should be a torch.Tensor; got {type(tensor).__name__}. Convert it with `torch.as_tensor`."
        )
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`{name}` should be of floating point; got {dtype}. Convert it with `{name}.float()`.")
    if tensor.ndim < least_axes:
        raise ValueError(
            f"`{name}` should have shape {axes}; got {_shape(tensor)}. Add the missing axis, as in `{name}[None]`."
        )


def _finite(name: str, tensor: Tensor, remedy: str) -> None:
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise ValueError(
            f"`{name}` should be finite; {count} of its {tensor.numel()} numbers are NaN or infinite. {remedy}"
        )


def attention_arguments(
    query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, tol: float
) -> torch.Size:
    """Checks the arguments of `attend` and returns their common batch shape."""
    _floating_tensor("query", query, 2, "(*batch, N, D)")
    _floating_tensor("key", key, 2, "(*batch, M, D)")
    D, M = query.shape[-1], key.shape[-2]
    if D == 0:
        raise ValueError(f"`query` should have at least one coordinate; got shape {_shape(query)}.")
    if key.shape[-1] != D:
        raise ValueError(
            f"`key` should have as many coordinates as `query` {_shape(query)}: shape (*batch, M, {D}); "
            f"got {_shape(key)}."
        )
    batches = {"query": query.shape[:-2], "key": key.shape[:-2]}
    if value is not None:
        _floating_tensor("value", value, 2, "(*batch, M, C)")
        if value.shape[-2] != M:
            raise ValueError(
                f"`value` should have a row for each key of `key` {_shape(key)}: shape (*batch, {M}, C); "
                f"got {_shape(value)}."
            )
        batches["value"] = value.shape[:-2]
    if bias is not None:
        _floating_tensor("bias", bias, 1, "(*batch, M)")
        if bias.shape[-1] != M:
            raise ValueError(
                f"`bias` should have a number for each key of `key` {_shape(key)}: shape (*batch, {M}); "
                f"got {_shape(bias)}."
            )
        batches["bias"] = bias.shape[:-1]
    try:
        batch = torch.broadcast_shapes(*batches.values())
    except RuntimeError:
        shapes = ", ".join(f"`{name}` {tuple(shape)}" for name, shape in batches.items())
        raise ValueError(
            f"The batch axes should broadcast to one shape; got {shapes}. Give them equal sizes, or 1."
        ) from None
    for name, tensor in (("key", key), ("value", value), ("bias", bias)):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"`{name}` should be on the device of `query`, {query.device}; got {tensor.device}. "
                f"Move it with `{name}.to(query.device)`."
            )
    if key.dtype != query.dtype:
        got, expected = (str(t.dtype).removeprefix("torch.") for t in (key, query))
        raise ValueError(
            f"`key` should have the dtype of `query`, {expected}; got {got}. Convert it with `key.to(query.dtype)`."
        )
    if not tol > 0:
        raise ValueError(f"`tol` should be positive, the error of lse that is acceptable; got {tol}.")
    _finite("query", query, "Drop those rows first.")
    if key is not query:
        remedy = "Drop those rows, or leave them out with a bias of −inf after setting their coordinates to 0."
        _finite("key", key, remedy)
    if bias is not None and not (bias < torch.inf).all():  # false for NaN too
        raise ValueError("`bias` should be finite, or −inf where a key is absent; some of its numbers are NaN or +inf.")
    return batch


def _tensor(name: str, numbers: Any) -> Tensor:
    """Anything array-like as a tensor."""
    if isinstance(numbers, Tensor):
        return numbers
    try:
        return torch.from_numpy(np.require(numbers, requirements=["C", "W"]))
    except TypeError:
        raise TypeError(f"`{name}` should be a tensor or an array of numbers; got {type(numbers).__name__}.") from None


def floating(name: str, numbers: Any) -> Tensor:
    """Anything array-like as a tensor of floating point; integers are converted."""
    tensor = _tensor(name, numbers)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"`{name}` should be real numbers; got {str(tensor.dtype).removeprefix('torch.')}.")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks a word."""
    if value not in choices:
        raise ValueError(f"`{name}` should be {' or '.join(map(repr, choices))}; got {value!r}.")


def positive(name: str, number: Any) -> None:
    """Checks a number or a tensor of them."""
    numbers = torch.as_tensor(number)
    if not ((numbers > 0) & (numbers < torch.inf)).all():
        raise ValueError(
            f"{name} should be positive and finite; got {number if numbers.numel() == 1 else 'some that are not'}."
        )


def integer(name: str, number: Any, least: int) -> int:
    """Checks a count."""
    if isinstance(number, bool) or int(number) != number or number < least:
        raise ValueError(f"`{name}` should be an integer of at least {least}; got {number}.")
    return int(number)


def points(name: str, numbers: Any, dimensions: Sequence[int] = (), *, least: int = 1) -> Tensor:
    """Positions (*batch, N, d) of at `least` so many points, d one of `dimensions` if there are any."""
    tensor = floating(name, numbers)
    if tensor.ndim < 2:
        raise ValueError(
            f"`{name}` should have shape (*batch, N, d); got {_shape(tensor)}. "
            f"For points on a line, give them as `{name}[:, None]`."
        )
    if tensor.shape[-2] < least or tensor.shape[-1] == 0:
        raise ValueError(f"`{name}` should hold at least one point with one coordinate; got shape {_shape(tensor)}.")
    if dimensions and tensor.shape[-1] not in dimensions:
        expected = " or ".join(f"(*batch, N, {d})" for d in dimensions)
        raise ValueError(f"`{name}` should have shape {expected}; got {_shape(tensor)}.")
    _finite(name, tensor, "Drop those points first, or set them to 0 and give them mass 0.")
    return tensor


def simplices(name: str, numbers: Any, corners: int, vertices: Tensor) -> Tensor:
    """The corners (F, corners) of triangles or tetrahedra, as numbers of vertices."""
    tensor = _tensor(name, numbers).to(vertices.device)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`{name}` should be integers, which number the vertices; got {dtype}.")
    if tensor.ndim != 2 or tensor.shape[-1] != corners or len(tensor) == 0:
        raise ValueError(f"`{name}` should have shape (F, {corners}) with at least one row; got {_shape(tensor)}.")
    tensor, N = tensor.long(), vertices.shape[-2]
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= N:
        raise ValueError(
            f"`{name}` should number vertices from 0 to {N - 1}; got numbers from {low} to {high}."
            + (" They seem to count from 1: subtract 1." if low == 1 and high == N else "")
        )
    return tensor


def mesh(given: Any) -> tuple[Tensor, Tensor]:
    """The vertices (N, 3) and the triangles (F, 3) of one mesh in space: a pair, or an object that has them."""
    if hasattr(given, "vertices") and hasattr(given, "faces"):  # a trimesh.Trimesh, which need not be imported for it
        given = given.vertices, given.faces
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(
            f"`mesh` should be a pair (vertices, faces) or a trimesh.Trimesh; got {type(given).__name__}. "
            "A file is read by `trimesh.load_mesh`."
        )
    vertices, faces = given
    positions = points("vertices", vertices, (3,))
    if positions.ndim != 2:
        raise ValueError(f"`vertices` should have shape (N, 3), one mesh in space; got {_shape(positions)}.")
    return positions, simplices("faces", faces, 3, positions)


def bandwidth(sigma: Any, cloud: Tensor) -> Tensor:
    """σ without axes or (H,), in the dtype of the logarithms."""
    dtype = torch.promote_types(cloud.dtype, torch.float32)
    tensor = torch.as_tensor(sigma, dtype=dtype, device=cloud.device)
    if tensor.ndim > 1:
        raise ValueError(
            f"`sigma` should be a number, or of shape (H,) for one head a bandwidth; got {_shape(tensor)}."
        )
    positive("`sigma`", tensor.detach() if tensor.ndim else float(tensor.detach()))
    return tensor


def covariances(numbers: Any, means: Tensor) -> tuple[Tensor, str]:
    """Covariances of means (*batch, N, d), and their kind: "isotropic", "diagonal" or "full"."""
    tensor = floating("covariances", numbers).to(means)
    *batch, d = means.shape
    shapes = {"isotropic": (*batch,), "diagonal": (*batch, d), "full": (*batch, d, d)}
    kind = next((kind for kind, shape in shapes.items() if tensor.shape == shape), None)
    if kind is None:
        raise ValueError(
            f"`covariances` should have shape {shapes['isotropic']} for variances, {shapes['diagonal']} for diagonal "
            f"matrices or {shapes['full']} for full ones, with means {_shape(means)}; got {_shape(tensor)}."
        )
    _finite("covariances", tensor, "Drop those components.")
    found = tensor.detach()
    if kind == "full":
        gap, size = (found - found.mT).abs().amax(), found.abs().amax()
        if gap > 1e-5 * size:
            raise ValueError(
                f"`covariances` should be symmetric; some entries differ by {float(gap):.3g} from their mirror image. "
                "Take `(covariances + covariances.mT) / 2`."
            )
        found = torch.linalg.eigvalsh(found.double())
    if (found < -1e-6 * found.abs().amax(-1, keepdim=True)).any() or (kind != "full" and (found < 0).any()):
        raise ValueError(
            "`covariances` should have no negative variance in any direction; some do. "
            "Give variances, and not their logarithms, nor precisions of the wrong sign."
        )
    return tensor, kind


def weights(numbers: Any, means: Tensor) -> Tensor:
    """Weights (*batch, N) ≥ 0 of components with means (*batch, N, d); equal by default."""
    dtype = torch.promote_types(means.dtype, torch.float32)
    if numbers is None:
        return torch.ones(means.shape[-2], dtype=dtype, device=means.device)
    tensor = floating("weights", numbers).to(means.device, dtype)
    if tensor.shape not in (means.shape[:-1], means.shape[-2:-1]):
        raise ValueError(
            f"`weights` should have shape {tuple(means.shape[:-1])}, one a component; got {_shape(tensor)}."
        )
    _finite("weights", tensor, "Components without weight get 0.")
    if (tensor < 0).any() or (tensor.sum(-1) == 0).any():
        raise ValueError(
            "`weights` should be 0 or more, with a positive sum. For logits, take `torch.sigmoid` of them."
        )
    return tensor


def splats(means: Tensor, log_scales: Any, quaternions: Any, logit_opacities: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log scales (N, 3), quaternions (N, 4) and logits (N,) of splats at means (N, 3)."""
    N = means.shape[0]
    if means.shape != (N, 3):
        raise ValueError(f"`means` of splats should have shape (N, 3); got {_shape(means)}.")
    given = {
        "log_scales": (log_scales, (N, 3)),
        "quaternions": (quaternions, (N, 4)),
        "logit_opacities": (logit_opacities, (N,)),
    }
    tensors = []
    for name, (numbers, shape) in given.items():
        tensor = floating(name, numbers).to(means)
        if name == "logit_opacities" and tensor.shape == (N, 1):
            tensor = tensor[:, 0]
        if tensor.shape != shape:
            raise ValueError(f"`{name}` of {N} splats should have shape {shape}; got {_shape(tensor)}.")
        _finite(name, tensor, "Drop those splats.")
        tensors.append(tensor)
    if (tensors[1] == 0).all(-1).any():
        raise ValueError("`quaternions` should not be 0: those of no rotation are (1, 0, 0, 0).")
    return tensors[0], tensors[1], tensors[2]


def same_dimension(new: Tensor, old: Tensor) -> None:
    """Checks points at which a kernel is to be evaluated."""
    if new.shape[-1] != old.shape[-1]:
        raise ValueError(
            f"`points` should have {old.shape[-1]} coordinates, as the kernel's own; got shape {_shape(new)}."
        )


def point_kernel(kernel: Any, kind: type) -> Any:
    """A kernel that can be evaluated at other points, or why it cannot."""
    if not isinstance(kernel, kind):
        raise ValueError(f"{kernel!r} is not a function of points, so it cannot be evaluated at other ones.")
    return kernel


def kernels_of_one_size(shapes: Sequence[torch.Size]) -> None:
    """Checks the terms of a sum."""
    try:
        fits = len({shape[-2:] for shape in shapes}) == 1 and torch.broadcast_shapes(*shapes) is not None
    except RuntimeError:
        fits = False
    if not fits:
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"The kernels of a sum should have one size and batches that broadcast; got {got}.")


def all_or_none_sharded(are_alone: Sequence[bool]) -> None:
    """Checks the terms of a sum, which may lie on several ranks."""
    if len(set(are_alone)) > 1:
        raise ValueError("The kernels of a sum should all be sharded, or none of them. Make each a `ShardedGaussian`.")


def held_alone(name: str, ranks: Any) -> None:
    """Checks that all sites of a kernel are here."""
    if not ranks.is_alone:
        raise ValueError(
            f"`{name}` needs all sites in one process, and this kernel is sharded over several. Gather its points and "
            "make a `GaussianKernel` of them."
        )


def same_on_all_ranks(name: str, numbers: Sequence[Sequence[float]]) -> None:
    """Checks what all ranks should have given alike, one row of numbers a rank."""
    if any(list(row) != list(numbers[0]) for row in numbers):
        raise ValueError(
            f"{name} should be the same on all ranks; got {', '.join(str(list(row)) for row in numbers)}. "
            "A rank without points gives an empty shard, of shape (*batch, 0, d)."
        )


def similarity(numbers: Any) -> Tensor:
    """A symmetric matrix ≥ 0, (*batch, N, N)."""
    tensor = floating("similarity", numbers)
    if tensor.ndim < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] == 0:
        raise ValueError(f"`similarity` should have shape (*batch, N, N); got {_shape(tensor)}.")
    _finite("similarity", tensor, "Set them to 0 to leave those pairs out.")
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
        got = _shape(found) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"The product of `similarity` with a tensor {_shape(signals)} should have its shape; got {got}."
        )
    _finite("similarity", found, "These are products with random signals.")
    if (found[:, 4:] < -1e-5 * found.abs().amax()).any():
        raise ValueError("`similarity` should not be negative; its product with positive signals is, in places.")
    gram = signals[:, :4].double().T @ found[:, :4].double()
    if ((gram - gram.T).abs() > 1e-4 * (signals[:, :4].norm() * found[:, :4].norm())).any():
        raise ValueError("`similarity` should be symmetric; ⟨u, Kv⟩ and ⟨Ku, v⟩ differ for random signals u and v.")
    return product, like, size


def whole_part(t: float, spectrum: Any) -> int:
    """How often an operator is applied for its power t ≥ 0; a fraction is left to a spectrum."""
    not_negative("t", t)
    if int(t) != t and spectrum is None:
        raise ValueError(
            f"`t` should be an integer; got {t}. For a fraction of it, give the modes to take it of: "
            "`q.power(t, signal, spectrum=qattn.eigsh(q, k))`."
        )
    return int(t)


def not_negative(name: str, number: float) -> float:
    """Checks a number that may be 0."""
    if not 0 <= number < float("inf"):
        raise ValueError(f"`{name}` should be 0 or more, and finite; got {number}.")
    return float(number)


def is_sparse(given: Any) -> bool:
    """Whether something is a sparse matrix of torch or SciPy."""
    return given.layout != torch.strided if isinstance(given, Tensor) else hasattr(given, "tocoo")


def edges(name: str, given: Any, size: int | None = None) -> tuple[Tensor, Tensor, int]:
    """The edges (2, E) sorted by rows, their weights (E,) and the number of vertices, of a symmetric matrix ≥ 0."""
    if isinstance(given, tuple):
        index, weight = given
        index = torch.as_tensor(index)
        if index.ndim != 2 or len(index) != 2 or index.is_floating_point():
            raise ValueError(
                f"`edge_index` should hold integers of shape (2, E); got {index.dtype} of {_shape(index)}."
            )
        weight = torch.ones(index.shape[1], device=index.device) if weight is None else floating("edge_weight", weight)
        if weight.shape != index.shape[1:]:
            raise ValueError(
                f"`edge_weight` should have one number an edge, shape ({index.shape[1]},); got {_shape(weight)}."
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
    _finite(name, weight, "Leave those edges out.")
    if (weight < 0).any():
        raise ValueError(
            f"`{name}` should not be negative; {int((weight < 0).sum())} of its {len(weight)} entries are. "
            "Take their absolute values, or `exp` of a signed score."
        )
    matrix = torch.sparse_coo_tensor(index, weight, shape, check_invariants=False).coalesce()
    index, weight = matrix.indices(), matrix.values()
    mirrored = torch.sparse_coo_tensor(index.flip(0), weight, shape, check_invariants=False).coalesce()
    is_symmetric = mirrored.indices().shape == index.shape and (mirrored.indices() == index).all()
    if not is_symmetric or ((mirrored.values() - weight).abs() > 1e-5 * torch.maximum(mirrored.values(), weight)).any():
        raise ValueError(
            f"`{name}` should be symmetric, with both directions of every edge and one weight for them. "
            "Take `(A + A.T) / 2`, or add the reversed edges."
        )
    return index, weight, shape[0]


def voxels(name: str, given: Any) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """The occupied cells (N,) of a grid as flat numbers, their weights (N,) or None for a mask, and its shape."""
    grid = _tensor(name, given)
    shape = tuple(grid.shape)
    if not 1 <= len(shape) <= 3:
        raise ValueError(
            f"`{name}` should be a grid with 1, 2 or 3 axes; got shape {shape}. Make a kernel for each grid of a batch."
        )
    is_mask, cells = grid.dtype == torch.bool, None
    if is_sparse(grid):
        entries = (grid.to(torch.uint8) if is_mask else grid).to_sparse_coo().coalesce()  # repeated entries add up
        if entries.dense_dim():
            raise ValueError(f"`{name}` should be sparse along all its axes; {entries.dense_dim()} of them are dense.")
        values, cells = entries.values(), entries.indices()[0]
        for i, count in zip(entries.indices()[1:], shape[1:], strict=True):
            cells = cells * count + i
    else:
        values = grid.reshape(-1)
    if not is_mask:
        values = floating(name, values)
        _finite(name, values, "Set them to 0 to leave those voxels out.")
        if (values < 0).any():
            raise ValueError(
                f"`{name}` should not be negative; {int((values < 0).sum())} of its {len(values)} weights are. "
                f"Take `{name}.clamp(min=0)`, or for a signed distance the mask `distance < 0`."
            )
    occupied = (values > 0).nonzero()[:, 0]
    if len(occupied) == 0:
        raise ValueError(f"`{name}` should hold at least one occupied voxel; all of shape {shape} are empty.")
    weights = None if is_mask else values[occupied].to(torch.promote_types(values.dtype, torch.float32))
    return occupied if cells is None else cells[occupied], weights, shape


def spacing(numbers: Any, axes: int) -> tuple[float, ...]:
    """The size of a voxel along each axis."""
    tensor = torch.as_tensor(numbers, dtype=torch.float64)
    if tensor.ndim > 1 or (tensor.ndim == 1 and len(tensor) != axes):
        raise ValueError(
            f"`spacing` should be a number, or one for each of the {axes} axes of the grid; got {_shape(tensor)}."
        )
    positive("`spacing`", tensor)
    return tuple(tensor.expand(axes).tolist())


def one_bandwidth(sigma: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ without axes."""
    tensor = torch.as_tensor(sigma, dtype=dtype, device=device)
    if tensor.ndim > 0:
        raise ValueError(
            f"`sigma` should be one number; got shape {_shape(tensor)}. Make a kernel for each bandwidth, and add them "
            "or use them by themselves."
        )
    positive("`sigma`", float(tensor.detach()))
    return tensor


def range_of_biases(span: float) -> None:
    """Checks that sums of e^b can be formed in float64."""
    if span > 650:
        raise ValueError(
            f"The biases of the voxels that are present should be within 650 nats of one another; got {span:.0f}. "
            "Give the lightest of them mass 0, or take `GaussianKernel(kernel.points, kernel.sigma)`."
        )


def blocks_are_few(numbers: int, sites: int) -> None:
    """Checks that memory stays in proportion to the voxels."""
    if numbers > max(2**27, 256 * sites):
        raise ValueError(
            f"With this bandwidth {sites} voxels would need {numbers:.1e} numbers, as its reach is long for so few. "
            "Take `GaussianKernel(kernel.points, kernel.sigma)`, or a coarser grid."
        )


def on_grid(numbers: Any, grid: tuple[int, ...], device: torch.device) -> Tensor:
    """Values (*grid, …)."""
    tensor = torch.as_tensor(numbers)
    if tuple(tensor.shape[: len(grid)]) != grid:
        expected = ", ".join(map(str, grid))
        raise ValueError(f"`grid` should have shape ({expected}, …), as that of the kernel; got {_shape(tensor)}.")
    if tensor.device != device:
        raise ValueError(f"`grid` should be on {device}, where the kernel is; got {tensor.device}.")
    return tensor


def shape_on_grid(values: Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (*grid,) or (*grid, C) of a signal (N,) or (N, C) on a grid, if that is not too much."""
    if values.ndim > 2:
        raise ValueError(f"`signal` should have shape (N,) or (N, C); got {_shape(values)}.")
    shape = (*grid, *values.shape[1:])
    size = math.prod(shape) * values.dtype.itemsize
    if size > 2**30:
        raise ValueError(
            f"`to_grid` would make a grid of shape {shape}, {size / 2**30:.1f} GB. "
            "Place the signal yourself with `kernel.index`, in the part of the grid that you need."
        )
    return shape


def bias_of_kernel(bias: Tensor, batch: torch.Size) -> None:
    """Checks a bias (*batch, M) for a kernel whose points have been prepared."""
    if torch.broadcast_shapes(bias.shape[:-1], batch) != batch:
        raise ValueError(
            f"`bias` should have the batch axes {tuple(batch)} of the kernel; got shape {_shape(bias)}. "
            'Give the points those axes too, or take `method="exact"`.'
        )


def engine_takes(engine: Any, inputs: Any) -> Any:
    """An engine that was prepared before its inputs were known, or why it cannot take them."""
    reasons = engine.not_supported_reasons(inputs)
    if reasons:
        raise NotImplementedError(
            f"The method of the kernel does not take these inputs:\n{inputs.describe()}\n  {'; '.join(reasons)}"
        )
    return engine


def mass(numbers: Any, kernel: Any) -> Tensor:
    """Masses (*batch, N) ≥ 0 with a positive sum, for a kernel of shape (*batch, N, N); 1/N each by default."""
    shape, N = kernel.shape, kernel.shape[-1]
    if numbers is None:
        return torch.full((N,), 1 / N, dtype=kernel.dtype, device=kernel.device)
    tensor = floating("mass", numbers).to(kernel.device, kernel.dtype)
    if tensor.ndim == 0 or tensor.shape[-1] != N:
        raise ValueError(
            f"`mass` should have shape {(*shape[:-2], N)}, one mass a point, or one that broadcasts to it; "
            f"got {_shape(tensor)}. Leave it out for equal masses."
        )
    try:
        fits = torch.broadcast_shapes(tensor.shape[:-1], shape[:-2]) == shape[:-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"`mass` should broadcast to the shape {(*shape[:-2], N)} of the points; got {_shape(tensor)}. "
            "With heads, masses of a batch need an axis for them: `mass[..., None, :]`."
        )
    _finite("mass", tensor, "Points without mass get 0.")
    if (tensor < 0).any():
        raise ValueError(
            f"`mass` should not be negative; {int((tensor < 0).sum())} of its {tensor.numel()} numbers are."
        )
    if (kernel.ranks.total(tensor.detach()) == 0).any():
        raise ValueError("`mass` should have a positive sum in each cloud; it is all 0 in at least one.")
    return tensor


def potential(numbers: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A potential to start from, (*batch, N)."""
    tensor = floating("init", numbers).to(device, dtype)
    if tensor.shape != shape:
        raise ValueError(
            f"`init` should have shape {tuple(shape)}, a potential of the same kernel; got {_shape(tensor)}."
        )
    _finite("init", tensor, "Start without it.")
    return tensor


def signal(numbers: Any, shape: torch.Size, device: torch.device) -> Tensor:
    """Values (M,), (M, C) or (*batch, M, C) for an operator of shape (*batch, N, M)."""
    tensor = floating("signal", numbers)
    M = shape[-1]
    axis = -1 if tensor.ndim == 1 else -2
    if tensor.ndim == 0 or tensor.shape[axis] != M:
        raise ValueError(
            f"`signal` should have shape ({M},), ({M}, C) or (*batch, {M}, C), one row a point; got {_shape(tensor)}."
        )
    if tensor.device != device:
        raise ValueError(f"`signal` should be on {device}, where the operator is; got {tensor.device}.")
    return tensor


def kernel_of(given: Any, sigma: Any, options: dict[str, Any], kind: type, gaussian: Callable[..., Any]) -> Any:
    """A kernel as given, or the Gaussian one of points with a bandwidth."""
    if isinstance(given, kind):
        if sigma is not None or options:
            extra = ", ".join(["sigma"] * (sigma is not None) + list(options))
            raise ValueError(f"{extra} belong to the kernel, which is given already. Set them when making it.")
        return given
    if sigma is None:
        raise ValueError("`sigma` should be given with points: the bandwidth, in units of the points.")
    return gaussian(given, sigma, **options)


def positive_rows(lse: Tensor) -> None:
    """Checks the logarithms of row sums that are to be divided by."""
    if (lse == -torch.inf).any():
        raise ValueError(
            f"Each row of the kernel should have a positive sum; {int((lse == -torch.inf).sum())} of {lse.numel()} "
            "are 0. Leave those sites out, or give them a similarity to themselves."
        )


def counts_of_clouds(packed: Tensor, offset: Tensor | None, batch: Tensor | None) -> Tensor:
    """The sizes (B,) of packed clouds, from where they end or from the number of each row."""
    if (offset is None) == (batch is None):
        raise ValueError("Give either `offset`, where each cloud ends, or `batch`, the cloud of each row.")
    T = len(packed)
    if offset is not None:
        counts = torch.diff(offset, prepend=offset.new_zeros(1))
        if offset.ndim != 1 or len(offset) == 0 or int(offset[-1]) != T or (counts < 0).any():
            raise ValueError(
                f"`offset` should rise to the number of rows, {T}, without a leading 0; got {offset.tolist()[:8]}. "
                "From `cu_seqlens`, take `cu_seqlens[1:]`."
            )
        return counts
    assert batch is not None
    if batch.shape != (T,) or T == 0 or (torch.diff(batch) < 0).any() or int(batch[0]) < 0:
        raise ValueError(f"`batch` should be sorted, from 0, with one number a row, shape ({T},); got {_shape(batch)}.")
    return torch.bincount(batch)


def frequencies(name: str, numbers: Any, vectors: Tensor) -> Tensor:
    """Eigenvalues (k,) of a Laplacian, ascending, one for each of eigenvectors (N, k)."""
    tensor, k = _tensor(name, numbers).to(vectors), vectors.shape[-1]
    if tensor.shape != (k,):
        raise ValueError(
            f"`{name}` should have shape ({k},), one for each eigenvector of the spectrum; got {_shape(tensor)}."
        )
    _finite(name, tensor, "Take fewer eigenpairs: an eigenvalue of Q of 0 or less stands for none of a Laplacian.")
    if (torch.diff(tensor) < 0).any():
        raise ValueError(
            f"`{name}` should ascend, from 0 for the constants; got {tensor.tolist()[:4]}… "
            "Of eigenvalues of Q, take `laplacian_eigenvalues(values, sigma)`."
        )
    return tensor


def frequencies_suffice(positive: Tensor, least: int) -> None:
    """Checks that there are frequencies above 0, different ones, to choose scales by."""
    if len(positive) < least:
        raise ValueError(
            f"`frequencies` should hold at least {least} above 0 that differ; got {len(positive)}, as there is a 0 for "
            "each part of a shape. Compute more eigenpairs."
        )


def times(numbers: Any, like: Tensor) -> Tensor:
    """Times (T,) ≥ 0."""
    tensor = _tensor("times", numbers).to(like)
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"`times` should have shape (T,); got {_shape(tensor)}. For one time, give `[t]`.")
    _finite("times", tensor, "Heat that has spread for long is 1 everywhere.")
    if (tensor < 0).any():
        raise ValueError(f"`times` should not be negative; {int((tensor < 0).sum())} of its {len(tensor)} numbers are.")
    return tensor


def point_map(numbers: Any, source: Tensor, target: Tensor) -> Tensor:
    """A source point for each target point, integers (N_target,), of vectors (N_source, k) and (N_target, k)."""
    tensor, (N, M) = _tensor("index", numbers).to(source.device), (len(source), len(target))
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"`index` should be integers, the source point of each target point; got {dtype}.")
    if tensor.shape != (M,):
        raise ValueError(
            f"`index` should have shape ({M},), a source point for each target point; got {_shape(tensor)}."
            + (" It seems to map the source to the target: exchange the two." if tensor.shape == (N,) else "")
        )
    low, high = (int(end) for end in tensor.aminmax())
    if low < 0 or high >= N:
        raise ValueError(f"`index` should number source points from 0 to {N - 1}; got numbers from {low} to {high}.")
    return tensor.long()


def functional_map(numbers: Any, source: Tensor, target: Tensor, least: int = 1) -> Tensor:
    """A map (k_t, k_s) of at least so many of the vectors (N_source, K_s) and (N_target, K_t), and at most of all."""
    tensor, (K_s, K_t) = _tensor("C", numbers).to(source), (source.shape[-1], target.shape[-1])
    if tensor.ndim != 2 or not (least <= tensor.shape[0] <= K_t and least <= tensor.shape[1] <= K_s):
        raise ValueError(
            f"`C` should have shape (k_target, k_source), from ({least}, {least}) to ({K_t}, {K_s}), all that the "
            f"spectra have; got {_shape(tensor)}."
        )
    _finite("C", tensor, "Fit it with a larger `weight`.")
    return tensor


def features(source_features: Any, target_features: Any, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N_source, d) and (N_target, d) of two shapes with vectors (N_source, k_s) and (N_target, k_t)."""
    F_s = _tensor("source_features", source_features).to(source)
    F_t = _tensor("target_features", target_features).to(target)
    for name, tensor, N in (("source_features", F_s, len(source)), ("target_features", F_t, len(target))):
        if tensor.ndim != 2 or len(tensor) != N:
            raise ValueError(f"`{name}` should have shape ({N}, d), one row a point; got {_shape(tensor)}.")
        _finite(name, tensor, "A map cannot be fitted to them.")
    if F_s.shape[1] != F_t.shape[1]:
        raise ValueError(
            f"`target_features` should have the d = {F_s.shape[1]} columns of `source_features`, in their order; "
            f"got {_shape(F_t)}."
        )
    if not F_s.any():
        raise ValueError("`source_features` should not all be 0, as nothing is then known of the map.")
    return F_s, F_t


def sizes_of_bases(start: int, stop: int, step: int, source: Tensor, target: Tensor) -> list[int]:
    """start, start + step, …, stop, if both spectra have as many vectors, (N_source, K_s) and (N_target, K_t)."""
    start, step, most = integer("start", start, 1), integer("step", step, 1), min(source.shape[-1], target.shape[-1])
    if not start <= integer("stop", stop, 1) <= most:
        raise ValueError(
            f"`stop` should be from `start`, {start}, to the number of vectors that both spectra have, {most}; "
            f"got {stop}. Compute more eigenpairs for a larger one."
        )
    return [*range(start, stop, step), int(stop)]


def range_of_bandwidths(sigma: Any) -> tuple[float, float]:
    """The least and the largest bandwidth."""
    try:
        low, high = (float(number) for number in sigma)
    except (TypeError, ValueError):
        raise ValueError(
            f"`sigma` should be a pair, the least and the largest bandwidth in the unit of the points; got {sigma!r}."
        ) from None
    positive("the least bandwidth", low)
    if not low <= high < float("inf"):
        raise ValueError(f"`sigma` should be a pair (least, largest) of finite bandwidths; got {sigma!r}.")
    return low, high


def divisible(name: str, number: int, other_name: str, other: int) -> None:
    integer(name, number, 1)
    if number % integer(other_name, other, 1):
        raise ValueError(f"`{name}` should be a multiple of `{other_name}`; got {number} and {other}.")


def channels(name: str, tensor: Tensor, count: int) -> None:
    if tensor.shape[-1] != count:
        raise ValueError(f"`{name}` should have {count} channels, as this module was made for; got {_shape(tensor)}.")


def heads(signal: Tensor, count: int, cloud: Tensor) -> None:
    """Checks a signal (*batch, H, N, P) at points (*batch, N, d)."""
    if signal.ndim < 3 or signal.shape[-3] != count or signal.shape[-2] != cloud.shape[-2]:
        raise ValueError(
            f"`signal` should have shape (*batch, {count}, {cloud.shape[-2]}, P), one set of channels a bandwidth, for "
            f"points {_shape(cloud)}; got {_shape(signal)}."
        )


def features_at_points(features: Any, points: Any, mass: Any, is_packed: bool) -> Tensor:
    """The points of features (N, C) or (B, N, C), with masses of the same layout or none."""
    _floating_tensor("features", features, 2, "(N, C) or (B, N, C)")
    if points is None:
        raise ValueError("`points` should be given with features: their positions, in the same layout.")
    _floating_tensor("points", points, 2, "(N, d) or (B, N, d)")
    axes = 2 if is_packed else min(features.ndim, 3)
    if features.ndim != axes or points.shape[:-1] != features.shape[:-1]:
        wanted = (
            "(T, C) and (T, d) with `offset` or `batch`" if is_packed else "(N, C) and (N, d), or with a batch axis"
        )
        raise ValueError(
            f"`features` and `points` should have shapes {wanted}; got {_shape(features)} and {_shape(points)}."
        )
    if mass is not None and mass.shape != features.shape[:-1]:
        raise ValueError(
            f"`mass` should have one number a point, shape {tuple(features.shape[:-1])}; got {_shape(mass)}."
        )
    return points


def point_dict(given: Any, *others: Any) -> None:
    """Checks a dict of features at points, which comes alone."""
    missing = [key for key in ("feat", "coord") if key not in given]
    if missing or ("offset" not in given and "batch" not in given):
        raise ValueError(
            "A dict should have the keys `feat`, `coord` and one of `offset` and `batch`; "
            f"got {', '.join(map(str, given)) or 'none'}."
        )
    if any(other is not None for other in others):
        raise ValueError("With a dict, points, masses and clouds come in it: as `coord`, `mass`, `offset` or `batch`.")


def chiral(gradient: str) -> None:
    """Checks where a network that is to tell left from right takes gradients from."""
    if gradient != "attention":
        raise ValueError(f'`chiral` needs gradients in space, `gradient="attention"`; got {gradient!r}.')


def gradients(given: Any, is_needed: bool, features: Tensor) -> None:
    """Checks gradX and gradY for features (B, N, C)."""
    if (given is not None) != is_needed:
        remedy = "Give those of `tangent_gradients`" if is_needed else 'Leave them out, or set `gradient="tangent"`'
        raise ValueError(f'`gradients` are for a network made with `gradient="tangent"`, which needs them. {remedy}.')
    for matrix in given or ():
        matrices = [matrix] if isinstance(matrix, Tensor) and matrix.ndim == 2 else list(matrix)
        wanted = (1, len(features)) if isinstance(matrix, Tensor) and matrix.ndim == 2 else (len(features),)
        sizes = [m.shape for m in matrices]
        if len(matrices) not in wanted or any(s[0] != s[1] or s[0] > features.shape[1] for s in sizes):
            raise ValueError(
                f"`gradients` should be matrices (N, N) for all clouds, or one for each of the {len(features)} clouds, "
                f"of at most {features.shape[1]} points; got {[tuple(s) for s in sizes]}."
            )


def one_cloud(numbers: Any, dims: int, least: int) -> Tensor:
    """Positions (N, d) of one cloud."""
    tensor = points("points", numbers, (dims,))
    if tensor.ndim != 2 or len(tensor) < least:
        raise ValueError(f"`points` should have shape (N, {dims}), one cloud of {least} or more; got {_shape(tensor)}.")
    return tensor


def same_points(kernel: Any, other: Any, kind: type) -> Any:
    """The other kernel, if it is of a kind and at the same points."""
    if not isinstance(other, kind) or not torch.equal(kernel.points.detach(), other.points.detach()):  # type: ignore[attr-defined]
        raise ValueError("`near` should be an operator of a Gaussian kernel at the same points; these are others.")
    return other


def with_gradients(kernel: Any, kind: type, normalization: str) -> Any:
    """A kernel whose smoothed signals have gradients in space."""
    if not isinstance(kernel, kind) or normalization not in ("sinkhorn", "row"):
        raise ValueError(
            "`value_and_gradient` is for Gaussian kernels of points with the normalization sinkhorn or row; "
            f"got {type(kernel).__name__} with {normalization}."
        )
    return kernel
