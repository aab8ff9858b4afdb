"""Matching of FAUST and SCAPE without labels: table 2 of the paper, with a spectral network trained beside it.

    python examples/paper/matching.py --data faust=FAUST_r --data scape=scape.npz --variant mesh --output runs/mesh

The pipeline is ULRSSM's (Cao et al. 2023): a network gives features to points, features of two shapes fit functional
maps, and losses ask that these be orthogonal, inverse to one another, and those of the soft point maps of the features.
No correspondence is given. Variants differ in the spectra that maps are fitted for, and in what the network is given:

- mesh: spectra of the mesh, wave kernel signatures of it;
- qfm-mesh-wks: spectra of Q on the points, signatures of the mesh, as published under the name Q-FM;
- qfm: spectra of Q, signatures of these: there is no mesh anywhere;
- xyz: spectra of Q, coordinates.

Rows of the table are networks: "q" is Q-DiffNet; "spectral" is DiffusionNet on eigenvectors of `robust_laplacian` of
the same points, for as many steps; "spectral, same time" is the same for as long as Q-DiffNet took. Each step has
other samples of the shapes. Training goes on where it was interrupted. Needs the extras `bench` and `examples`.

Errors are geodesic, on the mesh of the source, over √area, × 100, for all ordered pairs of test shapes; matches are
nearest features, or these through functional maps of all eigenvectors, as in ULRSSM. What changes the protocol is
reported apart: ZoomOut (`--refine`) and training on the test shapes, still without labels (`--tune`).
"""

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
from claims import parsed, report
from matching_data import DataSet, generated, load, resampled
from matching_evaluation import FEATURES, SPECTRAL, THRESHOLDS, evaluate, first_pairs, unit_features
from matching_networks import NETWORKS, PRESETS
from matching_profile import profile
from matching_samples import VARIANTS, Sampler, all_prepared, prepared
from matching_spectra import Cache
from matching_training import Budget, Training

from qattn.pictures import camera_view, facing_normals, figure, scatter

ROWS = "q", "spectral", "spectral, same time"
OF_TRAINING = "variant", "preset", "points", "k", "k_test", "pairs", "rate", "seed", "rotation", "augment"
OF_TESTS = "refine", "watch"
OTHERS = 6  # test shapes of which other samples are tested
WATCHED = 250  # steps between errors on training shapes
PAPER = {  # mean errors on FAUST and SCAPE, of Q-DiffNet. There is no row of spectra and signatures without a mesh
    "mesh": {"faust": 2.1, "scape": 2.4},
    "qfm-mesh-wks": {"faust": 2.5, "scape": 3.1},
    "xyz": {"faust": 6.91, "scape": 6.56},
}


def data_sets(options):
    """Data sets with the shapes to train and to test with; with `--hold-out`, the latter are of the former."""
    if options.data:
        sets = [load(*given.split("=", 1)) for given in options.data]
    else:
        sets = [generated(options.generated, 3, options.points + 100)]
    if options.hold_out:
        held = options.hold_out
        sets = [DataSet(each.name, each.train[:-held], each.train[-held:]) for each in sets]
    return sets


def network_of(row, in_channels, options):
    torch.manual_seed(options.seed)
    return NETWORKS[row.split(",")[0]](in_channels, options.preset)


def budget_of(row, rows, options):
    if row == "spectral, same time":
        return Budget(seconds=rows["q"]["seconds"])
    return Budget(steps=options.steps)


def watch(shapes, cache, options):
    """A function that adds errors on some of the training shapes, by data set, to the curve of a training."""

    def measured(training):
        if shapes and training.step % WATCHED == 0:
            found = errors_of(features_of(training.network, shapes, options), shapes, cache)
            training.curve[-1]["errors on training shapes"] = {
                name: {kind: each["error"] for kind, each in kinds.items()} for name, kinds in found.items()
            }

    return measured


def features_of(network, sets, options):
    return {name: [unit_features(network, shape, options.k) for shape in shapes] for name, shapes in sets.items()}


def errors_of(features, sets, cache, is_refined=False):
    """Errors on shapes with features, by data set."""
    return {name: evaluate(shapes, features[name], cache, is_refined) for name, shapes in sets.items()}


def errors_on_other_samples(network, sets, cache, options):
    """Errors on some test shapes with other numbers of points, drawn evenly and unevenly, by data set and sampling."""
    results = {}
    for count in options.resample:
        for kind in ("even", "uneven"):
            others = {
                each.name: [
                    prepared(resampled(s, count, seed, kind == "uneven"), options.variant, options.k_test, False, cache)
                    for seed, s in enumerate(each.test[:OTHERS])
                ]
                for each in sets
            }
            for name, found in errors_of(features_of(network, others, options), others, cache).items():
                results.setdefault(name, {})[f"{count} points, {kind}"] = found
    return results


def tuned(network, shapes, options):
    """The network after some more steps on the test shapes, without labels."""
    sampler = sampler_of(list(shapes.values()), options)
    path = Path(options.output) / "tuned.pt"
    path.unlink(missing_ok=True)
    training = Training(network, sampler, options.rate / 10, options.pairs, options.seed + 1, path)
    training.run(Budget(steps=options.tune), options.save_every)
    path.unlink()
    return network


def draw_pairs(pairs, path):
    """Colors carried over from sources to targets on ten pairs."""
    columns = max(len(pairs), 2)
    picture = figure(1.9 * columns, 6.5)
    grid = picture.add_gridspec(2, columns)
    for column, (source, target, index) in enumerate(pairs):
        low, high = source.points.amin(0), source.points.amax(0)
        colors = 0.1 + 0.85 * (source.points - low) / (high - low)
        for row, (shape, of_points) in enumerate(((source, colors), (target, colors[index]))):
            view, _ = camera_view(shape.points, shape.points)
            axis = picture.add_subplot(grid[row, column])
            scatter(axis, view, facing_normals(view), of_points, 20_000 / len(view), title=shape.shape.name)
    picture.savefig(path, dpi=80)


def draw_curves(rows, path):
    """Curves of errors, by data set."""
    names = list(next(iter(rows.values()))["errors"])
    picture = figure(5 * len(names), 4)
    for axis, name in zip(picture.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for network, row in rows.items():
            for kind, style in ((FEATURES, "-"), (SPECTRAL, ":")):
                found = row["errors"][name][kind]
                axis.plot(THRESHOLDS, found["percent below"], style, label=f"{network}, {kind}: {found['error']:.1f}")
        axis.set(xlabel="geodesic error × 100", ylabel="% of points below", title=name, xlim=(0, 25), ylim=(0, 100))
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    picture.savefig(path, dpi=80)


def sampler_of(train, options):
    return Sampler(train, options.points, options.k, options.rotation, options.augment)


def settings(names, options, **others):
    """Options of some names, and other settings, as JSON has them."""
    return {name: getattr(options, name) for name in names} | others


def stem(options):
    """The name of the files of a run."""
    return f"{options.variant}-{options.preset}-seed{options.seed}"


class Record:
    """Results in a file, of which rows that were made with the same settings are kept."""

    def __init__(self, path):
        self.path = path
        self.rows = json.loads(path.read_text())["rows"] if path.exists() else {}

    def row(self, name, now):
        """Return what is known of a row with these settings, and drop what was found with others."""
        if self.rows.get(name, {}).get("settings") != now:
            self.rows[name] = {"settings": now}
        return self.rows[name]

    def save(self):
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        self.path.write_text(json.dumps({"machine": machine, "rows": self.rows}, indent=1))


def run(row, network, sampler, sets, watched, test, record, cache, options):
    """Train and test a network, as far as that was not done before."""
    output, budget = Path(options.output), budget_of(row, record.rows, options)
    known = settings(OF_TRAINING, options, shapes={s.name: len(s.train) for s in sets}, budget=asdict(budget))
    path = output / f"{stem(options)}-{row.replace(', ', '-').replace(' ', '-')}.pt"
    training = Training(network, sampler, options.rate, options.pairs, options.seed, path, known)
    training.run(budget, options.save_every, watch(watched, cache, options))
    found = record.row(row, known | {"steps": training.step} | settings(OF_TESTS, options))
    if "errors" not in found:
        found |= {"seconds": round(training.seconds, 1), "wall seconds": round(training.wall, 1)}
        found["seconds of a step"] = {part: s / training.step for part, s in training.clock.seconds.items()}
        found["curve"] = training.curve
        features = features_of(network, test, options)
        found["errors"] = errors_of(features, test, cache, options.refine)
        first = sets[0].name
        draw_pairs(first_pairs(test[first], features[first], 10), output / f"{path.stem}.png")
        record.save()
    spent = f"{training.step} steps, {found['seconds']:.0f} s, {found['wall seconds']:.0f} s on the wall"
    for name, kinds in found["errors"].items():
        errors = ", ".join(f"{kind} {each['error']:.2f}" for kind, each in kinds.items())
        print(f"{options.variant}, {row}, {name}: {errors} after {spent}", flush=True)
    if row == "q" and options.resample and "other samples" not in found:
        found["other samples"] = errors_on_other_samples(network, sets, cache, options)
        record.save()
    if options.tune and "tuned on test shapes" not in found:
        features = features_of(tuned(network, test, options), test, options)
        found["tuned on test shapes"] = errors_of(features, test, cache, options.refine)
        record.save()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", metavar="NAME=PATH", help="faust, scape or smal: a folder or .npz")
    parser.add_argument("--variant", choices=VARIANTS, default="mesh")
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="networks to train and test")
    parser.add_argument("--points", type=int, default=1500, help="of a sample, in training")
    parser.add_argument("--k", type=int, default=100, help="eigenvectors in training")
    parser.add_argument("--k-test", type=int, default=200, help="eigenvectors that are computed, and tested with")
    parser.add_argument("--pairs", type=int, default=1, help="of shapes, in a step")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rotation", choices=("none", "vertical", "any"), default="none", help="of samples, at random")
    parser.add_argument("--augment", action="store_true", help="stretch coordinates and add noise, for xyz")
    parser.add_argument("--hold-out", type=int, default=0, help="training shapes to test on, to choose settings by")
    parser.add_argument("--watch", type=int, default=0, help="training shapes to measure errors on while training")
    parser.add_argument("--tune", type=int, default=0, help="steps on test shapes, reported apart")
    parser.add_argument("--refine", action="store_true", help="also by ZoomOut, reported apart")
    parser.add_argument("--resample", type=int, nargs="*", default=[], help="numbers of points to test with as well")
    parser.add_argument("--profile", action="store_true", help="only seconds of a step by part")
    parser.add_argument("--cache", default="matching-cache", help="folder of spectra and distances")
    parser.add_argument("--output", default=".", help="folder of checkpoints, results and picture")
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds between checkpoints")
    parser.add_argument("--generated", type=int, default=4, help="creatures to train with, if no data are given")
    quick = {"points": 200, "k": 16, "k_test": 32, "steps": 6, "preset": "tiny", "variant": "qfm", "tune": 2}
    options = parsed(parser, **quick, resample=[250], watch=2, save_every=0.0)
    options.has_peer = any(row.startswith("spectral") for row in options.rows)
    if "spectral, same time" in options.rows and "q" not in options.rows:
        parser.error("`spectral, same time` needs the row `q`, whose seconds it takes.")
    if options.augment and options.variant != "xyz":
        parser.error("`--augment` is for coordinates, of the variant xyz.")
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)

    start, cache = time.perf_counter(), Cache(options.cache)
    sets = data_sets(options)
    arguments = options.variant, options.k_test, options.has_peer, cache
    train = [all_prepared(each.train, *arguments, f"{each.name}, training") for each in sets]
    sampler = sampler_of(train, options)
    in_channels = train[0][0].inputs.shape[1]
    print(f"{time.perf_counter() - start:.0f} s for spectra of {sum(map(len, train))} shapes to train with", flush=True)
    if options.profile:
        seconds = {row: profile(network_of(row, in_channels, options), sampler, options) for row in ("q", "spectral")}
        record = {"settings": settings(OF_TRAINING, options, threads=torch.get_num_threads()), "seconds": seconds}
        (output / f"{stem(options)}-profile.json").write_text(json.dumps(record, indent=1))
        return
    test = {each.name: all_prepared(each.test, *arguments, f"{each.name}, test") for each in sets}
    watched = {}
    if options.watch > 1:
        watched = {
            each.name: [shapes[n] for n in torch.linspace(0, len(shapes) - 1, options.watch).long()]
            for each, shapes in zip(sets, train, strict=True)
        }
    record = Record(output / f"{stem(options)}.json")
    for row in [row for row in ROWS if row in options.rows]:
        network = network_of(row, in_channels, options)
        run(row, network, sampler, sets, watched, test, record, cache, options)
    draw_curves({row: record.rows[row] for row in ROWS if row in options.rows}, output / "matching.png")
    print(f"\n{time.perf_counter() - start:.0f} s; wrote matching.png and {stem(options)}.json")
    if options.data and not options.hold_out and "q" in options.rows and options.variant in PAPER:
        claims = []
        for name, kinds in record.rows["q"]["errors"].items():
            if name in PAPER[options.variant]:
                goal, found = PAPER[options.variant][name], kinds[SPECTRAL]["error"]
                claims.append((f"{options.variant}, {name}: {goal}", f"{found:.2f}", found <= goal))
        report(*claims)


if __name__ == "__main__":
    main()
