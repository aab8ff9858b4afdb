r"""The axioms of a diffusion operator (Definition 4.2 of the paper), measured.

(i) self-adjoint for the masses, (ii) Q1 = 1, (iii) spectrum in [0, 1], (iv) Qf ≥ 0 for f ≥ 0; (i) and (ii) together
conserve mass.
"""

from dataclasses import dataclass

import torch

from qattn import _checks
from qattn.operators import Diffusion

__all__ = ["AxiomReport", "check_axioms"]

_SIGNALS = 8


@dataclass(frozen=True)
class AxiomReport:
    """How far an operator is from each axiom, and whether that is within a tolerance.

    Attributes:
        asymmetry: The largest ‖Q*u − Qu‖ / ‖Qu‖ over random signals u, with the adjoint Q* = M⁻¹QᵀM for the masses.
        constants: The mass-weighted mean of |Q1 − 1|.
        smallest_eigenvalue: An estimate from above, good to the tolerance; NaN if it was not found.
        largest_eigenvalue: An estimate from below, likewise.
        negativity: The largest −Qf over random signals 0 ≤ f ≤ 1; 0 if none is negative.
        mass_error: Σ|Qᵀm − m| / Σm: the most by which the mass of a signal |f| ≤ 1 can change, relative to that of 1.
        tol: What counts as holding.
    """

    asymmetry: float
    constants: float
    smallest_eigenvalue: float
    largest_eigenvalue: float
    negativity: float
    mass_error: float
    tol: float

    @property
    def verdicts(self) -> dict[str, bool]:
        """Whether each of them holds."""
        return {
            "self-adjoint": self.asymmetry <= self.tol,
            "keeps constants": self.constants <= self.tol,
            "damps": -self.tol <= self.smallest_eigenvalue and self.largest_eigenvalue <= 1 + self.tol,
            "positive": self.negativity <= self.tol,
            "keeps mass": self.mass_error <= self.tol,
        }

    @property
    def holds(self) -> bool:
        """Whether all of them hold."""
        return all(self.verdicts.values())

    def __str__(self) -> str:
        figures = {
            "self-adjoint": f"Q and its adjoint differ by {self.asymmetry:.1e}",
            "keeps constants": f"mean |Q1 − 1| is {self.constants:.1e}",
            "damps": f"the spectrum lies in [{self.smallest_eigenvalue:.4f}, {self.largest_eigenvalue:.4f}]",
            "positive": f"Qf for f ≥ 0 goes down to {-self.negativity:.1e}" if self.negativity else "Qf ≥ 0 for f ≥ 0",
            "keeps mass": f"Qᵀm and m differ by {self.mass_error:.1e}",
        }
        lines = [
            f"  {'yes' if holds else 'NO ':3}  {name:15}  {figures[name]}" for name, holds in self.verdicts.items()
        ]
        verdict = "A diffusion operator" if self.holds else "Not a diffusion operator"
        return "\n".join([f"{verdict}, to {self.tol:g}:", *lines])


def check_axioms(q: Diffusion, *, tol: float = 1e-2, seed: int = 0) -> AxiomReport:
    """Measures the axioms of a diffusion operator, by some thirty applications to random signals.

    Args:
        q: An operator of one cloud with one bandwidth.
        tol: What counts as holding.
        seed: Which signals.

    Example:
        >>> points = torch.nn.functional.normalize(torch.randn(300, 3), dim=-1)
        >>> check_axioms(diffusion(points, 0.3)).holds
        True
        >>> check_axioms(diffusion(points, 0.3, normalization="none")).verdicts["keeps constants"]
        False
    """
    _checks.positive("`tol`", tol)
    _checks.held_alone("check_axioms", q.kernel.ranks)
    if len(q.shape) > 2:
        raise ValueError(
            f"`check_axioms` takes one cloud with one bandwidth; this operator has shape {tuple(q.shape)}."
        )
    generator = torch.Generator().manual_seed(seed)
    N, dtype, device = q.shape[-1], q.kernel.dtype, q.kernel.device
    mass = torch.as_tensor(q.mass, device=device).detach().double().expand(N)
    normal = torch.randn(N, _SIGNALS, generator=generator).to(device, dtype)
    uniform = torch.rand(N, _SIGNALS, generator=generator).to(device, dtype) ** 4
    ones = torch.ones(N, 1, dtype=dtype, device=device)
    with torch.no_grad():
        applied = (q @ torch.cat([normal, uniform, ones], dim=-1)).double()
        transposed = (q.T @ (mass[:, None] * torch.cat([normal, ones], dim=-1)).to(dtype)).double()
    noise, positive, constant = applied.split([_SIGNALS, _SIGNALS, 1], dim=-1)

    def integral(x: torch.Tensor) -> torch.Tensor:
        return (mass[:, None] * x.double()).sum(0)

    has_mass = mass[:, None] > 0
    adjoint = torch.where(has_mass, transposed / torch.where(has_mass, mass[:, None], 1), 0)  # Q* of noise and of 1
    gap = torch.where(has_mass, adjoint[:, :-1] - noise, 0)
    from qattn._scipy import extreme_eigenvalues  # here, because SciPy is slow to import

    smallest, largest = extreme_eigenvalues(q.to_scipy(symmetric=True), tol, scale=1.0, seed=seed)
    return AxiomReport(
        asymmetry=float((integral(gap**2) / integral(noise**2)).sqrt().amax()),
        constants=float(integral((constant - 1).abs()) / mass.sum()),
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
        negativity=max(0.0, -float(positive.amin())),
        mass_error=float((transposed[:, -1] - mass).abs().sum() / mass.sum()),
        tol=tol,
    )
