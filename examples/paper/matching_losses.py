"""Functional maps of batches of pairs, and the losses of ULRSSM (Cao et al. 2023) on them.

Shapes of a batch are in pairs: features (2, P, N, C), of P sources and of P targets. Maps in both directions are fitted
at once. Π is the soft point map of the directions of features, softmax(F_t F_sᵀ / τ), and Φ⁺ the projection on
eigenvectors:

    bijectivity ‖C_st C_ts − I‖² + ‖C_ts C_st − I‖²,   orthogonality ‖CᵀC − I‖²,   alignment ‖C − Φ_t⁺ Π Φ_s‖².
"""

import torch

TEMPERATURE = 0.07  # τ
WEIGHT = 100.0  # of the regularization by resolvents
RIDGE = 1e-6  # of the mean square of the coefficients of features, for those of which they hold nothing
LOSSES = "bijectivity", "orthogonality", "alignment"


class RowSolve(torch.autograd.Function):
    """Solve (G + diag(p_i)) x_i = y_i for matrices G (…, k, k), penalties p (…, m, k) and rows y (…, m, k).

    All rows share G, so that its gradient is one product of matrices and needs no derivative of a factorization.
    """

    @staticmethod
    def forward(ctx, gram, penalty, right):
        factor = torch.linalg.cholesky(gram[..., None, :, :] + torch.diag_embed(penalty))  # (…, m, k, k)
        x = torch.cholesky_solve(right[..., None], factor)[..., 0]
        ctx.save_for_backward(factor, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        factor, x = ctx.saved_tensors
        solved = torch.cholesky_solve(grad[..., None], factor)[..., 0]
        return -solved.mT @ x, None, solved


def resolvent_penalty(mu_t, mu_s):
    """Squares (…, k_t, k_s) of differences of resolvents of frequencies, as of `qattn.maps.fit_functional_map`."""
    largest = torch.maximum(mu_t[..., -1:], mu_s[..., -1:])
    a, b = (mu_t / largest).sqrt()[..., :, None], (mu_s / largest).sqrt()[..., None, :]
    return (a - b).square() / ((1 + a**2) * (1 + b**2))


def fitted_maps(A, B, mu_s, mu_t, weight=WEIGHT):
    """Maps C (…, k_t, k_s) of coefficients A (…, k_s, d) and B (…, k_t, d): argmin ‖CA − B‖² + w Σ r_ij C_ij²."""
    gram = A @ A.mT
    ridge = RIDGE * gram.detach().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return RowSolve.apply(gram, weight * resolvent_penalty(mu_t, mu_s) + ridge, B @ A.mT)


def soft_maps(features, vectors, projections):
    """Functional maps (2, P, k, k) of soft point maps, for features (2, P, N, C) of sources and targets, and back."""
    features = torch.nn.functional.normalize(features, dim=-1)
    scores = features[1] @ features[0].mT / TEMPERATURE  # (P, N_t, N_s)
    forth = projections[1] @ (scores.softmax(-1) @ vectors[0])
    back = projections[0] @ (scores.mT.softmax(-1) @ vectors[1])
    return torch.stack([forth, back])


def maps(features, projections, frequencies):
    """Functional maps (2, P, k, k) that features (2, P, N, C) fit, from sources to targets and back."""
    A = projections @ features  # (2, P, k, C)
    return fitted_maps(A, A.flip(0), frequencies, frequencies.flip(0))


def losses(C, soft):
    """Bijectivity, orthogonality and alignment (3,), the mean over the pairs, of maps (2, P, k, k) of both kinds."""
    one = torch.eye(C.shape[-1], dtype=C.dtype)
    bijectivity, orthogonality = C @ C.flip(0) - one, C.mT @ C - one
    return torch.stack([x.square().sum() / C.shape[1] for x in (bijectivity, orthogonality, C - soft)])
