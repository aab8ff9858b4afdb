"""Print the table of `make conformance`: path × evidence × largest error × bound.

    python conformance/table.py EVIDENCE

Rows come from the fixture `held`, and are sorted, as tests run side by side. Of several with the same path and evidence
the worst is shown, relative to its bound.
"""

import json
import sys
from pathlib import Path


def main(file: Path) -> None:
    """Print the rows of a file of evidence."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for path, evidence, error, bound in map(json.loads, file.read_text().splitlines()):
        place = path, evidence
        if place not in worst or error * worst[place][1] > worst[place][0] * bound:
            worst[place] = error, bound
    rows = [("path", "evidence", "error", "bound")]
    rows += [(*place, f"{error:.3g}", f"{bound:.3g}") for place, (error, bound) in sorted(worst.items())]
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    for n, row in enumerate(rows):
        cells = [row[c].ljust(widths[c]) if c < 2 else row[c].rjust(widths[c]) for c in range(4)]
        print("| " + " | ".join(cells) + " |")
        if n == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
