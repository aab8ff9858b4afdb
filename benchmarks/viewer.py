"""How long does the viewer take from a change of σ or of the steps to new colors?

The model of `qattn view` without a browser: a Dirac on the creature, σ of four spacings, in float32. The slider of σ is
dragged by five notches of 3.5 %, and jumps back; each change makes a new operator from the potentials of the last ones
and applies it, and the mean counts. A change of the steps by one goes on from the last ones. What the browser adds,
three bytes per point and a frame, is not included.
"""

import argparse
import itertools
import time
from dataclasses import replace

from _measure import parsed, save, seconds

from qattn import io, shapes
from qattn.tiles.when_to_compile import compile_at_first_call
from qattn.viewer import Model

NOTCHES = 5


@compile_at_first_call()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[5000, 35_000, 100_000, 1_000_000])
    options = parsed(parser, sizes=[5000])
    print(__doc__.splitlines()[0])
    print("| points | first picture | σ changed, 1 step | σ changed, 10 steps | one step more |\n" + "|---" * 5 + "|")
    small = Model(io.Cloud(shapes.creature(6000)[0].numpy()))
    small.picture(small.start())
    rows = []
    for n in options.sizes:
        model = Model(io.Cloud(shapes.creature(n)[0].numpy()))
        state = model.start()
        begin = time.perf_counter()
        model.picture(state)
        row = {"name": "qattn", "N": n, "first": time.perf_counter() - begin}
        for name, steps in (("one", 1), ("ten", 10)):

            def drag(steps=steps, model=model, state=state):
                for notch in range(NOTCHES):
                    model.picture(replace(state, sigma=state.sigma * 2 ** (0.05 * notch), steps=steps))

            row[name] = seconds(drag, budget=1.0) / NOTCHES
        model.picture(state)  # whose ten steps are the first of those that follow
        counts = itertools.count(11)
        row["step"] = seconds(lambda m=model, s=state, c=counts: m.picture(replace(s, steps=next(c))), budget=1.0)
        rows.append(row)
        cells = " | ".join(f"{row[name]:.3f} s" for name in ("first", "one", "ten", "step"))
        print(f"| {n:,} | {cells} |", flush=True)
    findings = [
        {"case": f"viewer, {row['N']:,} points", "qattn": f"{row['one']:.3f} s per change of σ", "others": ""}
        for row in rows
    ]
    save("viewer", rows, findings, options.quick)


if __name__ == "__main__":
    main()
