"""One shape as a cloud, a Gaussian mixture, voxels and a graph, and the same Dirac diffused on each.

All four go through `qattn.diffusion(kernel)`. Each shows the density of one unit of mass that started on the nose, at
the time at which it has spread as far as on the cloud.
"""

import argparse

import torch
from matplotlib.collections import LineCollection
from quick import parsed
from scipy.spatial import cKDTree
from sklearn.mixture import GaussianMixture

import qattn
from qattn.pictures import camera_view, figure, heat, light, scatter
from qattn.shapes import creature, creature_distance

NOSE = torch.tensor([1.02, 0.35, 0.0])


def normals_at(points):
    """Compute normals of the creature at points near its surface."""
    points = points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(creature_distance(points).sum(), points)
    return torch.nn.functional.normalize(gradient, dim=-1)


def cloud(n, sigma):
    points = creature(n)[0]
    return qattn.GaussianKernel(points, sigma), None, points


def mixture(components, sigma):
    """Fitted to samples by expectation maximization."""
    samples = creature(10_000, seed=1)[0].numpy()
    fitted = GaussianMixture(components, max_iter=20, tol=1e-2, random_state=0).fit(samples)
    kernel = qattn.MixtureKernel.from_sklearn(fitted, sigma)
    return kernel, None, kernel.means.float()


def voxels(spacing, sigma):
    """Return the kernel of the voxels that the surface crosses, their masses by density, and their centers."""
    axes = [torch.arange(low, high, spacing) for low, high in ((-1.1, 1.1), (-0.8, 0.9), (-0.4, 0.4))]
    centers = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    mask = creature_distance(centers).abs() < 0.6 * spacing
    return qattn.VoxelKernel(mask, sigma, spacing), qattn.mass.voxel_density(mask), centers[mask]


def graph(n):
    """The eight nearest neighbors of each vertex, and of whom it is one."""
    points = creature(n, seed=2)[0]
    neighbors = torch.from_numpy(cKDTree(points).query(points, 9)[1][:, 1:])
    pairs = torch.stack([torch.arange(n).repeat_interleave(8), neighbors.reshape(-1)])
    pairs = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    return qattn.GraphKernel(pairs), None, points, pairs


def spread(points, mass, density):
    """The root mean square distance from the nose."""
    return float((mass * density * (points - NOSE).square().sum(-1)).sum() ** 0.5)


def diffused(kernel, mass, points, goal=None, steps=None):
    """A Dirac on the nose, after some steps, or after as many as take it as far as `goal`."""
    q = qattn.diffusion(kernel, mass=mass, tol=1e-5)
    mass = q.mass.float() / q.mass.sum()
    density = torch.zeros(len(points))
    start = int((points - NOSE).norm(dim=-1).argmin())
    density[start] = 1 / mass[start]
    done = 0
    while done < steps if steps is not None else spread(points, mass, density) < goal:
        density, done = (q @ density.to(kernel.dtype)).float(), done + 1
    return q, mass, density, done


def draw_mixture(axis, kernel, density):
    """Points drawn from each component, in its color."""
    covariances = kernel.tensors[1].float()
    draws = torch.randn(len(density), 150, 3, generator=torch.Generator().manual_seed(0))
    points = kernel.means.float()[:, None] + draws @ torch.linalg.cholesky(covariances).mT
    points, color = points.reshape(-1, 3), heat(density).repeat_interleave(150, 0)
    scatter(axis, *camera_view(points, normals_at(points)), color, 12)


def draw_graph(axis, points, pairs, density):
    view, facing = camera_view(points, normals_at(points))
    first, second = pairs[:, (pairs[0] < pairs[1]) & (facing[pairs[0], 2] > -0.2)]
    first, second = (ends[torch.argsort(view[first, 2])] for ends in (first, second))
    shaded = (heat(density) * light(facing)).clamp(0, 1)
    lines = torch.stack([view[first, :2], view[second, :2]], dim=1)
    axis.add_collection(LineCollection(lines.numpy(), colors=0.5 * (shaded[first] + shaded[second]).numpy(), lw=1.2))
    axis.autoscale()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--components", type=int, default=400)
    parser.add_argument("--spacing", type=float, default=0.025)
    parser.add_argument("--vertices", type=int, default=3000)
    parser.add_argument("--sigma", type=float, default=0.06)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="modalities.png")
    options = parsed(parser, points=1000, components=20, spacing=0.06, vertices=500, sigma=0.1, steps=10)

    *a_graph, pairs = graph(options.vertices)
    inputs = {
        "points": cloud(options.points, options.sigma),
        "Gaussians": mixture(options.components, options.sigma),
        "voxels": voxels(options.spacing, options.sigma),
        "vertices": a_graph,
    }
    picture = figure(17, 4)
    print(f"{'':10} {'sites':>7} {'passes':>7} {'|Q1 - 1|':>9} {'steps':>6} {'mass':>9} {'smallest':>9} {'spread':>7}")
    goal = None
    for axis, (name, (kernel, mass, points)) in zip(picture.subplots(1, 4), inputs.items(), strict=True):
        q, mass, density, steps = diffused(kernel, mass, points, goal, options.steps if goal is None else None)
        far = spread(points, mass, density)
        goal = goal or far
        total, least = float((mass * density).sum()), float(density.min())
        print(
            f"{name:10} {len(points):7,} {int(q.num_iter):7d} {float(q.marginal_error):9.1e} {steps:6d} "
            f"{total:9.6f} {least:9.1e} {far:7.3f}",
            flush=True,
        )
        if name == "Gaussians":
            draw_mixture(axis, kernel, density)
        elif name == "vertices":
            draw_graph(axis, points, pairs, density)
        else:
            size, marker = (24, "o") if name == "points" else (22, "s")
            scatter(axis, *camera_view(points, normals_at(points)), heat(density), size, marker)
        axis.set_title(f"{len(points):,} {name}", fontsize=15)
        axis.set_aspect("equal")
        axis.axis("off")
    picture.savefig(options.output, dpi=100)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
