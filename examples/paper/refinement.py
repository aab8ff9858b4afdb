"""Convergence of Q of ever finer samplings to an operator of the continuum: theorem 4.5 of the paper.

On the unit sphere the limit is known: Q Y_l = λ_l Y_l for spherical harmonics of degree l, with
λ_l = I_{l+½}(1/σ²) / I_{½}(1/σ²). The theorem is about the largest |Q^s f − Qf| of a continuous f, over all of the
sphere: Q^s is extended from its N points to 20,000 others, f being Legendre's polynomials of degrees 1 to 4 along some
axis. Samplings are random, random but ten times as dense at one pole as at the other, with masses that make up for it,
and regular: the vertices of a subdivided icosahedron, by area, and a spiral of equal masses.
"""

import argparse
import math
import time

import numpy as np
import torch
from claims import parsed, report
from scipy.special import eval_legendre, ive

import qattn
from qattn.pictures import curves, figure
from qattn.shapes import sphere, sphere_mesh

DEGREES = np.arange(1, 5)
AXIS = torch.tensor([0.48, -0.60, 0.64], dtype=torch.float64)  # no symmetry of the regular samplings
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))


def harmonics(points):
    """P_l(u·x) for each degree l, shape (N, 4)."""
    return torch.from_numpy(eval_legendre(DEGREES, (points @ AXIS).numpy()[:, None]))


def around(z, angle):
    """The points of the sphere at heights z, shape (N, 3)."""
    radius = (1 - z**2).clamp(min=0).sqrt()
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle), z], dim=-1)


def random(n, seed):
    return sphere(n, seed=seed, dtype=torch.float64), None


def uneven(n, seed, lean=9 / 11):
    """Drawn with a density of 1 + lean z, and weighed by its inverse."""
    share, turn = torch.rand(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = (torch.sqrt((1 - lean) ** 2 + 4 * lean * share) - 1) / lean  # where ½ ∫ (1 + lean z) dz is that share
    return around(z, 2 * math.pi * turn), 1 / (1 + lean * z)


def spiral(n, seed):
    i = torch.arange(n, dtype=torch.float64) + 0.5
    return around(1 - 2 * i / n, GOLDEN_ANGLE * i), None


def icosphere(n, seed):
    """Make a sphere of about n vertices, with their areas."""
    vertices, faces = sphere_mesh(max(0, round(math.log(n / 10, 4))))
    vertices = torch.nn.functional.normalize(vertices.double(), dim=-1)
    return vertices, qattn.mass.vertex_areas(vertices, faces)


SAMPLINGS = {"random": random, "random, uneven": uneven, "icosphere": icosphere, "spiral": spiral}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigma", type=float, default=0.25)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 2500, 10_000, 40_000, 160_000, 1_000_000])
    parser.add_argument("--places", type=int, default=20_000, help="at which the largest error is looked for")
    parser.add_argument("--seeds", type=int, default=5, help="random samplings of each size")
    parser.add_argument("--output", default="refinement.png")
    options = parsed(parser, sizes=[500, 2000, 6000], places=2000, seeds=4)

    places = sphere(options.places, seed=1000, dtype=torch.float64)
    factors = torch.from_numpy(ive(DEGREES + 0.5, options.sigma**-2) / ive(0.5, options.sigma**-2))
    limit = factors * harmonics(places)
    limits = ", ".join(f"{factor:.4f} Y_{degree}" for degree, factor in zip(DEGREES, factors, strict=True))
    print(f"σ = {options.sigma:g}; the limits are {limits}")
    print(f"{'sampling':16} {'points':>10} {'seconds':>8} {'largest error, by degree':>28}")
    rows = []
    for name, sampling in SAMPLINGS.items():
        draws, tol = (options.seeds, 1e-6) if "random" in name else (1, 1e-10)
        for size in options.sizes:
            errors, start = [], time.perf_counter()
            for seed in range(draws):
                points, mass = sampling(size, seed)
                q = qattn.diffusion(points, options.sigma, mass, tol=tol)
                errors.append((q.extend(places) @ harmonics(points) - limit).abs().amax(0))
            error = torch.stack(errors).mean(0)  # (4,)
            rows.append({"name": name, "N": len(points), "error": float(error.max())})
            by_degree = " ".join(f"{e:8.1e}" for e in error)
            print(f"{name:16} {len(points):10,} {time.perf_counter() - start:8.1f}   {by_degree}", flush=True)

    picture = figure(7, 4.6)
    axis = picture.subplots()
    rates = {}
    for name in SAMPLINGS:
        line = [(row["N"], row["error"]) for row in rows if row["name"] == name]
        rates[name] = float(np.polyfit(*np.log(line).T, 1)[0])
    curves(axis, [{**row, "name": f"{row['name']}: $N^{{{rates[row['name']]:.2f}}}$"} for row in rows], "N", "error")
    axis.set(xscale="log", yscale="log", xlabel="points", ylabel="largest |Qˢf − Qf| on the sphere")
    axis.set_title(f"harmonics of degrees 1 to 4, σ = {options.sigma:g}", fontsize=11)
    picture.savefig(options.output, dpi=110)
    print(f"wrote {options.output}")

    def measured(name):
        first, *_, last = (f"{row['error']:.0e} at {row['N']:,} points" for row in rows if row["name"] == name)
        return f"{first}, {last}: like N^{rates[name]:.2f}"

    report(
        ("Qˢf → Qf uniformly, for random points", measured("random"), abs(rates["random"] + 0.5) < 0.15),
        ("... weighed, of any density", measured("random, uneven"), abs(rates["random, uneven"] + 0.5) < 0.15),
        ("... for the vertices of meshes", measured("icosphere"), rates["icosphere"] < -0.9),
        ("... for a regular cloud", measured("spiral"), rates["spiral"] < -1.3),
    )


if __name__ == "__main__":
    main()
