r"""Diffusion operators in symmetric form, S = √w Q /√w: everything that the eigensolver needs of a `Diffusion`."""

import torch
from torch import Tensor

from qattn._progress import Progress
from qattn.operators.diffusion import Diffusion
from qattn.spectra.linalg import differences, inner, norms, rounding

__all__ = ["SymmetricOperator", "count_sites"]

_GOAL = 1e-8  # mean of |Q1 − 1| that is worth no further pass of the normalization
_MAX_PASSES = 40  # of the normalization
_CONSTANT_TOL = 1e-3  # norm of Q1 − 1 up to which Q counts as keeping constants


def count_sites(q: Diffusion) -> int:
    """Return the number of sites with mass, on all ranks together."""
    return int(q.kernel.ranks.sum((torch.as_tensor(q.mass).detach().expand(q.shape[-1]) > 0).sum()))


class SymmetricOperator:
    r"""S = √w Q /√w, symmetric for the weight w = m e^{r−l} for which Q is self-adjoint.

    If Q keeps constants, the eigenpair S √w = √w is known and deflated: products are with P S P, P = I − √w √wᵀ. No
    eigenvalue then has to be resolved that is closer to 1 than rounding allows.

    Args:
        q: Operator of shape (N, N). Its normalization is continued to rounding.
        num_columns: Number of columns that products will have; the kernel chooses its fastest method for them.
        progress: Bar that advances with every product.

    Attributes:
        kernel: Kernel of the operator, with the method for `num_columns`.
        ranks: Process group that holds the sites.
        mass: Masses m, shape (N,).
        weight: w divided by its sum, shape (N,).
        root: √w of the divided weight, shape (N, 1).
        keeps_constants: Whether the constant eigenvector is known and deflated.
        constant_error: Norm of Q1 − 1, if `q` is normalized by "sinkhorn" or "row".
        normalization_error: Mean of |Q1 − 1| that "sinkhorn" leaves; 0 for other normalizations.
        num_passes: Number of products so far.
    """

    def __init__(self, q: Diffusion, num_columns: int, progress: Progress) -> None:
        q = q.for_channels(num_columns)
        q = q.refined(max(rounding(q.dtype), _GOAL), _MAX_PASSES)
        self.kernel, self.ranks = q.kernel, q.kernel.ranks
        self.mass = torch.as_tensor(q.mass).detach().expand(q.shape[-1])
        weight = q.weight.detach().expand(q.shape[-1])
        self.weight = weight / self.ranks.total(weight)
        self.root = self.weight.sqrt()[:, None]
        self._inverse_root = torch.where(self.root > 0, 1 / torch.where(self.root > 0, self.root, 1), 0)
        self._q, self._progress = q, progress
        self.num_passes = 0
        self.normalization_error = float(q.marginal_error) if q.normalization == "sinkhorn" else 0.0
        self.keeps_constants = False
        if q.normalization in ("sinkhorn", "row"):
            self._constant_residual = self @ self.root - self.root  # S √w − √w, shape (N, 1)
            self.constant_error = float(norms(self._constant_residual, self.ranks))
            self.keeps_constants = self.constant_error <= _CONSTANT_TOL

    def __matmul__(self, u: Tensor) -> Tensor:
        """Return P S P u for columns u (N, n)."""
        self.num_passes += 1
        scaled = self.deflated(u)
        scaled = self._inverse_root * u if scaled is u else scaled.mul_(self._inverse_root)
        product = self._q.apply(scaled).mul_(self.root)
        self._progress.advance()
        return self.deflated_(product)

    def deflated(self, u: Tensor) -> Tensor:
        """Return P u for columns u (N, n)."""
        if not self.keeps_constants:
            return u
        return torch.addmm(u, self.root, inner(self.root, u, self.ranks).to(u.dtype), alpha=-1)

    def deflated_(self, u: Tensor) -> Tensor:
        """Return P u for columns u (N, n), which are overwritten."""
        if not self.keeps_constants:
            return u
        return u.addmm_(self.root, inner(self.root, u, self.ranks).to(u.dtype), alpha=-1)

    def residuals(self, values: Tensor, u: Tensor, product: Tensor) -> Tensor:
        """Return ‖S u − λ u‖, shape (n,), for values λ (n,), columns u (N, n) and `product` = P S P u."""
        within = differences(product, values, u, self.ranks)
        if not self.keeps_constants:
            return within
        return torch.hypot(within, inner(self._constant_residual, u, self.ranks)[0].to(within.dtype))

    def eigenvectors(self, u: Tensor, values: Tensor) -> Tensor:
        """Return the eigenvectors φ = u /√w of Q; φ = Qφ / λ at sites without mass."""
        vectors = self._inverse_root * u
        if self.ranks.largest((self.weight == 0).to(vectors)) == 0:
            return vectors
        return torch.where(self.root > 0, vectors, self._q.apply(vectors) / values)
