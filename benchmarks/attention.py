"""How fast is each attention kernel, per pair of points, and against whom?

Points of the unit sphere with σ = 0.1, d = 3, biases of order 1, float32: one pass for the lse alone (a Sinkhorn step)
and one with 8 channels of values (an application). Every row is first checked against float64 on a few hundred rows;
one that is wrong is shown as wrong and not timed. PyKeOps and plain dense torch run in the same process.
"""

import argparse
import functools

import torch
from _measure import environment, finding, parsed, save, seconds

from qattn.attention.dispatch import BACKENDS
from qattn.attention.inputs import Inputs
from qattn.doctor import standard_problem
from qattn.pictures import curves, figure

CHANNELS = 8
SLOW = {
    "reference": 10_000,
    "flex": 20_000,
    "dense torch": 20_000,
    "pykeops": 40_000,
}  # the largest cloud each is given


def dense(inputs: Inputs):
    """The N × N matrix in torch, as one would write it first."""
    scores = -0.5 * torch.cdist(inputs.query[0], inputs.key[0]) ** 2 + inputs.bias[0]
    lse = scores.logsumexp(-1)[None]
    return None if inputs.value is None else (scores.softmax(-1) @ inputs.value[0])[None], lse


def pykeops(inputs: Inputs):
    """Attend by PyKeOps: symbolic, compiled for the CPU, O(N) memory."""
    from pykeops.torch import LazyTensor

    x, y = LazyTensor(inputs.query[0][:, None]), LazyTensor(inputs.key[0][None])
    scores = -((x - y) ** 2).sum(-1) / 2 + LazyTensor(inputs.bias[0][None, :, None])
    lse = scores.logsumexp(dim=1)[None, :, 0]
    if inputs.value is None:
        return None, lse
    return scores.sumsoftmaxweight(LazyTensor(inputs.value[0][None]), dim=1)[None], lse


def candidates(device):
    """Name and function of everything that can run here; the reasons of the others are printed."""
    small = standard_problem(64, torch.float32, device)
    runs = {}
    for name, backend in BACKENDS.items():
        if reasons := backend.not_supported_reasons(small):
            print(f"  {name:12} not here: {'; '.join(reasons)}")
        else:
            runs[name] = backend.attend
    runs["dense torch"] = dense
    try:
        import pykeops as package

        package.set_verbose(False)
        runs["pykeops"] = pykeops
    except ImportError as error:
        print(f"  {'pykeops':12} not here: {error}")
    return runs


def error(attended, inputs, rows=300):
    """Largest error of lse and out on some rows, against float64."""
    query = inputs.query[:, :rows].double()
    value = None if inputs.value is None else inputs.value.double()
    exact = Inputs(query, inputs.key.double(), value, inputs.bias.double(), score=inputs.score)
    expected = BACKENDS["reference"].attend(exact)
    return max(
        float((got[:, :rows].double() - want).abs().max())
        for got, want in zip(attended, expected, strict=True)
        if want is not None
    )


def measure(sizes, device, budget):
    """Return one row per candidate, size and kind of pass."""
    rows = []
    for name, run in candidates(device).items():
        for channels, what in ((0, "lse"), (CHANNELS, f"C = {CHANNELS}")):
            for N in (n for n in sizes if n <= SLOW.get(name, n)):
                inputs = standard_problem(N, torch.float32, device, channels)
                row = {"name": name, "pass": what, "N": N, "error": error(run(inputs), inputs)}
                if row["error"] < 1e-3:
                    row["ns"] = seconds(functools.partial(run, inputs), budget) / N**2 * 1e9
                    print(
                        f"  {name:12} {what:6} N = {N:6}  {row['ns']:7.3f} ns a pair   error {row['error']:.0e}",
                        flush=True,
                    )
                else:
                    print(f"  {name:12} {what:6} N = {N:6}  wrong: error {row['error']:.0e}", flush=True)
                rows.append(row)
    return rows


def best(rows, name, what):
    """The figure of the largest cloud that a candidate was given."""
    figures = [row["ns"] for row in rows if row["name"] == name and row["pass"] == what and "ns" in row]
    return figures[-1] if figures else float("nan")


def summary(rows):
    """A table of the largest clouds, and native's factor over each."""
    kinds = list(dict.fromkeys(row["pass"] for row in rows))
    lines = ["| kernel | " + " | ".join(f"{k}, ns a pair | against native" for k in kinds) + " |"]
    lines.append("|---|" + "---|---|" * len(kinds))
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [f"{best(rows, name, k):.2f} | {best(rows, name, k) / best(rows, 'native', k):.1f}×" for k in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def findings(rows):
    """Summarize the largest cloud that all candidates were given."""
    N = min(max(row["N"] for row in rows if row["name"] == name) for name in {row["name"] for row in rows})
    return [
        finding(
            f"{N:,} points, {kind}",
            "{name}, {ns:.2f} ns a pair",
            [r for r in rows if (r["pass"], r["N"]) == (kind, N)],
            "ns",
        )
        for kind in dict.fromkeys(row["pass"] for row in rows)
    ]


def plot(rows, path):
    kinds = list(dict.fromkeys(row["pass"] for row in rows))
    picture = figure(11, 4.2)
    axes = picture.subplots(1, len(kinds), sharey=True)
    for axis, kind in zip(axes, kinds, strict=True):
        curves(axis, [row for row in rows if row["pass"] == kind], "N", "ns")
        axis.set(xscale="log", yscale="log", xlabel="points", title="lse alone" if kind == "lse" else f"values, {kind}")
        axis.set_xticks(sorted({row["N"] for row in rows}))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        axis.xaxis.set_minor_formatter(lambda value, _: "")
    axes[0].get_legend().remove()
    axes[0].set_ylabel("nanoseconds a pair")
    axes[-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    where = environment()
    picture.suptitle(f"Gaussian attention, d = 3, float32, {where['cpu']}, {where['threads']} threads", fontsize=10)
    picture.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5_000, 10_000, 20_000, 40_000])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser, sizes=[2000, 4000])
    print(__doc__.splitlines()[0])
    rows = measure(options.sizes, options.device, 0.2 if options.quick else 2.0)
    print(f"\n{summary(rows)}")
    plot(rows, save("attention", rows, findings(rows), options.quick).with_suffix(".png"))


if __name__ == "__main__":
    main()
