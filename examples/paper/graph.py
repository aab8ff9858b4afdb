"""A Dirac on a graph of five vertices by four normalizations: figure 2 of the paper.

The Dirac sits on a vertex whose one edge leads to a hub of degree 4, and K = ½(D + A). Of its mass

    row:        ½ + ½ Σ_{i~j} 1 / d_i = 0.625 remain,
    symmetric:  ½ + ½ Σ_{i~j} 1 / √(d_i d_j) = 0.75,

whatever edges join the other three, and both figures of the paper say that its graph is one of those. Its spectral
method is the heat kernel e^{−tΔ}, Δ = D − A, in 4 of its 5 eigenvectors: all of the mass remains, and the other three
get 1/5 − e^{−t}/4 each, which is negative for t < log 5/4. Sinkhorn's normalization keeps mass and sign.
"""

import argparse
import math
from itertools import combinations

import torch
from claims import parsed, report
from matplotlib.patches import Circle

import qattn
from qattn.pictures import figure

DIRAC, HUB, OTHERS = 0, 1, (2, 3, 4)
PLACES = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [0.62, 0.78], [1.0, 0.0], [0.62, -0.78]])
SAID = {"input": 1.00, "row": 0.62, "symmetric": 0.75, "spectral": 1.00, "sinkhorn": 1.00}  # masses in the paper


def adjacency(among_others):
    """Make the matrix of edges from the hub to all others, and of further edges among the other three."""
    edges = [(HUB, DIRAC), *((HUB, other) for other in OTHERS), *among_others]
    A = torch.zeros(5, 5, dtype=torch.float64)
    A[tuple(torch.tensor(edges).T)] = 1
    return A + A.T


def diffused(A, t):
    """The Dirac as it is, and after one step of each operator, shape (5,) each."""
    dirac = torch.eye(5, dtype=torch.float64)[DIRAC]
    kernel = qattn.GraphKernel(A)  # D + A: the factor ½ is normalized out
    steps = {"input": dirac}
    for normalization in ("row", "symmetric", "sinkhorn"):
        steps[normalization] = (
            qattn.diffusion(kernel, normalization=normalization, tol=1e-13, solver=qattn.Solver(max_iter=200)) @ dirac
        )
    laplacian = torch.diag(A.sum(1)) - A
    heat = qattn.diffusion(qattn.MatrixKernel(torch.matrix_exp(-t * laplacian)), tol=1e-13)  # nothing to normalize
    steps["spectral"] = qattn.eigsh(heat, 4).power(1, dirac)
    return {name: steps[name] for name in SAID}


def draw(axis, A, signal, title):
    """Discs whose areas are the entries of the signal, red for positive and blue for negative ones."""
    for edge in A.triu().nonzero():
        axis.plot(*PLACES[edge].T.numpy(), color="0.35", lw=2, zorder=1)
    for vertex, ((x, y), entry) in enumerate(zip(PLACES.tolist(), signal.tolist(), strict=True)):
        radius = 0.42 * math.sqrt(abs(entry))
        axis.add_patch(Circle((x, y), 0.09, facecolor="w", edgecolor="0.35", lw=1.5, zorder=2))
        axis.add_patch(Circle((x, y), radius, facecolor="#c0392b" if entry > 0 else "#2e6fb7", alpha=0.85, zorder=3))
        if abs(entry) > 1e-9:
            label = f"{entry:.3f}".replace("-", "−")
            below = y - max(radius, 0.09) - 0.13
            where = {DIRAC: (x, below), HUB: (x - 0.2, below)}.get(vertex, (x + 0.4, y))  # beside the edges
            axis.text(*where, label, ha="center", va="center", fontsize=11, zorder=4)
    axis.text(0, 1.3, title, ha="center", va="center", fontsize=14, linespacing=1.4)
    axis.set(xlim=(-1.5, 1.6), ylim=(-1.1, 1.6), aspect="equal")
    axis.axis("off")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=float, default=0.1, help="t of the heat kernel, which the paper does not give")
    parser.add_argument("--output", default="graph.png")
    options = parsed(parser)

    possible = list(combinations(OTHERS, 2))
    graphs = {chosen: adjacency(chosen) for n in range(4) for chosen in combinations(possible, n)}  # 8 of them
    found = {chosen: diffused(A, options.time) for chosen, A in graphs.items()}
    shown = ((2, 3), (3, 4))

    print(f"{'':12} {'the paper':>10} {'mass':>10} {'least':>8}   entries")
    picture = figure(17, 3.4)
    titles = {"input": "a Dirac", "spectral": f"4 of 5 eigenvectors, t = {options.time:g}", "sinkhorn": "Sinkhorn"}
    for axis, (name, signal) in zip(picture.subplots(1, 5), found[shown].items(), strict=True):
        mass = float(signal.sum())
        entries = " ".join(f"{entry:6.3f}" for entry in signal)
        print(f"{name:12} {SAID[name]:10.2f} {mass:10.6f} {signal.min():8.4f}   {entries}")
        draw(axis, graphs[shown], signal, f"{titles.get(name, name)}\nmass {mass:.3f}")
    picture.savefig(options.output, dpi=100)
    print(f"wrote {options.output}")

    signals = {name: torch.stack([steps[name] for steps in found.values()]) for name in SAID}  # (8, 5) each
    masses = {name: signal.sum(1) for name, signal in signals.items()}

    def all_are(name, mass):
        return f"{masses[name].mean():.6f} on all 8 graphs", bool((masses[name] - mass).abs().max() < 1e-9)

    ringing, least = signals["spectral"][:, OTHERS], float(signals["sinkhorn"].min())
    exact = 1 / 5 - math.exp(-options.time) / 4
    is_exact = bool((ringing - exact).abs().max() < 1e-9)
    report(
        ("row normalization leaves a mass of 0.62", *all_are("row", 0.625)),
        ("symmetric normalization leaves 0.75", *all_are("symmetric", 0.75)),
        ("the spectral method keeps the mass", *all_are("spectral", 1.0)),
        (
            "... and gets negative",
            f"{ringing.mean():.4f} on three vertices; exactly {exact:.4f}",
            is_exact and exact < 0,
        ),
        ("Sinkhorn keeps the mass", *all_are("sinkhorn", 1.0)),
        ("... and stays non-negative", f"{max(least, 0.0):.4f} at least", least > -1e-12),
    )


if __name__ == "__main__":
    main()
