"""How long does the viewer take from a change of σ or of the steps to new colors?

The model of `qattn view` without a browser: a Dirac on the creature, σ of four spacings, in float32. The slider of σ is
dragged by five notches of 3.5 %, and jumps back; each change makes a new operator from the potentials of the last ones
and applies it, and the mean counts. A change of the steps by one goes on from the last ones. What the browser adds,
three bytes per point and a frame, is not included.

The other panels are timed after one notch, and with another mode, time or point at the same σ, for which the viewer
keeps the spectrum or the operator. "Match" has a second cloud of as many points.
"""

import argparse
import itertools
import time
from dataclasses import replace

from _measure import parsed, save, seconds

from qattn import io, shapes
from qattn.tiles.when_to_compile import compile_at_first_call
from qattn.viewer import PANELS, Model

NOTCHES = 5
OTHERS = {"Modes": "mode", "Signatures": "time", "Distance from here": "point"}  # what else changes a picture


def creature(n, seed=0):
    return io.Cloud(shapes.creature(n, seed)[0].numpy())


def diffused(n):
    """The row of "Diffuse" for n points."""
    model = Model(creature(n))
    state = model.start()
    begin = time.perf_counter()
    model.picture(state)
    row = {"name": "qattn", "panel": "Diffuse", "N": n, "first": time.perf_counter() - begin}
    for name, steps in (("one", 1), ("ten", 10)):

        def drag(steps=steps):
            for notch in range(NOTCHES):
                model.picture(replace(state, sigma=state.sigma * 2 ** (0.05 * notch), steps=steps))

        row[name] = seconds(drag, budget=1.0) / NOTCHES
    model.picture(state)  # whose ten steps are the first of those that follow
    counts = itertools.count(11)
    row["step"] = seconds(lambda: model.picture(replace(state, steps=next(counts))), budget=1.0)
    return row


def of_panel(panel, n):
    """The row of another panel for n points."""
    model = Model(creature(n), creature(n, seed=1))
    start = model.start()
    model.picture(start)  # from whose potentials the next operators start
    states = [replace(start, panel=panel, sigma=start.sigma * 2 ** (0.05 * notch)) for notch in range(1, 1 + NOTCHES)]
    turn = itertools.cycle(states)
    row = {"name": "qattn", "panel": panel, "N": n}
    row["sigma"] = seconds(lambda: model.picture(next(turn)), budget=1.0)
    if panel in OTHERS:
        state = next(turn)
        model.picture(state)
        numbers = itertools.count(2)
        row["other"] = seconds(lambda: model.picture(replace(state, **{OTHERS[panel]: next(numbers) % 30})), budget=1.0)
    return row


@compile_at_first_call()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5000, 35_000, 100_000, 1_000_000])
    parser.add_argument("--panels", type=int, nargs="+", default=[5000, 35_000, 100_000], help="sizes of other panels")
    options = parsed(parser, sizes=[5000], panels=[2000])
    print(__doc__.splitlines()[0])
    print("| points | first picture | σ changed, 1 step | σ changed, 10 steps | one step more |\n" + "|---" * 5 + "|")
    small = Model(creature(6000), creature(6000, seed=1))
    for panel in PANELS:
        small.picture(replace(small.start(), panel=panel))
    rows = []
    for n in options.sizes:
        rows.append(diffused(n))
        cells = " | ".join(f"{rows[-1][name]:.3f} s" for name in ("first", "one", "ten", "step"))
        print(f"| {n:,} | {cells} |", flush=True)
    findings = [
        {"case": f"viewer, {row['N']:,} points", "qattn": f"{row['one']:.3f} s per change of σ", "others": ""}
        for row in rows
    ]
    print("\n| panel | points | σ changed | mode, time or point changed |\n" + "|---" * 4 + "|")
    for panel in (panel for panel in PANELS if panel != "Diffuse"):
        for n in options.panels:
            rows.append(of_panel(panel, n))
            other = f"{rows[-1]['other']:.3f} s" if panel in OTHERS else "–"
            print(f"| {panel} | {n:,} | {rows[-1]['sigma']:.2f} s | {other} |", flush=True)
    save("viewer", rows, findings, options.quick)


if __name__ == "__main__":
    main()
