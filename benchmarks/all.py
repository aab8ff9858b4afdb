"""Runs every benchmark, one after the other, and sums up what they found in one table.

Quick sizes by default, which show that everything works and about where it stands; `--full` takes the sizes of the
tables in docs/speed.md, and hours.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from _measure import RECORDS, RESULTS, environment

SCRIPTS = (
    "accuracy",
    "attention",
    "backward",
    "cold_start",
    "normalize",
    "methods",
    "million",
    "modalities",
    "spectra",
    "distance",
    "viewer",
    "layers",
    "transformer",
    "gradients",
    "distributed",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="sizes of the tables in docs/speed.md")
    options = parser.parse_args()
    folder, flags = (RECORDS, []) if options.full else (RESULTS, ["--quick"])
    lines, failed = ["| benchmark | case | qattn | others |", "|---" * 4 + "|"], []
    for name in SCRIPTS:
        start = time.perf_counter()
        print(f"\n── {name}.py", flush=True)
        if subprocess.run([sys.executable, str(Path(__file__).with_name(f"{name}.py")), *flags]).returncode:
            failed.append(name)
            lines.append(f"| {name} | failed | | |")
            continue
        label = f"{name}, {time.perf_counter() - start:.0f} s"
        for found in json.loads((folder / f"{name}.json").read_text())["findings"]:
            lines.append(f"| {label} | {found['case']} | {found['qattn']} | {found['others']} |")
            label = ""
    where = environment()
    print(f"\n{where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['date']}\n")
    print("\n".join(lines))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
