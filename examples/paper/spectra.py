"""Laplacian eigenvalues of one shape as a cloud, a Gaussian mixture and voxels, against a reference.

As in figure 3 and appendix G of the paper: σ = 0.05, 5,000 points, 500 Gaussians, voxels of edge 0.05; surface and
volume. The sphere of diameter 1, the ball and the solid cube of edge 1 are compared to closed forms, and so are finite
elements; all else is compared to those: cotangents on the triangles of a surface, and linear elements on Delaunay's
tetrahedra of its inside. "Fractions" are voxels that weigh by how much of them is inside, which the paper leaves out.

Deviations are relative: the median and the largest of eigenvalues 2 to 40, and that of the last with its sign. The
picture shows the 10th eigenvector of the first shape by finite elements, the one most like it on each representation,
and eigenvalues. Clouds and mixtures deviate by their sampling: more `--points` and `--samples` bring them closer.
Needs the extras `examples` and `io`.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import trimesh
from claims import parsed, report
from fem import eigenpairs, load, tetrahedralise
from scipy.optimize import brentq
from scipy.spatial import cKDTree
from scipy.special import ive, spherical_jn
from sklearn.mixture import GaussianMixture

import qattn
from qattn.pictures import camera_view, draw_mesh, figure, scatter, signed
from qattn.sampling import in_volume, on_surface, voxelize_solid, voxelize_surface

DIMS = {"surface": 2, "volume": 3}
STYLES = {
    "exact": {"color": "0.75", "lw": 5},
    "exact Q": {"color": "C3", "lw": 1, "ls": "--"},
    "elements": {"color": "k"},
    "points": {"color": "C0"},
    "Gaussians": {"color": "C1"},
    "voxels": {"color": "C2"},
    "fractions": {"color": "C4"},
}


def closed_forms(shape, kind, sigma, k):
    """Eigenvalues of the Laplacian, and what Q gives if nothing is sampled, where they are known."""
    if (shape, kind) == ("sphere", "surface"):
        degrees = np.repeat(np.arange(k), 2 * np.arange(k) + 1)[:k]
        bessel = ive(degrees + 0.5, 0.25 / sigma**2) / ive(0.5, 0.25 / sigma**2)
        return {"exact": 4.0 * degrees * (degrees + 1), "exact Q": qattn.laplacian_eigenvalues(bessel, sigma)}
    if (shape, kind) == ("sphere", "volume"):
        return {"exact": np.sort(np.concatenate([[0.0], *(ball(degree) for degree in range(k))]))[:k]}
    if (shape, kind) == ("cube", "volume"):
        n = np.arange(k) ** 2
        return {"exact": np.pi**2 * np.sort((n[:, None, None] + n[:, None] + n).ravel())[:k]}
    return {}


def ball(degree):
    """Eigenvalues of the ball of radius ½ whose eigenvectors have a degree, without flow through the sphere."""
    x = np.linspace(0.5, 40, 1000)
    slope = spherical_jn(degree, x, derivative=True)
    changes = np.flatnonzero(slope[:-1] * slope[1:] < 0)
    zeros = [brentq(lambda t: spherical_jn(degree, t, derivative=True), x[i], x[i + 1]) for i in changes]
    return np.repeat((np.array(zeros) / 0.5) ** 2, 2 * degree + 1)


def fractions(mesh, spacing, parts=5):
    """Compute the fraction of each voxel inside, by smaller ones (half at the surface), and the center of the first."""
    solid, surface = (voxelize(mesh, spacing / parts) for voxelize in (voxelize_solid, voxelize_surface))
    low = np.rint(solid.origin * parts / spacing).astype(int) + parts // 2  # a multiple of `parts` starts a voxel
    before = low % parts
    after = -(before + solid.mask.shape) % parts
    fine = np.pad(solid.mask - 0.5 * surface.mask, np.stack([before, after], axis=1))
    nx, ny, nz = np.array(fine.shape) // parts
    return fine.reshape(nx, parts, ny, parts, nz, parts).mean((1, 3, 5)), (low - before) / parts * spacing


def representations(mesh, kind, options):
    """Kernel, masses, places of its sites, and σ of the diffusion, of each."""

    def sampled(n, seed):
        return on_surface(mesh, n, seed)[0] if kind == "surface" else in_volume(mesh, n, seed)

    points = torch.from_numpy(sampled(options.points, 0)).float()
    yield "points", qattn.GaussianKernel(points, options.sigma), None, points, options.sigma

    fitted = GaussianMixture(options.components, max_iter=20, tol=1e-2, random_state=0).fit(sampled(options.samples, 1))
    kernel = qattn.MixtureKernel.from_sklearn(fitted, options.sigma)
    yield "Gaussians", kernel, None, kernel.means.float(), kernel.effective_sigma(DIMS[kind])

    voxels = (voxelize_surface if kind == "surface" else voxelize_solid)(mesh, options.spacing)
    kernel = qattn.VoxelKernel(voxels.mask, options.sigma, options.spacing)
    mass = qattn.mass.voxel_density(voxels.mask) if kind == "surface" else None
    yield "voxels", kernel, mass, kernel.points + torch.from_numpy(voxels.origin).float(), options.sigma

    if kind == "volume":
        weights, origin = fractions(mesh, options.spacing)
        kernel = qattn.VoxelKernel(weights, options.sigma, options.spacing)
        yield "fractions", kernel, None, kernel.points.float() + torch.from_numpy(origin).float(), options.sigma


def spectra(shape, mesh, kind, options):
    """Eigenvalues by name, the first the reference, printed; and (name, kernel, sites, eigenvector) to be drawn."""
    print(f"\n{f'{Path(shape).stem}, {kind}':20} {'sites':>7} {'seconds':>8} {'median':>8} {'maximum':>8} {'last':>8}")
    values = closed_forms(shape, kind, options.sigma, options.k)
    for name, found in values.items():
        print(row(name, "", "", found, values))
    start = time.perf_counter()
    vertices, simplices = mesh if kind == "surface" else tetrahedralise(mesh)
    values["elements"], vectors = eigenpairs(vertices, simplices, options.k)
    print(row("elements", len(vertices), time.perf_counter() - start, values["elements"], values), flush=True)
    vector, tree = torch.from_numpy(vectors[:, options.vector - 1]), cKDTree(vertices)
    drawn = [(f"{kind}, elements: eigenvector {options.vector}", None, mesh[0], vector[: len(mesh[0])])]
    for name, kernel, mass, sites, sigma in representations(mesh, kind, options):
        start = time.perf_counter()
        spectrum = qattn.eigsh(qattn.diffusion(kernel, mass=mass, tol=1e-6), options.k, tol=1e-3)
        values[name] = qattn.laplacian_eigenvalues(spectrum.values.double().numpy(), sigma)
        print(row(name, len(sites), time.perf_counter() - start, values[name], values), flush=True)
        alike = spectrum.project(vector[tree.query(sites)[1]].to(spectrum.mass))
        best = int(alike.abs().argmax())
        title = f"{kind}, {len(sites):,} {name}: eigenvector {best + 1}"
        drawn.append((title, kernel, sites, spectrum.vectors[:, best] * alike[best].sign()))
    return values, drawn


def deviations(found, values):
    """Compute relative deviations of eigenvalues 2 and up from the first of `values`."""
    reference = next(iter(values.values()))
    return found[1:] / reference[1:] - 1


def row(name, sites, seconds, found, values):
    sites, seconds = sites and f"{sites:,}", seconds and f"{seconds:.1f}"
    if found is next(iter(values.values())):
        return f"  {name:18} {sites:>7} {seconds:>8} {'reference':>17}"
    deviation = deviations(found, values)
    size = np.abs(deviation)
    return f"  {name:18} {sites:>7} {seconds:>8} {np.median(size):8.2%} {size.max():8.2%} {deviation[-1]:+8.2%}"


def draw(axis, mesh, kernel, sites, vector):
    """Red where an eigenvector is positive, blue where it is negative: the mesh itself without a kernel."""
    vertices, faces = torch.from_numpy(mesh[0]).float(), torch.from_numpy(mesh[1])
    if kernel is None:
        draw_mesh(axis, vertices, faces, signed(vector[faces].mean(1)))
        return
    if isinstance(kernel, qattn.MixtureKernel):  # points drawn from each component
        draws = torch.randn(len(sites), 100, 3, generator=torch.Generator().manual_seed(0))
        sites = (sites[:, None] + draws @ torch.linalg.cholesky(kernel.tensors[1].float()).mT).reshape(-1, 3)
        vector = vector.repeat_interleave(100)
    normals = torch.tensor(trimesh.Trimesh(*mesh, process=False).vertex_normals, dtype=torch.float32)
    view, facing = camera_view(sites, normals[torch.from_numpy(cKDTree(vertices).query(sites)[1])])
    kinds = {qattn.GaussianKernel: (20, "o"), qattn.MixtureKernel: (5, "o"), qattn.VoxelKernel: (48, "s")}
    scatter(axis, view, facing, signed(vector), *kinds[type(kernel)])


def claims(found, k):
    """List the paper's claims on the eigenvalues of each (shape, kind), by name."""
    clouds = ("points", "Gaussians", "voxels")
    medians = {
        name: [
            [np.median(np.abs(deviations(v[name], v))) for (_, of), v in found.items() if of == kind] for kind in DIMS
        ]
        for name in clouds
    }  # a list each for surfaces and for volumes
    surfaces, volumes = (np.concatenate([medians[name][n] for name in clouds]) for n in range(2))
    yield (
        "eigenvalues of surfaces are consistent across modalities",
        f"median deviations of {surfaces.min():.1%} to {surfaces.max():.1%}",
        bool(surfaces.max() < 0.12),
    )
    pairs = list(zip(*medians["voxels"], strict=True))
    yield (
        "those of volumes deviate, near the scale of voxels",
        f"median deviations of {volumes.min():.1%} to {volumes.max():.1%}; by voxels, "
        + ", ".join(f"{solid:.1%} (surface {shell:.1%})" for shell, solid in pairs),
        all(bool(solid > shell) for shell, solid in pairs),
    )
    if ("sphere", "surface") in found:
        ends = [n**2 - 1 for n in range(1, k) if n**2 < k]  # of 0, 8, 8, 8, 24, … the last of each value
        steps = np.stack([np.diff(found["sphere", "surface"][name]) for name in clouds])
        between, within = steps[:, ends].min(), np.delete(steps, ends, axis=1).max()
        yield (
            "those of the sphere have plateaus",
            f"steps of {between:.1f} or more from one to the next, of {within:.1f} or less within",
            bool(within < between),
        )
    solids = {where: v for where, v in found.items() if where[0] in ("sphere", "cube")}
    if solids:
        last = [float(deviations(v[name], v)[-1]) for v in solids.values() for name in ("points", "Gaussians")]
        yield (
            "those of coarse clouds and mixtures of the sphere and the cube grow more slowly",
            f"the last deviate by {min(last):+.0%} to {max(last):+.0%}",
            True if max(last) < 0 else None,  # not so at the quick size, where σ is larger
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", default=["creature", "sphere", "cube"], help="of these, or paths of closed meshes"
    )
    parser.add_argument("--points", type=int, default=5000)
    parser.add_argument("--components", type=int, default=500)
    parser.add_argument("--samples", type=int, default=10_000, help="that mixtures are fitted to")
    parser.add_argument("--spacing", type=float, default=0.05)
    parser.add_argument("--sigma", type=float, default=0.05)
    parser.add_argument("--k", type=int, default=40)
    parser.add_argument("--vector", type=int, default=10, help="which eigenvector is shown, counted from 1")
    parser.add_argument("--output", default="spectra.png")
    options = parsed(parser, shape=["sphere"], points=2000, components=150, samples=3000, spacing=0.1, sigma=0.1, k=16)

    rows = 2 + -(-2 * (len(options.shape) - 1) // 5)
    picture = figure(18, 3.5 * rows)
    axes = picture.subplots(rows, 5)
    free = iter([*axes[:2, 4], *axes[2:].flat])
    found = {}
    for shape in options.shape:
        mesh = load(shape)
        for number, kind in enumerate(DIMS):
            values, drawn = spectra(shape, mesh, kind, options)
            found[shape, kind] = values
            axis = next(free)
            for name, curve in values.items():
                axis.plot(range(1, options.k + 1), curve, label=name, **STYLES[name])
            axis.set_title(f"{Path(shape).stem}, {kind}: eigenvalues")
            axis.legend(frameon=False)
            if shape == options.shape[0]:
                for axis, (title, kernel, sites, vector) in zip(axes[number, :4], drawn, strict=False):
                    draw(axis, mesh, kernel, sites, vector.float())
                    axis.set_title(title)
    for axis in free:
        axis.axis("off")
    picture.savefig(options.output, dpi=90)
    print(f"\nwrote {options.output}")
    report(*claims(found, options.k))


if __name__ == "__main__":
    main()
