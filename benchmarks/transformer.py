"""How long does a training step of `QPointTransformer` take, and how much memory, by number of points?

The network is the preset "base", with its blocks computed again in the backward pass, on a surface such as an aerial
scanner sees: hills and buildings with noise, one point per unit of area, whose extent grows with the number of points.
Cells of the first level are two units wide. A step is forward, cross-entropy of eight classes, and backward.

Before the clock starts, outputs and gradients on a small scene are compared with those in float64, normalized until
nothing changes. Each size runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import copy
import json
import math
import time

import torch
from _measure import environment, in_its_own_process, once, parsed, save
from torch.nn.functional import cross_entropy

from qattn.nn import QDiffusion, QPointTransformer
from qattn.pictures import figure
from qattn.tiles.when_to_compile import compile_at_first_call

CLASSES = 8
SPACING = 2.0
BLOCK, STREETS = 40.0, 0.2  # width of a block of the town, and the part of it on each side of a building


def scene(n, seed=0):
    """Points (n, 3) of hills with buildings, one per unit of area seen from above, and their classes (n,)."""
    generator = torch.Generator().manual_seed(seed)
    x = math.sqrt(n) * torch.rand(n, 2, generator=generator)
    ground = 6 * torch.sin(x[:, 0] / 60) * torch.cos(x[:, 1] / 45)
    block = (x / BLOCK).floor().long()
    is_roof = (x / BLOCK - block - 0.5).abs().amax(-1) < 0.5 - STREETS
    kind = (7 * block[:, 0] + 11 * block[:, 1]) % (CLASSES - 1)
    height = ground + torch.where(is_roof, 4.0 + 2.0 * kind, 0) + 0.05 * torch.randn(n, generator=generator)
    return torch.cat([x, height[:, None]], dim=-1), torch.where(is_roof, 1 + kind, 0)


def network():
    torch.manual_seed(0)
    return QPointTransformer(3, CLASSES, spacing=SPACING, preset="base", recompute=True)


def loss(model, points, classes):
    features = (points - points.mean(0)) / BLOCK
    return cross_entropy(model(features, points), classes)


def errors(n=1000):
    """Relative errors of the outputs and of all gradients, against float64."""
    points, classes = scene(n)
    found = []
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(network()).to(dtype)
        for layer in model.modules():
            if isinstance(layer, QDiffusion) and dtype == torch.float64:
                layer.tol = 1e-10
        x = points.to(dtype)
        out = model((x - x.mean(0)) / BLOCK, x)
        cross_entropy(out, classes).backward()
        gradients = torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
        found.append((out.detach().double(), gradients))
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


@compile_at_first_call()
def one(n):
    """A step in this process: prints a row."""
    output_error, gradient_error = errors()
    assert output_error < 1e-2, output_error
    assert gradient_error < 5e-2, gradient_error
    model = network()
    loss(model, *scene(min(n, 20_000))).backward()  # for which all loops are compiled
    model.zero_grad()
    points, classes = scene(n)
    middle = 0.0

    def step():
        nonlocal middle
        begin = time.perf_counter()
        value = loss(model, points, classes)
        middle = time.perf_counter() - begin
        value.backward()

    _, took, megabytes = once(step)
    row = {"name": "qattn", "N": n, "forward": middle, "seconds": took, "megabytes": megabytes}
    print(json.dumps(row | {"output_error": output_error, "gradient_error": gradient_error}))


def slope(rows, field):
    """The exponent of N between the least and the largest size."""
    first, last = rows[0], rows[-1]
    return math.log(last[field] / first[field]) / math.log(last["N"] / first["N"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a size may take")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parsed(parser, sizes=[1000, 3000])
    if options.one:
        return one(options.one)

    print(__doc__.splitlines()[0])
    rows = []
    lines = [
        "| points | forward | forward + backward | peak memory | error of outputs | of gradients |",
        "|---" * 6 + "|",
    ]
    for n in options.sizes:
        row = in_its_own_process(__file__, "--one", n, limit=options.limit)
        if isinstance(row, str):
            raise SystemExit(f"{n} points: {row}")
        rows.append(row)
        lines.append(
            f"| {n:,} | {row['forward']:.1f} s | {row['seconds']:.1f} s | {row['megabytes']:,.0f} MB "
            f"| {row['output_error']:.0e} | {row['gradient_error']:.0e} |"
        )
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    findings = [
        {
            "case": f"a step on {row['N']:,} points",
            "qattn": f"{row['seconds']:.3g} s, {row['megabytes']:,.0f} MB",
            "others": "",
        }
        for row in rows
    ]
    if len(rows) > 1:
        exponents = f"time N^{slope(rows, 'seconds'):.2f}, memory N^{slope(rows, 'megabytes'):.2f}"
        findings.append({"case": "its growth", "qattn": exponents, "others": ""})
        print(exponents)
    plot(rows, save("transformer", rows, findings, options.quick).with_suffix(".png"))


def plot(rows, path):
    picture = figure(8, 3.4)
    axes = picture.subplots(1, 2)
    sizes = [row["N"] for row in rows]
    for axis, fields, title in (
        (axes[0], ("forward", "seconds"), "seconds"),
        (axes[1], ("megabytes",), "megabytes at most"),
    ):
        for field in fields:
            axis.loglog(sizes, [row[field] for row in rows], "o-", label={"seconds": "with backward"}.get(field, field))
        line = [rows[0][fields[-1]] * n / sizes[0] for n in sizes]
        axis.loglog(sizes, line, "k:", lw=1, label="∝ N")
        axis.set(title=title, xlabel="points")
        axis.legend(frameon=False, fontsize=8)
    picture.suptitle(f"A training step of the base preset, {environment()['threads']} threads", fontsize=10)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
