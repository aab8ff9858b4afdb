"""Every modality and every normalisation: one matrix, by the definition, and the laws that each of them keeps."""

import pytest
import torch
from cases import ball
from scipy.sparse.linalg import aslinearoperator

from qattn import (
    ExponentialKernel,
    GaussianKernel,
    GraphKernel,
    MaternKernel,
    MatrixKernel,
    MixtureKernel,
    RationalQuadraticKernel,
    VoxelKernel,
    diffusion,
)

pytestmark = pytest.mark.usefixtures("_one_thread")

TOL = 1e-9  # of the methods that leave something out
POINTS = torch.nn.functional.normalize(torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double(), dim=-1)
R = (POINTS[:, None] - POINTS).norm(dim=-1) / 0.4
MASK = torch.rand(7, 6, 5, generator=torch.Generator().manual_seed(1)) < 0.4
WEIGHTS = MASK * torch.rand(7, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
CENTRES = WEIGHTS.nonzero().double() * torch.tensor([0.1, 0.1, 0.2]).double()
ADJACENCY = ((R < 1.5) & (R > 0)).double()
AXES = 0.3 * torch.randn(60, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
COVARIANCES = AXES @ AXES.mT
C = 0.16 * torch.eye(3).double() + COVARIANCES[:, None] + COVARIANCES
APART = POINTS[:, None] - POINTS
FORM = (APART[..., None, :] @ torch.linalg.solve(C, APART[..., None]))[..., 0, 0]
SIMILARITY = torch.exp(-R)

MODALITIES = {
    "gaussian, exact": (lambda: GaussianKernel(POINTS, 0.4, method="exact"), torch.exp(-0.5 * R**2)),
    "gaussian, tiles": (lambda: GaussianKernel(POINTS, 0.4, method="tiles", tol=TOL), torch.exp(-0.5 * R**2)),
    "gaussian, fourier": (lambda: GaussianKernel(POINTS, 0.4, method="fourier", tol=TOL), torch.exp(-0.5 * R**2)),
    "exponential": (lambda: ExponentialKernel(POINTS, 0.4), torch.exp(-R)),
    "exponential, gaussians": (lambda: ExponentialKernel(POINTS, 0.4, method="gaussians", tol=TOL), torch.exp(-R)),
    "matern": (lambda: MaternKernel(POINTS, 0.4, 1.5), (1 + 3**0.5 * R) * torch.exp(-(3**0.5) * R)),
    "rational quadratic": (lambda: RationalQuadraticKernel(POINTS, 0.4, 2.0), (1 + R**2 / 4) ** -2),
    "mixture": (
        lambda: MixtureKernel(POINTS, COVARIANCES, 0.4, tol=TOL),
        torch.exp(-0.5 * FORM) * torch.linalg.det(C / 0.16) ** -0.5,
    ),
    "voxels": (
        lambda: VoxelKernel(WEIGHTS, 0.15, (0.1, 0.1, 0.2), tol=TOL),
        torch.exp(-((CENTRES[:, None] - CENTRES) ** 2).sum(-1) / (2 * 0.15**2)),
    ),
    "graph": (lambda: GraphKernel(ADJACENCY, 1e-3), torch.diag(ADJACENCY.sum(-1)) + ADJACENCY + 1e-3),
    "matrix": (lambda: MatrixKernel(SIMILARITY), SIMILARITY),
    "sparse matrix": (lambda: MatrixKernel(SIMILARITY.to_sparse()), SIMILARITY),
    "products": (lambda: MatrixKernel(aslinearoperator(SIMILARITY.numpy())), SIMILARITY),
    "sum": (
        lambda: GaussianKernel(POINTS, 0.4) + 0.5 * ExponentialKernel(POINTS, 0.4),
        torch.exp(-0.5 * R**2) + 0.5 * torch.exp(-R),
    ),
}


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric", "none"])
def test_laws(modality, normalization):
    make, matrix = MODALITIES[modality]
    q = diffusion(make(), normalization=normalization, tol=1e-10, max_iter=200)
    N, dense, mass = len(matrix), q.to_dense(), q.mass.expand(len(matrix))
    torch.testing.assert_close(mass.sum(), torch.tensor(1.0).double())

    # The oracle: the same matrix, normalised by plain iterations or none.
    KM = matrix * mass
    if normalization == "sinkhorn":
        f = torch.zeros(N).double()
        for _ in range(200):
            f = 0.5 * (f - torch.log(KM @ torch.exp(f)))
        expected = torch.exp(f)[:, None] * KM * torch.exp(f)
    else:
        sums = KM.sum(-1)
        left, right = {
            "row": (1 / sums, torch.ones_like(sums)),
            "symmetric": (sums**-0.5, sums**-0.5),
            "none": (torch.ones_like(sums),) * 2,
        }[normalization]
        expected = left[:, None] * KM * right
    torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-7)

    assert dense.amin() > -1e-12  # positivity
    if normalization in ("sinkhorn", "row"):  # constants
        torch.testing.assert_close(dense.sum(-1), torch.ones(N).double(), rtol=0, atol=1e-8)
    if normalization != "row":  # self-adjoint for the masses
        weighted = mass[:, None] * dense
        torch.testing.assert_close(weighted, weighted.T, rtol=1e-6, atol=1e-9)
    if normalization == "sinkhorn":  # mass, and a spectrum in [0, 1]: all of these kernels are positive definite
        torch.testing.assert_close(mass @ dense, mass, rtol=0, atol=1e-9)
        root = mass.sqrt()
        spectrum = torch.linalg.eigvalsh(root[:, None] * dense / root)
        assert spectrum[0] > -1e-8
        assert spectrum[-1] < 1 + 1e-8


@pytest.mark.parametrize("modality", MODALITIES)
def test_default_masses_and_given_ones(modality):
    """Those of a mixture or of fractional voxels are the kernel's; a mass that is given takes their place."""
    kernel = MODALITIES[modality][0]()
    N = kernel.shape[-1]
    if modality == "voxels":
        torch.testing.assert_close(diffusion(kernel).mass, WEIGHTS[WEIGHTS > 0] / WEIGHTS.sum())
    else:
        torch.testing.assert_close(diffusion(kernel).mass.expand(N), torch.full((N,), 1 / N).double())
    given = torch.rand(N).double()
    torch.testing.assert_close(diffusion(kernel, mass=given).mass, given)


def test_a_mixture_of_one_shape_is_close_to_its_cloud():
    """Samples of a mixture, diffused, are the mixture, diffused."""
    torch.manual_seed(0)
    means, scale = ball(40), 0.2
    samples = (means[:, None] + scale * torch.randn(40, 500, 3).double()).reshape(-1, 3)
    by_cloud = diffusion(samples, 0.5, normalization="none") @ torch.ones(20_000).double()
    by_mixture = diffusion(MixtureKernel(means, torch.full((40,), scale**2), 0.5), normalization="none")
    found = by_mixture @ torch.ones(40).double()
    # ∫ over both: the mean of a component's samples is its overlap, with σ and the scales added.
    expected = by_cloud.reshape(40, 500).mean(1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
