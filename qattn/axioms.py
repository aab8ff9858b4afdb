r"""Measurements of the axioms of a diffusion operator (Definition 4.2 of the paper).

(i) Q is self-adjoint for the masses, (ii) Q1 = 1, (iii) the spectrum lies in [0, 1], (iv) Qf ≥ 0 for f ≥ 0. Together,
(i) and (ii) conserve mass.
"""

from dataclasses import dataclass

import torch

from qattn import _checks
from qattn._html import table
from qattn.operators.diffusion import Diffusion

__all__ = ["AxiomReport", "check_axioms"]

_NUM_SIGNALS = 8


@dataclass(frozen=True)
class AxiomReport:
    """Deviations of an operator from the axioms, and verdicts for a tolerance.

    Attributes:
        asymmetry: Largest ‖Q*u − Qu‖ / ‖Qu‖ over random signals u, with the adjoint Q* = M⁻¹QᵀM for the masses.
        constants: Mass-weighted mean of |Q1 − 1|.
        smallest_eigenvalue: Upper estimate of the smallest eigenvalue, accurate to `tol`; NaN if it was not found.
        largest_eigenvalue: Lower estimate of the largest eigenvalue, accurate to `tol`; NaN if it was not found.
        negativity: Largest −Qf over random signals 0 ≤ f ≤ 1; 0 if none is negative.
        mass_error: Σ|Qᵀm − m| / Σm, the largest change of the mass of a signal |f| ≤ 1, relative to the mass of 1.
        tol: Deviation up to which an axiom counts as satisfied.
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
        """Verdict on each axiom, by name."""
        return {
            "self-adjoint": self.asymmetry <= self.tol,
            "keeps constants": self.constants <= self.tol,
            "damps": -self.tol <= self.smallest_eigenvalue and self.largest_eigenvalue <= 1 + self.tol,
            "positive": self.negativity <= self.tol,
            "keeps mass": self.mass_error <= self.tol,
        }

    @property
    def holds(self) -> bool:
        """True if all axioms hold."""
        return all(self.verdicts.values())

    @property
    def _figures(self) -> dict[str, str]:
        """Deviation from each axiom in words, by name."""
        return {
            "self-adjoint": f"Q and its adjoint differ by {self.asymmetry:.1e}",
            "keeps constants": f"mean |Q1 − 1| is {self.constants:.1e}",
            "damps": f"the spectrum lies in [{self.smallest_eigenvalue:.4f}, {self.largest_eigenvalue:.4f}]",
            "positive": f"Qf for f ≥ 0 goes down to {-self.negativity:.1e}" if self.negativity else "Qf ≥ 0 for f ≥ 0",
            "keeps mass": f"Qᵀm and m differ by {self.mass_error:.1e}",
        }

    @property
    def _title(self) -> str:
        return f"{'A' if self.holds else 'Not a'} diffusion operator, to {self.tol:g}"

    def __str__(self) -> str:
        lines = [
            f"  {'yes' if holds else 'NO ':3}  {name:15}  {self._figures[name]}"
            for name, holds in self.verdicts.items()
        ]
        return "\n".join([f"{self._title}:", *lines])

    def _repr_html_(self) -> str:
        """Return the table of `print` for notebooks."""
        verdicts = self.verdicts.items()
        return table(self._title, [("yes" if holds else "NO", name, self._figures[name]) for name, holds in verdicts])


def check_axioms(q: Diffusion, *, tol: float = 1e-2, seed: int = 0) -> AxiomReport:
    """Measure the axioms of a diffusion operator, by about thirty applications to random signals.

    Args:
        q: Operator of one cloud with one bandwidth, shape (N, N).
        tol: Deviation up to which an axiom counts as satisfied.
        seed: Seed of the random signals.

    Returns:
        The deviations and verdicts; `print` shows them as a table.

    Examples:
        >>> points = torch.nn.functional.normalize(torch.randn(300, 3), dim=-1)
        >>> check_axioms(diffusion(points, 0.3)).holds
        True
        >>> check_axioms(diffusion(points, 0.3, normalization="none")).verdicts["keeps constants"]
        False
    """
    _checks.positive("`tol`", tol)
    q.kernel.ranks.check_alone("check_axioms")
    _checks.one_item("check_axioms", q.shape, "check_axioms(q[0])")
    generator = torch.Generator().manual_seed(seed)
    N, dtype, device = q.shape[-1], q.kernel.dtype, q.kernel.device
    mass = torch.as_tensor(q.mass, device=device).detach().double().expand(N)
    normal = torch.randn(N, _NUM_SIGNALS, generator=generator).to(device, dtype)
    uniform = torch.rand(N, _NUM_SIGNALS, generator=generator).to(device, dtype) ** 4
    ones = torch.ones(N, 1, dtype=dtype, device=device)
    with torch.no_grad():
        applied = (q @ torch.cat([normal, uniform, ones], dim=-1)).double()
        transposed = (q.T @ (mass[:, None] * torch.cat([normal, ones], dim=-1)).to(dtype)).double()
    q_normal, q_uniform, q_ones = applied.split([_NUM_SIGNALS, _NUM_SIGNALS, 1], dim=-1)

    def integral(x: torch.Tensor) -> torch.Tensor:
        return (mass[:, None] * x.double()).sum(0)

    has_mass = mass[:, None] > 0
    adjoint = torch.where(has_mass, transposed / torch.where(has_mass, mass[:, None], 1), 0)  # Q* of normal and ones
    gap = torch.where(has_mass, adjoint[:, :-1] - q_normal, 0)
    from qattn._scipy import extreme_eigenvalues  # here, because SciPy is slow to import

    smallest, largest = extreme_eigenvalues(q.to_scipy(symmetric=True), tol, scale=1.0, seed=seed)
    return AxiomReport(
        asymmetry=float((integral(gap**2) / integral(q_normal**2)).sqrt().amax()),
        constants=float(integral((q_ones - 1).abs()) / mass.sum()),
        smallest_eigenvalue=smallest,
        largest_eigenvalue=largest,
        negativity=max(0.0, -float(q_uniform.amin())),
        mass_error=float((transposed[:, -1] - mass).abs().sum() / mass.sum()),
        tol=tol,
    )
