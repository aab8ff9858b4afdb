"""How long does it take to normalize a cloud and to apply its diffusion, against the published way?

All pairs of points of the unit sphere, σ = 0.05, float32, 8 channels. The published way is 10 iterations of θ = ½, then
an application, here once with PyKeOps and once with dense torch; qattn stops at the marginal error that those 10
iterations reach. All run in one process, and the result of each is compared with float64 before it is timed.
"""

import argparse
import math

import torch
from _measure import environment, finding, parsed, save, seconds

from qattn import Solver, diffuse, diffusion
from qattn.pictures import curves, figure
from qattn.tiles.when_to_compile import compile_at_first_call

CHANNELS = 8
ITERATIONS = 10


def published(points, signal, sigma, lse_and_apply, iterations=ITERATIONS):
    """Iterations of f ← ½ (f − lse(f + log m)), then Q applied."""
    log_mass = -math.log(len(points))
    f = torch.zeros(len(points), dtype=points.dtype)
    lse, apply = lse_and_apply(points / sigma)
    for _ in range(iterations):
        f = 0.5 * (f - lse(f + log_mass))
    return torch.exp(f)[:, None] * apply(torch.exp(f + log_mass)[:, None] * signal)


def dense(x):
    scores = -0.5 * torch.cdist(x, x) ** 2
    kernel = torch.exp(scores)
    return lambda bias: torch.logsumexp(scores + bias, dim=1), lambda value: kernel @ value


def pykeops(x):
    from pykeops.torch import LazyTensor

    scores = -((LazyTensor(x[:, None]) - LazyTensor(x[None])) ** 2).sum(-1) / 2
    return (
        lambda bias: (scores + LazyTensor(bias[None, :, None])).logsumexp(dim=1)[:, 0],
        lambda value: scores.exp() @ value,
    )


def problem(n):
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    return points, torch.randn(n, CHANNELS, generator=generator)


def candidates(tol):
    runs = {"qattn": lambda points, signal, sigma: diffuse(points, sigma, signal, tol=tol, method="exact")[0]}
    runs["dense torch"] = lambda *arguments: published(*arguments, dense)
    try:
        import pykeops as package

        package.set_verbose(False)
        runs["pykeops"] = lambda *arguments: published(*arguments, pykeops)
    except ImportError as error:
        print(f"  pykeops not here: {error}")
    return runs


def reached(points, sigma):
    """The marginal error after 10 plain iterations, which qattn is asked to reach too."""
    q = diffusion(
        points.double(), sigma, tol=0, solver=Solver(max_iter=ITERATIONS + 1, iteration="plain"), method="exact"
    )
    return float(q.marginal_error)


@compile_at_first_call()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5_000, 10_000, 20_000, 40_000])
    parser.add_argument("--sigma", type=float, default=0.05)
    options = parsed(parser, sizes=[2000])
    print(__doc__.splitlines()[0])
    rows = []
    for N in options.sizes:
        points, signal = problem(N)
        tol = reached(points, options.sigma)
        exact = diffuse(points.double(), options.sigma, signal.double(), tol=1e-10, method="exact")[0]
        for name, run in candidates(tol).items():
            if N > 20_000 and name != "qattn":
                continue  # minutes for PyKeOps, more than 24 GB for dense torch
            error = float((run(points, signal, options.sigma) - exact).abs().max())
            row = {"name": name, "N": N, "tol": tol, "error": error}
            if error < 1e-2:
                row["seconds"] = seconds(
                    lambda run=run, a=(points, signal, options.sigma): run(*a), 0.2 if options.quick else 2.0
                )
            rows.append(row)
            print(
                f"  N = {N:6}  {name:12} {row.get('seconds', math.nan):8.3f} s   largest error {error:.0e}", flush=True
            )
    findings = [
        finding(f"{N:,} points, all pairs", "{seconds:.2f} s, error {error:.0e}", [r for r in rows if r["N"] == N])
        for N in options.sizes
    ]
    path = save("normalize", rows, findings, options.quick)

    picture = figure(6.4, 4.2)
    axis = picture.subplots()
    curves(axis, rows, "N", "seconds")
    where = environment()
    axis.set(xscale="log", yscale="log", xlabel="points", ylabel="seconds to normalize and apply 8 channels")
    axis.set_title(f"σ = {options.sigma}, equal marginal error, {where['threads']} threads", fontsize=10)
    picture.savefig(path.with_suffix(".png"), dpi=130)

    print("\n| points | qattn, s | pykeops, s | dense torch, s |\n|---|---|---|---|")
    for N in options.sizes:
        took = {row["name"]: row["seconds"] for row in rows if row["N"] == N and "seconds" in row}
        cells = [
            f"{took[n]:.2f} ({took[n] / took['qattn']:.0f}×)" if n in took else "–" for n in ("pykeops", "dense torch")
        ]
        print(f"| {N:,} | {took['qattn']:.3f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
