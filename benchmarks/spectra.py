"""How long do the leading modes of a cloud take, against a point cloud Laplacian and a sparse factorization?

Random points of the unit sphere, whose Laplacian has the eigenvalues l (l + 1), 2l + 1 times: each candidate tells how
far its own are from them, which includes the error of sampling. qattn takes σ = 3 spacings and float32, normalizing
included; `robust_laplacian` builds its Laplacian, included too, and ARPACK inverts it by a sparse LU; ARPACK on the
dense operator is the published way. Each runs in a process of its own, once, so that its peak memory is its own.
"""

import argparse
import json
import math

import numpy as np
from _measure import environment, finding, in_its_own_process, once, parsed, save

import qattn
from qattn.pictures import figure
from qattn.shapes import sphere
from qattn.tiles.when_to_compile import compile_at_first_call


def by_qattn(points, k):
    sigma = 3 * math.sqrt(4 * math.pi / len(points))
    q = qattn.diffusion(points, sigma)
    spectrum = qattn.eigsh(q, k)
    gap = 1 - float(spectrum.values[-1])
    residual = float(spectrum.residuals.amax()) / gap
    return spectrum.frequencies.double().numpy(), {"residual": residual}


def by_robust_laplacian(points, k):
    from robust_laplacian import point_cloud_laplacian
    from scipy.sparse.linalg import eigsh

    laplacian, mass = point_cloud_laplacian(points.double().numpy())
    return eigsh(laplacian, k, mass, sigma=-1e-4)[0], {}


def by_dense_operator(points, k):
    from scipy.sparse.linalg import LinearOperator, eigsh

    sigma = 3 * math.sqrt(4 * math.pi / len(points))
    x = points.double().numpy()
    squares = (x**2).sum(1)
    kernel = np.exp(-(squares[:, None] + squares - 2 * x @ x.T) / (2 * sigma**2)) / len(x)
    f = np.zeros(len(x))
    for _ in range(10):
        f = 0.5 * (f - np.log(kernel @ np.exp(f)))
    operator = np.exp(f)[:, None] * kernel * np.exp(f)
    values = eigsh(LinearOperator(operator.shape, matvec=operator.dot, dtype=float), k, which="LA")[0][::-1]
    return -2 / sigma**2 * np.log(values), {}


CANDIDATES = {"qattn": by_qattn, "robust_laplacian": by_robust_laplacian, "dense operator": by_dense_operator}
LIMITS = {"robust_laplacian": 250_000, "dense operator": 5000}  # points beyond which a candidate is not asked


@compile_at_first_call()
def one(name, n, k):
    """Run one candidate in this process, and print a row."""
    points = sphere(n)
    some = sphere(6000)
    CANDIDATES[name](some[:1000], 10)  # imports and compiles everything
    qattn.eigsh(qattn.diffusion(some, 0.2), 10)
    (found, figures), took, megabytes = once(lambda: CANDIDATES[name](points, k))
    exact = np.array([level * (level + 1) for level in range(20) for _ in range(2 * level + 1)][:k])
    deviation = float(np.median(np.abs(found[1:] - exact[1:]) / exact[1:]))
    row = {"name": name, "N": n, "k": k, "seconds": took, "megabytes": megabytes, "deviation": deviation, **figures}
    assert name != "qattn" or deviation < 0.2
    print(json.dumps(row))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5000, 35_000, 250_000, 1_000_000])
    parser.add_argument("--pairs", type=int, nargs="+", default=[40, 64, 128])
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a candidate may take")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parsed(parser, sizes=[5000], pairs=[40])
    if options.one:
        name, n, k = options.one
        return one(name, int(n), int(k))

    print(__doc__.splitlines()[0])
    rows, lines = [], ["| points | eigenpairs | " + " | ".join(CANDIDATES) + " |", "|---" * (2 + len(CANDIDATES)) + "|"]
    for n in options.sizes:
        for k in options.pairs:
            cells, base = [], None
            for name in CANDIDATES:
                if n > LIMITS.get(name, math.inf):
                    cells.append("")
                    continue
                row = in_its_own_process(__file__, "--one", name, n, k, limit=options.limit)
                if isinstance(row, str) and name == "qattn":
                    raise SystemExit(f"{name}: {row}")
                if isinstance(row, str):
                    cells.append(row)
                    continue
                rows.append(row)
                base = base or row["seconds"]
                ratio = "" if name == "qattn" else f" ({row['seconds'] / base:.1f}×)"
                cells.append(
                    f"{row['seconds']:.1f} s{ratio}, {row['megabytes']:,.0f} MB, deviation {row['deviation']:.1%}"
                    + (f", residual {row['residual']:.0e}" if "residual" in row else "")
                )
            lines.append(f"| {n:,} | {k} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    ours = "{seconds:.2f} s, {megabytes:.0f} MB, residual {residual:.0e}"
    findings = [
        finding(f"{k} eigenpairs of {n:,} points", ours, [r for r in rows if (r["N"], r["k"]) == (n, k)])
        for n in options.sizes
        for k in options.pairs
    ]
    plot(rows, save("spectra", rows, findings, options.quick).with_suffix(".png"))


def plot(rows, path):
    picture = figure(6, 4)
    axis = picture.subplots()
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        for k, style in zip(sorted({row["k"] for row in rows}), ("-", "--", ":"), strict=False):
            line = [(row["N"], row["seconds"]) for row in rows if (row["name"], row["k"]) == (name, k)]
            axis.plot(*zip(*line, strict=True), style, marker="o", color=f"C{number}", label=f"{name}, {k} pairs")
    axis.set(xscale="log", yscale="log", xlabel="points", ylabel="seconds, build included")
    axis.set_title(f"{environment()['threads']} threads", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.3, which="both")
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
