"""Checks that run on every rank of a group, against one process with the whole cloud in float64; no tests.

python on_ranks.py PORT RANKS CHECK METHOD
"""

import datetime
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import qattn
from qattn.distributed import Group, compact, gather, shard
from qattn.tiles import when_to_compile

sharded_kernel = partial(qattn.GaussianKernel, group="world")
SIGMA, TOL = 0.4, {"exact": 1e-10, "tiles": 1e-6, "fourier": 1e-6}


def close(found, expected, tol=1e-9):
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def cloud(N=230, seed=0):
    """A sphere with a few points of no mass, and a signal."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    points = torch.nn.functional.normalize(points, dim=-1) + 5  # off the origin, by different means on the ranks
    mass = torch.rand(N, generator=generator, dtype=torch.float64) + 0.1
    mass[::11] = 0
    return points, mass, torch.randn(N, 2, generator=generator, dtype=torch.float64)


def refusal(function):
    """Return the message for wrong input."""
    try:
        function()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def shares(N):
    """Yield indices of the points of this rank: compact shards, uneven ones, and all points on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    yield shard(cloud(N)[0])
    cuts = [N * r**2 // size**2 for r in range(size + 1)]
    yield torch.arange(N)[cuts[rank] : cuts[rank + 1]]
    yield torch.arange(N if rank == size - 1 else 0)


def same_as_one(method):
    """Attention, the operator, its transpose, its gradient in space, its extension, and what they report."""
    points, mass, signal = cloud()
    N, tol = len(points), TOL[method]
    exact = qattn.GaussianKernel(points, SIGMA, method="exact")
    smooth, whole = qattn.diffuse(exact, None, signal, mass, tol=1e-8)
    bias = torch.linspace(-1, 1, N).double()
    expected = qattn.GaussianKernel(points, SIGMA, method="exact").attend(bias, signal)
    elsewhere = points[:7] * 1.1
    for index in shares(N):
        kernel = sharded_kernel(points[index], SIGMA, method=method, tol=tol)
        assert kernel.shape == (len(index), len(index))
        found = kernel.attend(bias[index], signal[index])
        close(found.lse, expected.lse[index], 10 * tol)
        close(found.out, expected.out[index], 10 * tol)
        close(kernel.error(bias[index]), torch.zeros(()).double(), 2 * tol)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            applied, q = qattn.diffuse(kernel, None, signal[index], mass[index], tol=1e-8)
        assert bool(q.converged)
        assert int(q.num_iter) == int(whole.num_iter)
        close(q.potential, whole.potential[index], 10 * tol)
        close(applied, smooth[index], 10 * tol)
        close(q @ signal[index], (whole @ signal)[index], 10 * tol)
        close(q.T @ signal[index], (whole.T @ signal)[index], 100 * tol)
        for got, wanted in zip(q.value_and_gradient(signal[index]), whole.value_and_gradient(signal), strict=True):
            close(got, wanted[index], 100 * tol)
        some = torch.arange(7)[dist.get_rank() :: dist.get_world_size()]
        close(q.extend(elsewhere[some]) @ signal[index], (whole.extend(elsewhere) @ signal)[some], 10 * tol)
        close(gather(applied, index), smooth, 10 * tol)

        again = qattn.diffusion(kernel, mass=mass[index], tol=1e-6, init=q.potential)
        assert int(again.num_iter) == 1
        for name in ("row", "symmetric", "none"):
            other = qattn.diffusion(kernel, normalization=name)
            same = qattn.diffusion(qattn.GaussianKernel(points, SIGMA, method="exact"), normalization=name)
            close(other @ signal[index], (same @ signal)[index], 10 * tol)
            close(other.marginal_error, same.marginal_error, 10 * tol)

    assert (q.extend(points[:0]) @ signal[index]).shape == (0, 2)  # nowhere, on no rank
    everything = torch.full((N,), -torch.inf).double()
    assert (kernel.attend(everything[index]).lse == -torch.inf).all()


def with_normals(method):
    """Attention, its error and the operator of a kernel that knows normals, which are sharded with the points."""
    points, mass, signal = cloud()
    bias, tol = torch.linspace(-1, 1, len(points)).double(), TOL[method]
    whole = qattn.OrientedKernel(points, points - 5, SIGMA, method="exact", tol=1e-10)
    expected, smooth = whole.attend(bias, signal), qattn.diffusion(whole, mass=mass, tol=1e-8) @ signal
    for index in shares(len(points)):
        own = points[index]
        kernel = qattn.OrientedKernel(own, own - 5, SIGMA, method=method, tol=tol, group="world")
        found = kernel.attend(bias[index], signal[index])
        close(found.lse, expected.lse[index], 10 * tol)
        close(found.out, expected.out[index], 10 * tol)
        close(kernel.error(bias[index]), torch.zeros(()).double(), 2 * tol)
        close(qattn.diffusion(kernel, mass=mass[index], tol=1e-8) @ signal[index], smooth[index], 10 * tol)
        close(kernel.at(own, own - 5).attend(bias[index]).lse, expected.lse[index], 10 * tol)
    assert "needs all sites in one process" in refusal(lambda: kernel.at(own))


def near_and_far(method):
    """Small bandwidths: only what is near another rank is sent there; also for points without mass, far from all."""
    N, sigma, tol = 3000, 0.05 if method != "fourier" else 0.3, 1e-5
    points, mass, signal = cloud(N)
    points[0] += 3.0  # mass 0
    signal = signal.abs()
    bias = torch.log(mass) + 3 * torch.rand(N, dtype=torch.float64)
    expected = qattn.GaussianKernel(points, sigma, method="exact").attend(bias, signal)
    for index in shares(N):
        kernel = sharded_kernel(points[index], sigma, method=method, tol=tol)
        out, lse = kernel.attend(bias[index], signal[index])
        counts = (index > 0) | (method != "fourier")  # whose error is absolute, so that it loses the one far from all
        torch.testing.assert_close(lse[counts], expected.lse[index][counts], rtol=0, atol=tol)
        torch.testing.assert_close(out[counts], expected.out[index][counts], rtol=0, atol=6 * tol)
    if method == "tiles":
        index = shard(points)
        kernel = sharded_kernel(points[index], sigma, method=method, tol=1e-3)
        assert kernel.attend(torch.zeros(len(index)).double(), signal[index]).lse.isfinite().all()  # finds the halo
        before = kernel.ranks.sent
        kernel.attend(torch.zeros(len(index)).double(), signal[index])
        everything = 8 * (N - len(index)) * (3 + 1 + 2)
        assert kernel.ranks.sent - before < 0.5 * everything


def batches_and_heads(method):
    points = torch.stack([cloud(seed=1)[0], cloud(seed=2)[0] * torch.tensor([1.0, 0.3, 2.0])])
    sigma, signal = torch.tensor([0.3, 0.6, 1.2]).double(), torch.randn(2, 3, 230, 2, dtype=torch.float64)
    tol = TOL[method]
    smooth, whole = qattn.diffuse(qattn.GaussianKernel(points, sigma, method="exact"), None, signal, tol=1e-8)
    for index in list(shares(230))[1:]:
        kernel = sharded_kernel(points[:, index], sigma, method=method, tol=tol)
        applied, q = qattn.diffuse(kernel, None, signal[..., index, :], tol=1e-8)
        close(q.potential, whole.potential[..., index], 10 * tol)
        close(applied, smooth[..., index, :], 10 * tol)
        close(q @ signal[0, 0, index], (whole @ signal[0, 0])[..., index, :], 10 * tol)
        assert q.marginal_error.shape == (2, 3)
        for item in ((0, 1), (..., -1), 1):
            close(q[item] @ signal[0, 0, index], (whole[item] @ signal[0, 0])[..., index, :], 10 * tol)


def gradients(method):
    """Gradients by points, σ, masses and signal, through the normalization, with a graph and without; second orders."""
    N, tol = 90, TOL[method]
    given = cloud(N)
    weights = torch.randn(N, 2, dtype=torch.float64)

    def loss_of(kernel, points, sigma, mass, signal, weights):
        q = qattn.diffusion(kernel(points, sigma), mass=mass, tol=1e-11)
        return (q @ signal * weights).sum()

    def derivatives(kernel, index):
        points, mass, signal = (x[index].clone().requires_grad_() for x in given)
        sigma = torch.tensor(SIGMA, dtype=torch.float64, requires_grad=True)
        inputs = points, sigma, mass, signal
        loss = loss_of(kernel, *inputs, weights[index])
        plain = torch.autograd.grad(loss, inputs, retain_graph=True)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        if method == "fourier":  # many small sums, which take their time
            return *plain, *first
        # A second order that goes through everything: of |∂loss/∂points|².
        return *plain, *first, *torch.autograd.grad(first[0].square().sum(), inputs)

    expected = derivatives(lambda x, s: qattn.GaussianKernel(x, s, method="exact"), torch.arange(N))
    for index in list(shares(N))[1:]:
        found = derivatives(lambda x, s: sharded_kernel(x, s, method=method, tol=tol), index)
        for got, wanted in zip(found, expected[: len(found)], strict=True):
            if wanted.ndim == 0:  # of σ each rank has a part
                close(Group().sum(got), wanted, 1e3 * tol)
            else:
                close(got, wanted[index], 1e3 * tol)


def subgroups(method):
    """Two clouds at a time, each on a group of its own; and groups of one rank."""
    points, mass, signal = cloud()
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = qattn.diffusion(qattn.GaussianKernel(points, SIGMA, method="exact"), mass=mass, tol=1e-8)
    for width in (size // 2, 1):
        groups = [dist.new_group(list(range(first, first + width))) for first in range(0, size, width)]
        group = groups[rank // width]
        index = shard(points, group)
        q = qattn.diffusion(sharded_kernel(points[index], SIGMA, group=group, method=method), mass=mass[index])
        close(gather(q @ signal[index], index, group), whole @ signal, 1e-2)
        numbers, x = compact(points[index], group=group)
        close(x, points[torch.cat(Group(group).joined(index))[numbers]])


def spectra(method):
    """Eigenpairs of few points, by the whole matrix; of more, by blocks; of many, from those of coarser levels."""
    for N, sigma in ((230, SIGMA), (1500, 0.3), (5000, 0.2)):
        points, mass, signal = cloud(N)
        whole = qattn.diffusion(qattn.GaussianKernel(points, sigma, method="exact"), mass=mass, tol=1e-9)
        expected = qattn.eigsh(whole, 4, tol=1e-5)
        for index in list(shares(N))[1:]:
            q = qattn.diffusion(sharded_kernel(points[index], sigma, method=method), mass=mass[index], tol=1e-9)
            spectrum = qattn.eigsh(q, 4, tol=1e-5)
            close(spectrum.values, expected.values, 1e-6)
            close(spectrum.vectors, expected.vectors[index], 1e-3)
            close(spectrum.mass, expected.mass[index])
            close(spectrum.frequencies, expected.frequencies, 1e-3)
            assert float(spectrum.residuals.amax()) < 1e-4
            close(spectrum.project(signal[index]), expected.project(signal), 1e-3)
            close(spectrum.power(0.5, signal[index]), expected.power(0.5, signal)[index], 1e-3)
            assert qattn.eigsh(q, 4, init=spectrum).vectors.shape == (len(index), 4)
            assert "sharded over several" in refusal(
                lambda s=spectrum: qattn.maps.point_map(s, s, torch.eye(4).double())
            )


def compacted(method):
    """Points that lie anywhere come to lie near one another, with all that belongs to them, and none is lost."""
    points, mass, signal = cloud(3000)
    size = dist.get_world_size()
    for index in (*shares(3000), torch.arange(3000)[dist.get_rank() :: size]):
        order = torch.cat(Group().joined(index))  # the numbers count over the ranks
        numbers, x, m, f = compact(points[index], mass[index].float(), signal[index])
        close(x, points[order[numbers]])
        close(m, mass[order[numbers]].float())
        close(f, signal[order[numbers]])
        everyone = torch.cat(Group().joined(numbers))
        assert (everyone.sort().values == torch.arange(3000)).all()
        assert 0.9 * 3000 / size < len(x) < 1.1 * 3000 / size
        sides = torch.stack([points.amax(0) - points.amin(0), x.amax(0) - x.amin(0)])
        assert (sides[1] < 0.7 * sides[0]).any()  # a part of space
    kernel = sharded_kernel(x, 0.2, method=method)
    whole = qattn.diffusion(qattn.GaussianKernel(points, 0.2, method="exact"), mass=mass)
    q = qattn.diffusion(kernel, mass=m)
    close(q @ f, (whole @ signal)[order[numbers]], 1e-2)
    same = torch.zeros(7 * (dist.get_rank() == 0), 3)  # in one place, on one rank
    assert sum(len(part) for part in Group().joined(compact(same)[0])) == 7
    assert [len(part) for part in compact(same[:0])] == [0, 0]
    assert "one row per point" in refusal(lambda: compact(points[:5], mass[:4]))


def dtensors(method):
    """DTensors in, DTensors out, also where the points cannot be shared out evenly, and gradients by them."""
    for N in (230, 231, 1):
        points, _, signal = cloud(N)
        mass = torch.linspace(1, 2, N).double()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = points.clone().requires_grad_()
        expected = qattn.diffusion(qattn.GaussianKernel(whole, SIGMA, method="exact"), mass=mass, tol=1e-9) @ signal
        expected.square().sum().backward()
        sharded = distribute_tensor(points, mesh, [Shard(0)]).requires_grad_()
        masses, signals = (distribute_tensor(x, mesh, [Shard(0)]) for x in (mass, signal))
        q = qattn.diffusion(sharded_kernel(sharded, SIGMA, method=method, tol=1e-9), mass=masses, tol=1e-9)
        found = q @ signals
        assert isinstance(found, DTensor)
        close(found.full_tensor(), expected.detach(), 1e-7)
        close((q @ signals[:, 0]).full_tensor(), expected[:, 0].detach(), 1e-7)
        found.to_local().square().sum().backward()
        close(sharded.grad.full_tensor(), whole.grad, 1e-5)
        value, gradient = q.value_and_gradient(signals)
        close(value, found.to_local(), 1e-7)
        assert gradient.shape == (len(value), 2, 3)
        there = q.extend(points[:3]) @ signals  # which all ranks ask for
        close(
            there,
            (qattn.diffusion(qattn.GaussianKernel(points, SIGMA), mass=mass, tol=1e-9).extend(points[:3]) @ signal),
            1e-7,
        )
        applied, _ = qattn.diffuse(q.kernel, None, signals, masses, init=q.potential)
        close(applied.full_tensor(), expected.detach(), 1e-2)
        heads = qattn.diffusion(sharded_kernel(sharded.detach(), [0.3, 0.6], method=method)) @ signals
        assert heads.shape == (2, N, 2)
        assert heads.full_tensor().shape == (2, N, 2)
    alone = qattn.GaussianKernel(points, SIGMA)
    replicated = distribute_tensor(points, mesh, [Replicate()])
    assert "redistribute" in refusal(lambda: sharded_kernel(replicated, SIGMA))
    assert qattn.GaussianKernel(sharded, SIGMA).ranks.size == dist.get_world_size()
    assert "full_tensor" in refusal(lambda: qattn.diffusion(alone) @ signals)
    assert "full_tensor" in refusal(lambda: qattn.diffusion(alone, mass=masses))


def cold(method):
    """Loops are compiled on some ranks only, one of which has no points: all choose alike, and make the same calls."""
    compiler = dict.fromkeys(when_to_compile._COMPILER, 0.0 if dist.get_rank() else 1e9)
    machine = {"is_compiled": lambda task: False, "remember": lambda task: None, "_COMPILER": compiler, "_spent": {}}
    points, mass, signal = cloud(6000)

    def gradients(kernel, index, dtype):
        x, signals = (given[index].to(dtype).requires_grad_() for given in (points, signal))
        q = qattn.diffusion(kernel(x, SIGMA), mass=mass[index].to(dtype), tol=1e-6)
        return torch.autograd.grad((q @ signals).square().sum(), (x, signals))

    expected = gradients(partial(qattn.GaussianKernel, method="exact"), torch.arange(6000), torch.float64)
    with patch.multiple(when_to_compile, **machine):
        for index in list(shares(6000))[1:]:
            kernel = sharded_kernel(points[index].float(), SIGMA, method=method)
            notes = [None] * dist.get_world_size()
            dist.all_gather_object(notes, [str(choice) for choice in kernel.choices()])
            assert notes == notes[:1] * len(notes)
            found = gradients(partial(sharded_kernel, method=method, tol=1e-5), index, torch.float32)
            for got, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(got.double(), wanted[index], rtol=0, atol=1e-3 * float(wanted.abs().amax()))


def cancelled(_):
    """Gradients by a backend that multiplies coordinates, in float32: summed in float64 where they would cancel."""
    points, _, signal = cloud(300)

    def gradients(kernel, index, dtype):
        x, sigma = points[index].to(dtype).requires_grad_(), torch.tensor(0.01, dtype=dtype, requires_grad=True)
        out, lse = kernel(x, sigma).attend(torch.zeros(len(index), dtype=dtype), signal[index].to(dtype))
        return torch.autograd.grad(out.square().sum() + lse.square().sum(), (x, sigma))

    expected = gradients(partial(qattn.GaussianKernel, method="exact"), torch.arange(300), torch.float64)
    for index in shares(300):
        by_points, by_sigma = gradients(partial(sharded_kernel, backend="reference"), index, torch.float32)
        torch.testing.assert_close(Group().sum(by_sigma.double()), expected[1], rtol=3e-4, atol=0)
        atol = 1e-3 * float(expected[0].abs().amax())
        torch.testing.assert_close(by_points.double(), expected[0][index], rtol=0, atol=atol)


def choices(_):
    """All ranks take the same method, the cheapest for each bandwidth, whatever they hold."""
    points = cloud(12_000)[0].float()
    for index in shares(len(points)):
        kernel = sharded_kernel(points[index], [0.02, 0.8])
        few = sharded_kernel(points[index][:30], 0.1)
        assert kernel.method == ("auto", "auto")  # still to be chosen
        smooth, q = qattn.diffuse(kernel, None, points[index])
        assert kernel.method == ("tiles", "fourier")
        qattn.diffusion(few)
        assert few.method == "exact"
        assert bool(q.converged.all())
        assert float(q.kernel_error().amax()) <= 1e-3
        assert smooth.shape == (2, len(index), 3)


def networks(method):
    """A network on a cloud over all ranks is the network on the cloud; DDP trains it."""
    points, mass, features = cloud(120)
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"num_scales": 2, "channels_per_scale": 2, "num_blocks": 2, "sigma_range": (0.2, 1.0), "tol": 1e-9}
    for output in ("points", "mean"):
        torch.manual_seed(0)
        whole = qattn.nn.QDiffNet(2, 3, output=output, method="exact", **options).double()
        torch.manual_seed(rank)  # rank 0 decides where the parameters start
        network = qattn.nn.QDiffNet(2, 3, output=output, method=method, group="world", **options).double()
        parallel = DistributedDataParallel(network)
        for index in shares(120):
            whole.zero_grad()
            network.zero_grad()
            expected = whole(features, points, mass)
            expected.square().sum().backward()
            found = parallel(features[index], points[index], mass[index])
            close(found, expected[index] if output == "points" else expected, 1e-4)
            # DDP averages over the ranks: losses that add up count as often, those that all have alike once.
            loss = found.square().sum() * (size if output == "points" else 1)
            loss.backward()
            for got, wanted in zip(network.parameters(), whole.parameters(), strict=True):
                close(got.grad, wanted.grad, 1e-3)
    equal = whole(features, points)  # masses that are not given are equal over all ranks
    close(parallel(features[index], points[index]), equal, 1e-4)
    block = qattn.nn.QBlock(2, 1, content_dim=2, group="world", method="exact").double()
    for parameter in block.parameters():
        dist.broadcast(parameter.data, 0)
    assert block(features[index], points[index]).shape == (len(index), 2)


def compiled_in_bfloat16(method):
    """A network on a cloud over all ranks, traced, and under autocast."""
    points, mass, features = (x.float() for x in cloud(120))
    index = shard(points)
    torch.manual_seed(0)
    network = qattn.nn.QDiffNet(
        2, 3, num_scales=2, channels_per_scale=2, sigma_range=(0.2, 1.0), method=method, group="world"
    )
    expected = network(features[index], points[index], mass[index])
    traced = torch.compile(network, backend="eager")
    close(traced(features[index], points[index], mass[index]), expected, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(features[index], points[index], mass[index])
    close(found.float(), expected, 0.05)
    found.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def fully_sharded(method):
    """FSDP has the gradients of one process, with a cloud for each rank and with one over all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    clouds = [cloud(60, seed)[0] for seed in range(size)]
    sizes = {"num_scales": 2, "channels_per_scale": 2, "num_blocks": 2}
    options = {**sizes, "sigma_range": (0.2, 1.0), "tol": 1e-9, "method": method}
    for sharded in (False, True):
        torch.manual_seed(0)
        whole = qattn.nn.QDiffNet(3, 2, **options).double()
        torch.manual_seed(0)
        network = qattn.nn.QDiffNet(3, 2, group="world" if sharded else None, **options).double()
        for part in (*network.blocks, network):
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
        if sharded:
            mine = clouds[0][shard(clouds[0])]
            (size * network(mine, mine).square().sum()).backward()
            whole(clouds[0], clouds[0]).square().sum().backward()
        else:
            network(clouds[rank], clouds[rank]).square().sum().backward()
            (sum(whole(x, x).square().sum() for x in clouds) / size).backward()
        for got, wanted in zip(network.parameters(), whole.parameters(), strict=True):
            close(got.grad.full_tensor(), wanted.grad, 1e-5)


def refusals(_):
    points, rank = torch.randn(5, 3), dist.get_rank()

    assert "`sigma` should be the same on all ranks" in refusal(lambda: sharded_kernel(points, 1.0 + rank))
    assert "should be the same on all ranks" in refusal(lambda: sharded_kernel(torch.randn(5, 2 + rank % 2), 1.0))
    assert "all shards are empty" in refusal(lambda: sharded_kernel(points[:0], 1.0))
    kernel = sharded_kernel(points, 1.0)
    q = qattn.diffusion(kernel)
    assert f"rank {rank} of" in repr(q)
    for function in (q.to_dense, q.to_scipy, lambda: qattn.check_axioms(q), kernel.smallest_eigenvalue):
        assert "sharded over several" in refusal(function)
    assert "all be sharded" in refusal(lambda: kernel + qattn.GaussianKernel(points, 1.0))
    assert "positive sum" in refusal(lambda: qattn.diffusion(kernel, mass=torch.zeros(5)))
    sums = qattn.diffusion(0.5 * kernel + kernel)
    close(sums @ points, q @ points, 1e-2)


def masses_by_density(method):
    """Masses of all ranks together sum to 1, and are those of one process; also their gradients."""
    points, _, weights = cloud()
    whole = points.clone().requires_grad_()
    expected = qattn.mass.density(qattn.GaussianKernel(whole, [SIGMA, 1.0], method="exact"))
    (expected @ weights).square().sum().backward()
    for index in shares(len(points)):
        own = points[index].requires_grad_()
        found = qattn.mass.density(sharded_kernel(own, [SIGMA, 1.0], method=method, tol=TOL[method]))
        close(found, expected[:, index].detach(), 10 * TOL[method])
        Group().sum(found @ weights[index]).square().sum().div(dist.get_world_size()).backward()
        close(own.grad, whole.grad[index], 1e-6)


def disagreements(_):
    """Options that differ by rank are named on all ranks, with the ranks that have them; and all go on after that."""
    rank, points = dist.get_rank(), cloud(60)[0].float()
    x = points[shard(points)]
    odd = rank == 1  # a rank that differs
    others = ", ".join(str(r) for r in range(dist.get_world_size()) if r != 1)

    def says(call, *parts):
        message = refusal(call)
        for part in parts:
            assert part in message, message
        assert f"on rank{'s' * (len(others) > 1)} {others} and" in message, message
        assert "on rank 1." in message, message

    makes = {"sigma": (1.0, 2.0), "method": ("exact", "tiles"), "tol": (1e-3, 1e-4), "backend": ("auto", "sdpa")}
    for name, values in makes.items():
        options = {"sigma": 1.0} | {name: values[odd]}
        says(lambda o=options: sharded_kernel(x, **o), f"`{name}` should be the same on all ranks", repr(values[1]))
    both = {"method": ("exact", "tiles")[odd], "tol": (1e-3, 1e-4)[odd]}
    says(lambda: sharded_kernel(x, 1.0, **both), "`method` should be the same", "`tol` should be the same")
    says(lambda: sharded_kernel(x.double() if odd else x, 1.0), "dtype of `points`", "torch.float64 on rank 1")
    says(lambda: sharded_kernel(x.clone().requires_grad_(odd), 1.0), "shape of `points`", "(n, 3), with gradient")
    kernel = sharded_kernel(x, 1.0)
    operator = {
        "tol": (1e-3, 1e-5),
        "solver": (qattn.Solver(), qattn.Solver(adjoint="detach")),
        "normalization": ("sinkhorn", "row"),
    }
    for name, values in operator.items():
        says(lambda o={name: values[odd]}: qattn.diffusion(kernel, **o), f"`{name}` should be the same on all ranks")
    for name, values in {"tol": (1e-3, 1e-5), "solver": (qattn.Solver(), qattn.Solver(9))}.items():
        says(lambda o={name: values[odd]}: qattn.sinkhorn(kernel, **o), f"`{name}` should be the same on all ranks")
    one = torch.ones(len(x))
    says(lambda: qattn.diffusion(kernel, mass=one if odd else None), "The shape of `mass`", "None")
    call = partial(qattn.diffuse, kernel, None, one) if odd else partial(qattn.diffusion, kernel)
    says(call, "Whether there is a `signal`", "True on rank 1")
    q = qattn.diffusion(kernel)
    says(lambda: q @ x[:, : 2 + odd], "The shape of `signal`", "(n, 2)", "(n, 3)")
    says(lambda: q @ (x.double() if odd else x), "The dtype of `signal`")
    says(lambda: q.T @ x.clone().requires_grad_(odd), "The shape of `signal`", "with gradient")
    says(lambda: q.value_and_gradient(x[:, : 1 + odd]), "The shape of `signal`")
    says(lambda: q.power(1 + odd, x), "`t` should be the same")
    heads = qattn.diffusion(sharded_kernel(x, [1.0, 2.0]))
    says(lambda: heads[int(odd)], "`index` should be the same")
    says(lambda: q.extend(x[:, : 3 - odd]), "The shape of `points`")
    says(lambda: qattn.eigsh(q, 3 + odd), "`k` should be the same")
    says(lambda: q @ x if odd else qattn.sinkhorn(kernel), "the same functions in the same order; got `sinkhorn`")
    close(q @ torch.ones(len(x)), torch.ones(len(x)), 1e-2)


def looks(method):
    """Properties and printing need no other rank: one of them may look, and all go on in step."""
    points, mass, signal = cloud()
    index = shard(points)
    group = dist.new_group(timeout=datetime.timedelta(seconds=30))
    kernel = sharded_kernel(points[index], [SIGMA, 1.0], group=group, method=method)
    for name in ("sinkhorn", "row", "symmetric", "none"):
        q = qattn.diffusion(kernel, mass=mass[index], normalization=name)
        fresh = sharded_kernel(points[index], SIGMA, group=group, method=method)
        if dist.get_rank() == 0:
            assert fresh.method == method
            assert f"method={method!r}" in repr(fresh)
            assert kernel.method == ("exact" if method == "auto" else method,) * 2
            assert "marginal_error=" in f"{q} {q!r}"
            assert "never formed" in q._repr_html_() + fresh._repr_html_() + kernel._repr_html_()
            assert q.marginal_error.shape == q.num_iter.shape == q.converged.shape == (2,)
            assert q.mass.shape == (len(index),)
            assert str(kernel.mass.device) == "cpu"
        assert (q @ signal[index]).shape == (2, len(index), 2)


def killed(method):
    """Saves a potential, and goes on solving until rank 1 is killed, or stopped, in the middle of it.

    The group that is short of patience comes second, as ranks may take long to compile.
    """
    points, mass, _ = cloud()
    index = shard(points)
    warnings.simplefilter("ignore")
    result = qattn.sinkhorn(
        sharded_kernel(points[index], SIGMA, method=method), mass[index], solver=qattn.Solver(max_iter=4), tol=1e-9
    )
    torch.save(result.potential, Path(os.environ["FOLDER"]) / f"{dist.get_rank()}.pt")
    group = dist.new_group(timeout=datetime.timedelta(seconds=float(os.environ["TIMEOUT"])))
    dist.barrier()
    if dist.get_rank() == 1:
        Timer(0.5, lambda: os.kill(os.getpid(), int(os.environ["SIGNAL"]))).start()
    kernel = sharded_kernel(points[index], SIGMA, method=method, group=group)
    qattn.sinkhorn(kernel, mass[index], solver=qattn.Solver(max_iter=10**6), tol=0)


def restarted(method):
    """Goes on from the potential that was saved: fewer passes, to the same end."""
    points, mass, _ = cloud()
    index = shard(points)
    saved = torch.load(Path(os.environ["FOLDER"]) / f"{dist.get_rank()}.pt")
    kernel = sharded_kernel(points[index], SIGMA, method=method, tol=1e-9)
    cold = qattn.sinkhorn(kernel, mass[index], tol=1e-8)
    warm = qattn.sinkhorn(kernel, mass[index], tol=1e-8, init=saved)
    whole = qattn.sinkhorn(qattn.GaussianKernel(points, SIGMA), mass, tol=1e-8)
    assert int(warm.num_iter) < int(cold.num_iter)
    close(warm.potential, whole.potential[index], 1e-6)


CHECKS = {
    function.__name__: function
    for function in (
        *(
            same_as_one,
            near_and_far,
            with_normals,
            batches_and_heads,
            gradients,
            subgroups,
            spectra,
            compacted,
            dtensors,
            choices,
            cold,
            cancelled,
            refusals,
            masses_by_density,
            disagreements,
            looks,
        ),
        *(networks, compiled_in_bfloat16, fully_sharded),
        *(killed, restarted),
    )
}


def run(rank, port, size, checks):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(minutes=5))
    for check in checks:
        name, method = check.split(":")
        torch.manual_seed(0)
        began = time.monotonic()
        CHECKS[name](method)
        if rank == 0:
            print(f"{check} on {size} ranks: {time.monotonic() - began:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    port, size, *checks = sys.argv[1:]
    if "RANK" in os.environ:  # one of processes that were started by themselves
        run(int(os.environ["RANK"]), port, int(size), checks)
    else:
        torch.multiprocessing.spawn(run, (port, int(size), checks), nprocs=int(size))
