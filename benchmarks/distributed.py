"""How many bytes does a rank send in a pass, and how much memory does it need, against the points and the ranks?

Random points of a generated surface, float32, on gloo processes of this machine, in compact shards. Bytes are counted
in the process group (messages as they are, collectives as by rings), for a pass of lse and for one with 8 channels;
the memory is the most that a rank needs to prepare, normalize and apply, above the imports, its points and its signal.
The processes share the cores of one machine, so times say nothing of several, and are not reported. Row errors are
measured before anything is counted.

Then a model on paper of a billion points on 64 GPUs, with its assumptions.
"""

import argparse
import math
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import environment, once, parsed, save

import qattn
from qattn.distributed import shard
from qattn.kernels.gaussian.fourier import modes
from qattn.shapes import creature

CHANNELS = 8
AREA = 4.5  # of the creature, about: its points are √(AREA / N) apart
CASES = [  # method, σ as a number or in mean spacings of the points, and sizes
    ("exact", 0.3, None, [4_000, 8_000, 16_000]),
    ("tiles", None, 2.2, [25_000, 100_000, 400_000]),
    ("fourier", 0.3, None, [25_000, 100_000, 400_000]),
]


def counted(group, run):
    """Count the bytes that a function sends: the largest number of a rank."""
    before = group.sent
    run()
    return int(group.maximum(torch.tensor(float(group.sent - before), dtype=torch.float64)))


def one(rank, size, port, most, path):
    """All cases on one of the ranks; the first writes the rows."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    rows = []
    for method, sigma, spacings, sizes in CASES:
        for N in [n for n in sizes if n <= most]:
            points = creature(N)[0]
            bandwidth = spacings * math.sqrt(AREA / N) if sigma is None else sigma
            index = shard(points)
            mine = points[index].clone()
            del points
            some = mine[:: max(1, len(mine) // 1000)]  # imports and compiles everything
            qattn.diffuse(qattn.GaussianKernel(some, 0.3, method=method, group="world"), None, some)
            signal = torch.randn(len(mine), CHANNELS)
            (_, q), _, megabytes = once(
                lambda x=mine, s=signal, b=bandwidth, m=method: qattn.diffuse(
                    qattn.GaussianKernel(x, b, method=m, group="world"), None, s
                )
            )
            error = float(q.kernel_error())
            assert error <= 1e-3
            group = q.kernel.ranks
            row = {
                "method": method,
                "N": N,
                "ranks": size,
                "sigma": bandwidth,
                "lse_bytes": counted(group, lambda q=q: q.kernel.attend(q.potential + torch.log(q.mass))),
                "apply_bytes": counted(group, lambda q=q, s=signal: q @ s),
                "megabytes": float(group.maximum(torch.tensor(megabytes))),
                "error": error,
            }
            rows.append(row)
            if rank == 0:
                print(
                    f"  {method:8} N = {N:8,}  ranks {size}  σ = {bandwidth:.4f}  sent for lse {row['lse_bytes']:9,} B,"
                    f" with {CHANNELS} channels {row['apply_bytes']:9,} B;  {row['megabytes']:5.0f} MB;"
                    f"  error {error:.0e}",
                    flush=True,
                )
    if rank == 0:
        torch.save(rows, path)
    dist.destroy_process_group()


def model(N=10**9, ranks=64, channels=CHANNELS):
    """A billion points of a surface of unit area on 64 GPUs: bytes by the formulas of the methods, rates assumed."""
    pair, link, mode, point = 2e-12, 25e9, 0.5e-9, 1e-9  # seconds, bytes a second, seconds, seconds
    n, width = N / ranks, 4 * (1 + channels)
    sigma = 2.2 / math.sqrt(N)  # mean spacings
    reach = math.sqrt(2 * (math.log(N) + math.log(2 / 1e-3) + 2))
    halo = (math.sqrt(1 / ranks) + 2 * reach * sigma) ** 2 * N - n
    near = 2 * math.pi * (math.sqrt(2 * math.log(1e4)) * sigma) ** 2 * N
    count, transforms = math.prod(modes([20.0] * 3, 1e-5)), (2 + channels) // 2
    figures = {
        "exact": ((ranks - 1) * n * (width + 12), n * N * pair),
        "tiles": (halo * width, n * near * pair),
        "fourier": (2 * (ranks - 1) / ranks * 8 * count * transforms, transforms * (count * mode + n * point)),
    }
    held = n * (3 * 12 + 8 + 4 * (4 + 3 * channels))  # points three times, an order, potentials and channels
    print(f"""
A model on paper, of which nothing was run: {N:.0e} points of a surface on {ranks} GPUs, float32, {channels} channels.
  Rates are assumed: {pair * 1e12:g} ps a pair, {mode * 1e9:g} ns a mode, {point * 1e9:g} ns a point of a transform, {link / 1e9:g} GB/s from each GPU.
  tiles: square shards, σ of 2.2 mean spacings, a halo as far as R = {reach:.1f} σ, which is {halo / n:.1%} of a shard; tiles
  take twice as many pairs along as are in reach. fourier: σ of 1/20 of the extent, {count:.1e} modes on each rank.""")  # noqa: E501
    for name, (sent, computing) in figures.items():
        print(
            f"  {name:8} {sent / 1e6:10,.1f} MB a rank and pass, {sent / link:.1e} s, beside {computing:.1e} s of "
            "computing"
        )
    print(f"  A rank holds {held / 1e9:.1f} GB of points, order, potentials and channels.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--most", type=int, default=400_000, help="points")
    options = parsed(parser, ranks=[1, 2], most=25_000)
    print(__doc__.splitlines()[0])
    print(f"{environment()['cpu']}, torch {torch.__version__}, gloo")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.pt"
        for size in options.ranks:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            torch.multiprocessing.spawn(one, (size, port, options.most, path), nprocs=size)
            rows += torch.load(path)
    model()
    last = {row["method"]: row for row in rows}  # of the most points and ranks
    findings = [
        {
            "case": f"{row['method']}, {row['N']:,} points on {row['ranks']} ranks",
            "qattn": f"{row['apply_bytes'] / 1000:,.0f} kB sent a rank and pass, {row['megabytes']:.0f} MB held",
            "others": "",
        }
        for row in last.values()
    ]
    save("distributed", rows, findings, options.quick)


if __name__ == "__main__":
    main()
