"""Labels at points of real scans: QPointTransformer and what people use, trained for equally long.

    python examples/real_data.py --data rna=rna.npz --rows QPointTransformer softmax --seconds 240 --output runs/rna
    python examples/real_data.py --data psb=psb.npz --output runs/psb
    python examples/real_data.py --data lidar=a.npz --data lidar=b.npz --data lidar=c.npz --fold 2 --output runs/lidar

Data are those of `real_data_sets.py`; without any, animals are generated. Networks, about equal in their numbers of
parameters, are given positions alone (and the kind of object, where there are several). Each takes as many steps as fit
into `--seconds`, by the seconds of a step, which are measured first: half of the timed steps are the first with
their samples, whose neighbors and masses are computed once and kept. What else the machine does while networks train
does not count; `--measure` does nothing else, on an idle machine. Each row is then tested without further training on 4
times and a quarter of the points, on points 10 times as dense at one end, with noise of half a spacing, and with a
quarter of the shape cut off. The mean IoU is over the labels that occur in the test clouds.

Training goes on where it was interrupted; a row that is done is not trained again. Each row and seed leaves a result,
`<data>-<row>-<seed>.json`. `<data>.json`, the table and the picture are of all results of the data in the folder.
`--hold-out 5` tests on every fifth training cloud instead, to choose settings by.
"""

import argparse
import json
import platform
import resource
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from quick import parsed
from real_data_networks import ROWS, made
from real_data_samples import Sampler
from real_data_sets import SAMPLINGS, generated, load
from real_data_training import Training, predicted, samples_to_test, step_seconds, tested
from resumable import Budget

from qattn.pictures import camera_view, facing_normals, scatter
from qattn.tiles.when_to_compile import compile_at_first_call

POINTS = 512  # of a sample in training: a quarter of what clouds have
POOL = 4  # samples of a cloud that training draws from
RATES = {"softmax": 1e-3, "vector attention": 3e-3, "PointNet++": 3e-3, "QDiffNet": 3e-3}
RATE = 3e-3  # of the others


def data_set(options):
    """The data set of `--data`, of one name."""
    if not options.data:
        return generated(options.generated, 3, 4 * options.points)
    names, paths = zip(*(given.split("=", 1) for given in options.data), strict=True)
    if len(set(names)) > 1:
        raise SystemExit(f"`--data` should be of one name; got {', '.join(names)}.")
    data = load(names[0], paths, options.fold)
    return data.held_out(options.hold_out) if options.hold_out else data


def network_of(row, data, sampler, seed):
    torch.manual_seed(seed)
    in_channels = 3 + (len(data.kinds) if len(data.kinds) > 1 else 0)
    return made(row, in_channels, data.num_classes, sampler.spacing)


def trained(row, data, sampler, options):
    """The training of a row, run to the end of its budget."""
    network = network_of(row, data, sampler, options.seed)
    rate = options.rate or RATES.get(row, RATE)
    path = Path(options.output) / f"{file_of(row, data, options)}.pt"
    training = Training(network, sampler, rate, options.seed, path)
    steps = options.steps or max(1, round(options.seconds / measured(row, data, sampler, options)))
    training.run(Budget(steps=steps), options.save_every)
    return training


def measured(row, data, sampler, options):
    """Seconds of a step of a row, measured once and kept in `<data>.seconds.json`."""
    path = Path(options.output) / f"{data.name}.seconds.json"
    seconds = json.loads(path.read_text()) if path.exists() else {}
    if row not in seconds:
        fresh = Sampler(data, sampler.count, POOL, sampler.size)  # nothing is kept of other rows
        with compile_at_first_call():  # in the first step, which does not count
            seconds[row] = step_seconds(network_of(row, data, sampler, options.seed), fresh)
        path.write_text(json.dumps(seconds, indent=1))
    return seconds[row]


def file_of(row, data, options):
    name = row.replace(", ", "-").replace(" ", "-")
    fold = f"-{options.fold}" if data.name == "lidar" else ""
    return f"{data.name}{fold}-{name}-{options.seed}"


def run(row, data, sampler, options):
    """Train and test a row, unless its result is there."""
    path = Path(options.output) / f"{file_of(row, data, options)}.json"
    if path.exists():
        return
    training = trained(row, data, sampler, options)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    most = options.test or len(data.test)
    results = tested(training.network, data, sampler.count, sampler.spacing, most)
    record = {
        "data": data.name,
        "fold": options.fold if data.name == "lidar" else None,
        "row": row,
        "seed": options.seed,
        "points": sampler.count,
        "batch": sampler.size,
        "rate": options.rate or RATES.get(row, RATE),
        "parameters": sum(p.numel() for p in training.network.parameters()),
        "steps": training.step,
        "seconds": None if options.steps else options.seconds,
        "seconds of a step, alone": None if options.steps else measured(row, data, sampler, options),
        "seconds in training": round(training.seconds, 1),
        "peak memory, MB": round(memory),
        "curve": training.curve[:: max(1, len(training.curve) // 20)],
        "results": results,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    path.write_text(json.dumps(record, indent=1))
    found = results["as trained"]
    print(f"{row}: {found['accuracy']:.1f} %, mean IoU {found['mean IoU']:.1f}, {training.step} steps", flush=True)


def table(records):
    """Lines of a table in Markdown: means over seeds and folds of accuracy and mean IoU, by row and sampling."""
    yield " | ".join(["| accuracy, mean IoU", "parameters", "steps", "MB", "runs", *SAMPLINGS]) + " |"
    yield "|---" * (5 + len(SAMPLINGS)) + "|"
    for row in ROWS:
        each = [record for record in records if record["row"] == row]
        if each:
            means = (np.mean([r[key] for r in each]) for key in ("parameters", "steps", "peak memory, MB"))
            line = "| {} | {:,.0f} | {:.0f} | {:,.0f} | {}".format(row, *means, len(each))
            for name in SAMPLINGS:
                found = (np.mean([r["results"][name][key] for r in each]) for key in ("accuracy", "mean IoU"))
                line += " | {:.1f}, {:.1f}".format(*found)
            yield line + " |"


def draw(records, data, sampler, options, path):
    """Labels of a test cloud by each network that this folder has, and mean IoU by sampling."""
    of_seed = {r["row"]: r for r in records if r["seed"] == options.seed and r["fold"] in (None, options.fold)}
    rows = [row for row in ROWS if row in of_seed]
    shown = rows[:5]
    figure = plt.figure(figsize=(3 * (1 + len(shown)), 9), layout="constrained")
    grid = figure.add_gridspec(3, 1 + len(shown), height_ratios=(1, 1, 1.2))
    colors = torch.from_numpy(plt.get_cmap("tab20")(np.arange(data.num_classes) * 7 % 20)[:, :3]).float()
    for line, name in enumerate(("as trained", "4 times")):
        sample, turn = next(iter(samples_to_test(data, name, sampler.count, sampler.spacing, 1)))
        of_all = {"truth": sample.cloud.labels}
        for row in shown:
            network = network_of(row, data, sampler, options.seed)
            saved = torch.load(Path(options.output) / f"{file_of(row, data, options)}.pt", weights_only=True)
            network.load_state_dict(saved["network"])
            of_all[row] = predicted(network.eval(), sample, data, turn)
        points = sample.cloud.points if data.rotation != 2 else sample.cloud.points[:, [0, 2, 1]]
        view, _ = camera_view(points, points)
        for column, (row, labels) in enumerate(of_all.items()):
            axis = figure.add_subplot(grid[line, column])
            right = 100 * float((labels == sample.cloud.labels).float().mean())
            title = f"{row}, {len(view):,} points" if row == "truth" else f"{row}: {right:.0f} %"
            scatter(axis, view, facing_normals(view), colors[labels], 15_000 / len(view), title=title)
    axis = figure.add_subplot(grid[2, :])
    for row in rows:
        found = [of_seed[row]["results"][name]["mean IoU"] for name in SAMPLINGS]
        axis.plot(list(SAMPLINGS), found, "o-" if row in shown else "x:", label=row)
    axis.set_ylabel("mean IoU, %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9, ncols=2)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", metavar="NAME=PATH", help="rna, psb, or lidar once for each tile")
    parser.add_argument("--fold", type=int, default=0, help="number of the tile of lidar that tests")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="networks to train and test")
    parser.add_argument("--seconds", type=float, default=240.0, help="of an idle core, to train a row for")
    parser.add_argument("--steps", type=int, help="to train a row for, instead of seconds")
    parser.add_argument("--points", type=int, default=POINTS, help="of a sample in training")
    parser.add_argument("--batch", type=int, default=8, help="samples in a step")
    parser.add_argument("--measure", action="store_true", help="only measure the seconds of steps")
    parser.add_argument("--rate", type=float, help="largest learning rate, instead of that of the row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, help="test clouds at most")
    parser.add_argument("--hold-out", type=int, default=0, help="test on every so many-th training cloud instead")
    parser.add_argument("--output", default=".", help="folder of checkpoints, results and picture")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--generated", type=int, default=40, help="animals to train with, if no data are given")
    options = parsed(parser, points=64, steps=2, batch=2, generated=3, rows=["QPointTransformer", *ROWS[1:5]])
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)

    data = data_set(options)
    sampler = Sampler(data, options.points, POOL, options.batch)
    print(
        f"{data.name}: {len(data.train)} clouds to train with, {len(data.test)} to test with, "
        f"{data.num_classes} labels, spacing {sampler.spacing:.3f}",
        flush=True,
    )
    if options.measure:
        for row in options.rows:
            print(f"{row}: {measured(row, data, sampler, options):.3f} s a step", flush=True)
        return
    for row in options.rows:
        run(row, data, sampler, options)
    records = [json.loads(path.read_text()) for path in sorted(output.glob(f"{data.name}-*.json"))]
    (output / f"{data.name}.json").write_text(json.dumps(records, indent=1))
    print(*table(records), sep="\n")
    draw(records, data, sampler, options, output / "real_data.png")
    print("wrote real_data.png")


if __name__ == "__main__":
    main()
