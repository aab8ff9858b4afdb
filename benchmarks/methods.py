"""Does "auto" take the fastest method of the Gaussian kernel, and is its estimate right, over σ × N?

Random points of a surface and of a volume, float32. Every method that the model expects to take less than a few seconds
a pass is timed: a pass for lse, which the model estimates, and one with 8 channels. The row error is checked first.
"regret" is the time of four passes and one with channels, by the method taken over the best.
"""

import argparse
import math
from functools import partial

import torch
from _measure import environment, parsed, save, seconds

from qattn import GaussianKernel
from qattn.kernels.gaussian.cost import METHODS
from qattn.pictures import figure
from qattn.tiles.when_to_compile import compile_at_first_call

TOL = 1e-3


def cloud(shape, n):
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
    return points if shape == "sphere" else points * torch.rand(n, 1, generator=generator) ** (1 / 3)


@compile_at_first_call()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000, 1_000_000])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0])
    parser.add_argument("--limit", type=float, default=4.0, help="seconds a pass that are worth waiting for")
    options = parsed(parser, sizes=[10_000, 30_000], sigmas=[0.02, 0.3])
    print(__doc__.splitlines()[0])
    rows, regrets = [], []
    for shape in ("sphere", "ball"):
        for N in options.sizes:
            points, bias, value = cloud(shape, N), torch.zeros(N), torch.ones(N, 8)
            for sigma in options.sigmas:
                auto = GaussianKernel(points, sigma, tol=TOL)
                (choice,) = auto.choices()
                took, whole = {}, {}
                for method in METHODS:
                    estimate = choice.seconds.get(method, math.inf)
                    if estimate > options.limit:
                        continue
                    kernel = GaussianKernel(points, sigma, method=method, tol=TOL)
                    error = float(kernel.error(num_rows=64))
                    assert error <= TOL, (method, error)
                    took[method] = seconds(partial(kernel.attend, bias), budget=0.3)
                    applied = seconds(partial(kernel.attend, bias, value), budget=0.3)
                    whole[method] = 4 * took[method] + applied
                    rows.append({
                        "shape": shape, "N": N, "sigma": sigma, "method": method, "is_taken": method == choice.method,
                        "seconds": took[method], "with_channels": applied, "estimate": estimate, "error": error,
                    })  # fmt: skip
                if choice.method not in took:
                    continue
                regrets.append(whole[choice.method] / min(whole.values()))
                line = "  ".join(f"{m} {t:.4f} s ({t / choice.seconds[m]:.1f} of estimate)" for m, t in took.items())
                print(
                    f"  {shape:6} N = {N:9,}  σ = {sigma:<5}  {choice.method:7}  regret {regrets[-1]:.2f}   {line}",
                    flush=True,
                )
    case = f"method taken, {len(regrets)} problems"
    regret = f"worst {max(regrets):.2f}× the best, mean {sum(regrets) / len(regrets):.2f}×"
    print(f"\n{case}: {regret}")
    path = save("methods", rows, [{"case": case, "qattn": regret, "others": ""}], options.quick)

    picture = figure(11, 4.2)
    axes = picture.subplots(1, 2, sharey=True)
    for axis, shape in zip(axes, ("sphere", "ball"), strict=True):
        for method in METHODS:
            some = [row for row in rows if row["method"] == method and row["shape"] == shape]
            axis.scatter([r["estimate"] for r in some], [r["seconds"] for r in some], s=14, label=method)
        axis.plot([1e-3, 3], [1e-3, 3], color="0.6", linewidth=1, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="estimated seconds a pass", title=shape)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"measured, {environment()['threads']} threads")
    axes[0].legend(frameon=False)
    picture.savefig(path.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
