"""How long does the paper's layer take, forward and backward, against the published way?

32 learned bandwidths from 0.02 to 0.5, 8 features each, two applications, on random points of the creature, float32.
The published way is 10 iterations of θ = ½ without gradients, then the applications, differentiated by autograd: here
once with PyKeOps and once with dense torch. qattn normalizes to a mean |Q1 − 1| of 1e-3, and its gradients go through
that too; "as published" is qattn with 10 plain iterations and no gradients through them.

Before the clock starts, each is compared on a small cloud with float64: the output, and the gradient by the bandwidths.
Each runs in a process of its own, so that its peak memory is its own. Batches of small clouds, as in training, have a
table of their own, of a layer of 4 bandwidths and 16 channels.
"""

import argparse
import json
import math
import time

import torch
from _measure import environment, finding, in_its_own_process, once, parsed, save, seconds

from qattn import Solver
from qattn.nn import QDiffusion
from qattn.pictures import figure
from qattn.shapes import creature
from qattn.tiles.when_to_compile import compile_at_first_call

SCALES, FEATURES, APPLICATIONS = 32, 8, 2
SIGMA = 0.02, 0.5
ITERATIONS = 10
PAPER = {"tol": 0, "solver": Solver(ITERATIONS + 1, "plain", "detach")}
SMALL = [(1, 16), (32, 100), (32, 500)]  # clouds and points of each: 16 points show what a call costs
DENSE_LIMIT = 2500  # points: beyond, 32 matrices and what autograd keeps of them do not fit in 24 GB


def by_qattn(**options):
    layer = QDiffusion(SCALES, sigma_range=SIGMA, num_applications=APPLICATIONS, **options)

    def run(signal, points, log_sigma):
        return torch.func.functional_call(layer, {"log_sigma": log_sigma}, (signal, points))

    return run


def published(lse_and_apply):
    """Q^m f with 10 iterations of f ← ½ (f − lse(f + log m)) that have no gradient."""

    def run(signal, points, log_sigma):
        x = points / log_sigma.exp()[:, None, None]  # (H, N, d)
        log_mass = -math.log(len(points))
        lse, apply = lse_and_apply(x)
        f = torch.zeros(x.shape[:2], dtype=x.dtype)
        with torch.no_grad():
            for _ in range(ITERATIONS):
                f = 0.5 * (f - lse(f + log_mass))
        scaling = torch.exp(f)[..., None]
        for _ in range(APPLICATIONS):
            signal = scaling * apply(scaling * math.exp(log_mass) * signal)
        return signal

    return run


def dense(x):
    squares = (x**2).sum(-1)
    scores = x @ x.mT - 0.5 * squares[..., :, None] - 0.5 * squares[..., None, :]
    kernel = torch.exp(scores)
    return lambda bias: torch.logsumexp(scores + bias[..., None, :], dim=-1), lambda value: kernel @ value


def pykeops(x):
    from pykeops.torch import LazyTensor

    scores = -((LazyTensor(x[:, :, None]) - LazyTensor(x[:, None])) ** 2).sum(-1) / 2
    return (
        lambda bias: (scores + LazyTensor(bias[:, None, :, None])).logsumexp(dim=2)[..., 0],
        lambda value: scores.exp() @ value,
    )


CANDIDATES = {
    "qattn": lambda: by_qattn(),
    "qattn, as published": lambda: by_qattn(**PAPER),
    "pykeops": lambda: published(pykeops),
    "dense torch": lambda: published(dense),
}


def problem(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(SCALES, n, FEATURES, generator=generator).to(dtype).requires_grad_()
    log_sigma = torch.linspace(math.log(SIGMA[0]), math.log(SIGMA[1]), SCALES).to(dtype).requires_grad_()
    return signal, creature(n)[0].to(dtype), log_sigma


def loss(out):
    """Compute a loss whose gradients by the bandwidths do not vanish by symmetry."""
    return (out * torch.linspace(-1, 1, FEATURES).to(out)).square().mean()


def exact(signal, points, log_sigma):
    """Compute the layer by dense matrices, with gradients through iterations until nothing changes."""
    x = points / log_sigma.exp()[:, None, None]
    scores, f = -0.5 * torch.cdist(x, x) ** 2, torch.zeros(x.shape[:2], dtype=x.dtype)
    log_mass = -math.log(len(points))
    for _ in range(60):
        f = 0.5 * (f - torch.logsumexp(scores + f[..., None, :] + log_mass, dim=-1))
    q = torch.exp(f[..., None] + scores + f[..., None, :] + log_mass)
    return torch.linalg.matrix_power(q, APPLICATIONS) @ signal


def errors(run, n=300):
    """Relative errors of the output and of the gradient by the bandwidths, on a small cloud."""
    found = []
    for function, dtype in ((run, torch.float32), (exact, torch.float64)):
        signal, points, log_sigma = problem(n, dtype)
        out = function(signal, points, log_sigma)
        found.append((out.detach().double(), torch.autograd.grad(loss(out), log_sigma)[0].double()))
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


@compile_at_first_call()
def one(name, n, budget):
    """Run one candidate in this process, and print a row."""
    run = CANDIDATES[name]()
    output_error, gradient_error = errors(run)
    assert output_error < 1e-2, output_error
    inputs = problem(n)
    forward, total, megabytes = math.inf, math.inf, 0.0
    start = time.perf_counter()
    while total == math.inf or time.perf_counter() - start < budget:

        def step():
            begin = time.perf_counter()
            out = run(*inputs)
            middle = time.perf_counter() - begin
            torch.autograd.grad(loss(out), (inputs[0], inputs[2]))
            return middle

        middle, took, peak = once(step)
        forward, total, megabytes = min(forward, middle), min(total, took), max(megabytes, peak)
    row = {"name": name, "N": n, "forward": forward, "seconds": total, "megabytes": megabytes}
    print(json.dumps(row | {"output_error": output_error, "gradient_error": gradient_error}))


@compile_at_first_call()
def small(batch, n, budget):
    """A layer of 4 bandwidths and 16 channels on a batch of small clouds in this process: prints a row."""
    generator = torch.Generator().manual_seed(0)
    points = torch.stack([creature(n, seed=seed)[0] for seed in range(batch)])
    signal = torch.randn(batch, 4, n, 16, generator=generator).requires_grad_()
    layer = QDiffusion(4, sigma_range=(0.1, 0.4))

    def step():
        layer(signal, points).square().mean().backward()

    step()  # imports and compiles everything
    forward = seconds(lambda: layer(signal, points), budget)
    row = {"name": "qattn, small clouds", "N": n, "batch": batch, "forward": forward, "seconds": seconds(step, budget)}
    print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 10_000])
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a candidate may take")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--small", nargs=3, help=argparse.SUPPRESS)
    options = parsed(parser, sizes=[500])
    if options.small:
        return small(int(options.small[0]), int(options.small[1]), float(options.small[2]))
    if options.one:
        return one(options.one[0], int(options.one[1]), float(options.one[2]))

    print(__doc__.splitlines()[0])
    rows = []
    lines = ["| points | | forward | forward + backward | peak memory | error of ∂/∂σ |", "|---" * 6 + "|"]
    for n in options.sizes:
        base = None
        for name in CANDIDATES:
            if name == "dense torch" and n > DENSE_LIMIT:
                continue
            row = in_its_own_process(__file__, "--one", name, n, 1 if options.quick else 10, limit=options.limit)
            if isinstance(row, str) and name.startswith("qattn"):
                raise SystemExit(f"{name}: {row}")
            if isinstance(row, str):
                lines.append(f"| {n:,} | {name} | {row} | | | |")
            else:
                rows.append(row)
                base = base or row["seconds"]
                ratio = "" if name == "qattn" else f" ({row['seconds'] / base:.1f}×)"
                lines.append(
                    f"| {n:,} | {name} | {row['forward']:.2f} s | {row['seconds']:.2f} s{ratio} | "
                    f"{row['megabytes']:,.0f} MB | {row['gradient_error']:.0e} |"
                )
            print(lines[-1], flush=True)
    lines += ["", "| small clouds | forward | forward + backward |", "|---" * 3 + "|"]
    few = []
    for batch, n in SMALL:
        row = in_its_own_process(__file__, "--small", batch, n, 0.5 if options.quick else 3, limit=options.limit)
        if isinstance(row, str):
            raise SystemExit(f"small clouds: {row}")
        few.append(row)
        lines.append(f"| {batch} × {n} | {1e3 * row['forward']:.1f} ms | {1e3 * row['seconds']:.1f} ms |")
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    ours = "{seconds:.2f} s, error of ∂/∂σ {gradient_error:.0e}"
    findings = [
        finding(f"a layer of 32 σ on {n:,} points", ours, [r for r in rows if r["N"] == n]) for n in options.sizes
    ]
    plot(rows, save("layers", rows + few, findings, options.quick).with_suffix(".png"))


def plot(rows, path):
    picture = figure(9, 3.6)
    axes = picture.subplots(1, 2)
    names = list(dict.fromkeys(row["name"] for row in rows))
    sizes = sorted({row["N"] for row in rows})
    for number, name in enumerate(names):
        for axis, field in zip(axes, ("seconds", "megabytes"), strict=True):
            mine = [row for row in rows if row["name"] == name]
            places = [sizes.index(row["N"]) + 0.2 * (number - (len(names) - 1) / 2) for row in mine]
            bars = axis.bar(places, [row[field] for row in mine], 0.18, color=f"C{number}", label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
    for axis, title in zip(axes, ("seconds, forward + backward", "megabytes at most"), strict=True):
        axis.set(yscale="log", title=title)
        axis.set_xticks(range(len(sizes)), [f"{n:,} points" for n in sizes])
    axes[0].legend(frameon=False, fontsize=8)
    picture.suptitle(f"32 bandwidths × 8 features, two applications, {environment()['threads']} threads", fontsize=10)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
