"""Matching of FAUST and SCAPE without labels: table 2 of the paper, with a spectral network trained beside it.

    python examples/paper/matching.py --data faust=FAUST_r --data scape=scape.npz --variant mesh --output runs/mesh

The pipeline is ULRSSM's (Cao et al. 2023): a network gives features to points, features of two shapes fit functional
maps, and losses ask that these be orthogonal, inverse to one another, and those of the soft point maps of the features.
No correspondence is given. Variants differ in the spectra that maps are fitted for, and in what the network is given:

- mesh: spectra of the mesh, wave kernel signatures of it;
- qfm: spectra of Q on the points, signatures of these: there is no mesh anywhere;
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
PAPER = {  # mean errors on FAUST and SCAPE, of Q-DiffNet
    "mesh": {"faust": 2.1, "scape": 2.4},
    "qfm": {"faust": 2.5, "scape": 3.1},
    "xyz": {"faust": 6.9, "scape": 6.6},
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


class Watch:
    """Errors on some of the training shapes while training goes on, at most every `save_every` seconds."""

    def __init__(self, shapes, cache, options):
        self.shapes, self.cache, self.options, self._last = shapes, cache, options, time.perf_counter()

    def __call__(self, training):
        if len(self.shapes) > 1 and time.perf_counter() - self._last > self.options.save_every:
            features = [unit_features(training.network, shape, self.options.k) for shape in self.shapes]
            found = evaluate(self.shapes, features, self.cache)[FEATURES]
            training.curve[-1]["error on training shapes"] = found["error"]
            self._last = time.perf_counter()


def tested(network, sets, cache, options):
    """Errors of a network on the test shapes of all data sets, and pairs of the first for the picture."""
    results, pairs = {}, None
    for name, shapes in sets.items():
        features = [unit_features(network, shape, options.k) for shape in shapes]
        results[name] = evaluate(shapes, features, cache, options.refine)
        pairs = pairs or first_pairs(shapes, features, 10)
    return results, pairs


def tested_on_other_samples(network, sets, cache, options):
    """Errors on test shapes with other numbers of points, drawn evenly and unevenly, by data set and sampling."""
    results = {}
    for each in sets:
        for count in options.resample:
            for kind in ("even", "uneven"):
                others = [resampled(s, count, seed, kind == "uneven") for seed, s in enumerate(each.test)]
                shapes = [prepared(s, options.variant, options.k_test, options.has_peer, cache) for s in others]
                features = [unit_features(network, shape, options.k) for shape in shapes]
                results.setdefault(each.name, {})[f"{count} points, {kind}"] = evaluate(shapes, features, cache)
    return results


def tuned(network, shapes, rate, options):
    """The network after some more steps on the test shapes, without labels."""
    sampler = Sampler(list(shapes.values()), options.points, options.k, options.pool, options.rotation)
    path = Path(options.output) / "tuned.pt"
    path.unlink(missing_ok=True)
    training = Training(network, sampler, rate, options.pairs, options.seed + 1, path)
    training.run(Budget(steps=options.tune), options.save_every)
    path.unlink()
    return network


def draw(results, pairs, path):
    """Colors carried over from sources to targets on ten pairs, and curves of errors."""
    columns = max(len(pairs), 2)
    picture = figure(1.9 * columns + 4, 6.5)
    grid = picture.add_gridspec(2, columns + 2)
    for column, (source, target, index) in enumerate(pairs):
        low, high = source.points.amin(0), source.points.amax(0)
        colors = 0.1 + 0.85 * (source.points - low) / (high - low)
        for row, (shape, of_points) in enumerate(((source, colors), (target, colors[index]))):
            view, _ = camera_view(shape.points, shape.points)
            axis = picture.add_subplot(grid[row, column])
            scatter(axis, view, facing_normals(view), of_points, 20_000 / len(view), title=shape.shape.name)
    for row, name in enumerate(list(next(iter(results.values())))[:2]):
        axis = picture.add_subplot(grid[row, -2:])
        for network, of_sets in results.items():
            for kind, style in ((FEATURES, "-"), (SPECTRAL, ":")):
                found = of_sets[name][kind]
                axis.plot(THRESHOLDS, found["percent below"], style, label=f"{network}, {kind}: {found['error']:.1f}")
        axis.set(xlabel="geodesic error × 100", ylabel="% of points below", title=name, xlim=(0, 25), ylim=(0, 100))
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    picture.savefig(path, dpi=80)


def settings(options):
    """Options that a result depends on."""
    elsewhere = (
        "data",
        "cache",
        "output",
        "save_every",
        "profile",
        "quick",
        "generated",
    )  # paths, and what changes nothing
    chosen = {name: value for name, value in vars(options).items() if name not in elsewhere}
    return chosen | {"machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"}


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
    parser.add_argument("--pool", type=int, default=4, help="samples of a shape that training draws from")
    parser.add_argument("--rotation", choices=("none", "vertical", "any"), default="none", help="of samples, at random")
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
    quick = {"points": 200, "k": 16, "k_test": 32, "steps": 6, "preset": "tiny", "pool": 1, "variant": "qfm", "tune": 2}
    options = parsed(parser, **quick, resample=[250], watch=2, save_every=0.0)
    options.has_peer = any(row.startswith("spectral") for row in options.rows)
    if "spectral, same time" in options.rows and "q" not in options.rows:
        parser.error("`spectral, same time` needs the row `q`, whose seconds it takes.")
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)

    start, cache = time.perf_counter(), Cache(options.cache)
    sets = data_sets(options)
    arguments = options.variant, options.k_test, options.has_peer, cache
    train = [all_prepared(each.train, *arguments, f"{each.name}, training") for each in sets]
    sampler = Sampler(train, options.points, options.k, options.pool, options.rotation)
    in_channels = train[0][0].inputs.shape[1]
    print(f"{time.perf_counter() - start:.0f} s for spectra of {sum(map(len, train))} shapes to train with", flush=True)
    if options.profile:
        seconds = {row: profile(network_of(row, in_channels, options), sampler, options) for row in ("q", "spectral")}
        (output / "profile.json").write_text(json.dumps({"settings": settings(options), "seconds": seconds}, indent=1))
        return
    test = {each.name: all_prepared(each.test, *arguments, f"{each.name}, test") for each in sets}

    rows, picture = {}, None
    for row in options.rows:
        network = network_of(row, in_channels, options)
        path = output / f"{row.replace(', ', '-').replace(' ', '-')}.pt"
        training = Training(network, sampler, options.rate, options.pairs, options.seed, path)
        watch = Watch(train[0][: options.watch], cache, options)
        training.run(budget_of(row, rows, options), options.save_every, watch)
        errors, pairs = tested(network, test, cache, options)
        picture = picture or pairs
        rows[row] = {
            "steps": training.step,
            "seconds": round(training.seconds, 1),
            "seconds of a step": {part: s / training.step for part, s in training.clock.seconds.items()},
            "curve": training.curve,
            "errors": errors,
        }
        for name, kinds in errors.items():
            found = ", ".join(f"{kind} {each['error']:.2f}" for kind, each in kinds.items())
            spent = f"{training.step} steps, {training.seconds:.0f} s"
            print(f"{options.variant}, {row}, {name}: {found} after {spent}", flush=True)
        if options.resample:
            rows[row]["other samples"] = tested_on_other_samples(network, sets, cache, options)
        if options.tune:
            rate = options.rate / 10
            rows[row]["tuned on test shapes"] = tested(tuned(network, test, rate, options), test, cache, options)[0]
        record = {"settings": settings(options), "rows": rows}
        (output / f"matching-{options.variant}.json").write_text(json.dumps(record, indent=1))
    draw({row: found["errors"] for row, found in rows.items()}, picture, output / "matching.png")
    print(f"\n{time.perf_counter() - start:.0f} s; wrote matching.png and matching-{options.variant}.json")
    if options.data and not options.hold_out and "q" in rows:
        claims = []
        for name, kinds in rows["q"]["errors"].items():
            if name in PAPER[options.variant]:
                goal, found = PAPER[options.variant][name], kinds[SPECTRAL]["error"]
                claims.append((f"{options.variant}, {name}: {goal}", f"{found:.2f}", found <= goal))
        report(*claims)


if __name__ == "__main__":
    main()
