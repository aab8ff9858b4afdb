"""The effect of errors of the masses on the diffusion: proposition 4.6 and appendix D of the paper.

The areas m about the vertices of a mesh get log-normal noise, m_s = m e^{ε − s²/2} with ε ~ N(0, s²), and Q_m is
compared to Q_{m_s}. Left: ‖Q_m − Q_{m_s}‖_M against s, the largest singular value of √M (Q_m − Q_{m_s}) /√M, which
ARPACK finds by applying both operators. Right: how much of an error of log m arrives in log Λ, in the norm of the
masses. The proposition says half of it at most, and one that is the same everywhere attains it; waves and noise arrive
averaged over a bandwidth.
"""

import argparse
import time

import numpy as np
import torch
from claims import parsed, report
from fem import load
from scipy.sparse.linalg import LinearOperator, svds

import qattn
from qattn.pictures import figure


def distance(q, other, mass):
    """‖Q − Q'‖_M of two operators."""
    root = mass.sqrt()

    def applied(x):
        signal = torch.from_numpy(x).reshape(-1) / root
        return (root * (q @ signal - other @ signal)).numpy()

    def transposed(x):
        signal = torch.from_numpy(x).reshape(-1) * root
        return ((q.T @ signal - other.T @ signal) / root).numpy()

    difference = LinearOperator(tuple(q.shape), matvec=applied, rmatvec=transposed, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(len(mass))
    return float(svds(difference, 1, tol=1e-2, v0=start, return_singular_vectors=False)[0])


def perturbations(points, sigma):
    """Errors of log m of size 1 in the mean square, shape (N,) each: noise, waves of length 2πσ, and a constant."""
    noise = torch.randn(len(points), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    waves = torch.sin(points[:, 0] / sigma)
    return {"noise": noise, "waves": waves / waves.square().mean().sqrt(), "everywhere": torch.ones_like(noise)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="creature", help="or sphere, cube, or the path of a mesh")
    parser.add_argument("--sigma", type=float, default=0.05)
    parser.add_argument("--levels", type=float, nargs="+", default=[1, 2, 5, 10, 15, 20, 25, 30], help="s in %%")
    parser.add_argument("--output", default="mass_noise.png")
    options = parsed(parser, shape="sphere", levels=[2, 10, 30])

    vertices, faces = load(options.shape)
    points = torch.from_numpy(vertices)
    mass = qattn.mass.vertex_areas(points, faces)
    used = mass > 0
    points, mass = points[used], mass[used] / mass.sum()
    kernel = qattn.GaussianKernel(points, options.sigma)

    def diffusion(mass):
        return qattn.diffusion(kernel, mass=mass, tol=1e-7)

    q = diffusion(mass)
    errors = perturbations(points, options.sigma)
    print(f"{len(points):,} vertices, σ = {options.sigma:g}; the error of log Λ is in parts of that of log m")
    print(f"{'s':>6} {'‖Q_m − Q_ms‖':>14} {'seconds':>8}   " + " ".join(f"{name:>10}" for name in errors))
    levels, distances, ratios = torch.tensor(options.levels).double() / 100, [], {name: [] for name in errors}
    for s in levels:
        for name, error in errors.items():
            change = s * error - (s**2 / 2 if name == "noise" else 0)
            start, other = time.perf_counter(), diffusion(mass * torch.exp(change))
            moved = other.potential - q.potential
            ratios[name].append(float(((mass * moved**2).sum() / (mass * change**2).sum()).sqrt()))
            if name == "noise":
                distances.append(distance(q, other, mass))
                took = time.perf_counter() - start
        shares = " ".join(f"{ratio[-1]:10.3f}" for ratio in ratios.values())
        print(f"{s:6.0%} {distances[-1]:14.4f} {took:8.1f}   {shares}", flush=True)

    found = torch.tensor(distances).double()
    slope = float((levels * found).sum() / levels.square().sum())  # of a line through 0
    unexplained = float((found - slope * levels).square().sum() / (found - found.mean()).square().sum())
    picture = figure(11, 4)
    left, right = picture.subplots(1, 2)
    left.plot([0, 100 * levels[-1]], [0, slope * levels[-1]], color="0.75", lw=5, label=f"{slope:.2f} × noise")
    left.plot(100 * levels, found, "o", color="C3", label=f"measured, R² = {1 - unexplained:.4f}")
    left.set(title=f"{len(points):,} vertices, σ = {options.sigma:g}", xlabel="noise s of the masses, in %")
    left.set(ylabel=r"$\|Q_m - Q_{m_s}\|_M$", xlim=(0, None), ylim=(0, None))
    for name, ratio in ratios.items():
        right.plot(100 * levels, ratio, "o-", markersize=4, label=name)
    right.axhline(0.5, color="0.75", lw=5, zorder=0)
    right.set(title="error of log Λ, in parts of that of log m", xlabel="error of the masses, in %", ylim=(0, 0.6))
    for axis in (left, right):
        axis.legend(frameon=False)
    picture.savefig(options.output, dpi=100)
    print(f"wrote {options.output}")

    largest = max(max(ratio) for ratio in ratios.values())
    spread = ", ".join(f"{np.mean(ratio):.3f} ({name})" for name, ratio in ratios.items())
    report(
        (
            "‖Q_m − Q_ms‖ is linear in s",
            f"{slope:.2f} × s explains {1 - unexplained:.2%} of it, up to s = {float(levels[-1]):.0%}",
            unexplained < 0.02,
        ),
        ("errors of Λ are half those of the masses at most", f"{spread}; most {largest:.4f}", largest < 0.5 + 1e-3),
    )


if __name__ == "__main__":
    main()
