"""One cloud over several processes: normalized, diffused, and a network trained on it.

    torchrun --nproc-per-node 2 examples/distributed.py

Each process holds its share of the points, and of everything that belongs to them. The potentials are saved as soon as
they are known: run it again, after a crash say, and normalizing starts from them. The first draws what all hold.
"""

import argparse
import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import qattn
from qattn.distributed import gather, shard
from qattn.pictures import camera_view, colormap, figure, heat, render, scatter, show
from qattn.shapes import creature, creature_parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--sigma", type=float, default=0.03)
    parser.add_argument("--power", type=int, default=100, help="steps of diffusion")
    parser.add_argument("--train", type=int, default=2_000, help="points that the network is trained on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("potentials"))
    parser.add_argument("--output", default="distributed.png")
    options = parser.parse_args()

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5))  # how long a rank waits for the others
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // size))

    def say(text):
        if rank == 0:
            print(text, flush=True)

    # Every rank can make the whole cloud here. Of a file, it would read `points[index]` alone.
    points, normals = creature(options.points)
    index = shard(points)
    mine = points[index].to(device)
    say(f"{options.points:,} points on {size} ranks, {len(index):,} on this one")

    kernel = qattn.GaussianKernel(mine, options.sigma, group="world")
    options.folder.mkdir(exist_ok=True)
    file = options.folder / f"{options.points}-{options.sigma:g}-{rank}-of-{size}.pt"
    saved = torch.load(file) if file.exists() else None
    q = qattn.diffusion(kernel, init=None if saved is None else saved.to(device))
    torch.save(q.potential.cpu(), file)
    say(f"method {kernel.method}: {int(q.num_iter)} passes to a mean |Q1 − 1| of {float(q.marginal_error):.1e}")

    nose = torch.zeros(len(mine), 1, device=device)
    nose[index.to(device) == int(points[:, 0].argmax())] = 1.0  # on one rank only
    before = kernel.ranks.sent
    warm = q.power(options.power, nose)
    say(f"{options.power} steps of diffusion: {(kernel.ranks.sent - before) / 1e6:.2f} MB sent by this rank")
    whole, owner = (gather(x, index.to(device)).cpu() for x in (warm[:, 0], torch.full_like(warm[:, 0], rank)))
    say(f"total heat {float(whole.mean() * options.points):.6f}, highest {float(whole.amax()):.2e}")
    if rank == 0:
        picture = figure(15, 4)
        first, second, third = picture.subplots(1, 3)
        width = min(700, int(0.7 * options.points**0.5))  # so that no gaps are seen between points
        show(first, render(points, normals, colormap("Set2", (owner + 0.5) / 8), width), f"held by {size} ranks")
        show(second, render(points, normals, heat(whole), width), f"a Dirac after {options.power} steps")

    # A network that learns the parts of the body, one cloud over all ranks.
    points, normals = creature(options.train)
    index = shard(points)
    x, labels = points[index].to(device), creature_parts(points)[index].to(device)
    torch.manual_seed(0)
    parts = int(creature_parts(points).amax()) + 1
    network = qattn.nn.QDiffNet(
        3, parts, num_scales=4, channels_per_scale=4, num_blocks=2, sigma_range=(0.05, 0.5), group="world"
    )
    parallel = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    bar = tqdm(range(options.steps), desc="Training", disable=rank > 0)
    for _ in bar:
        optimizer.zero_grad()
        # DDP takes the mean over the ranks; with this factor it is the mean over all points.
        loss = cross_entropy(parallel(x, x), labels, reduction="sum") * (size / options.train)
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}")
    found, truth = (gather(x, index.to(device)).cpu() for x in (parallel(x, x).argmax(-1), labels))
    say(f"{float((found == truth).float().mean()):.0%} of the points are known by their part")
    if rank == 0:
        colors = colormap("tab10", (found + 0.5) / 10)
        scatter(third, *camera_view(points, normals), colors, 160_000 / options.train, title="parts that were learned")
        picture.savefig(options.output, dpi=90)
        print(f"wrote {options.output}")
    # DDP keeps Gloo's threads to the end. Here they can drop their last tensors, for which they need Python's lock: one
    # that asks for it while Python ends would abort the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
