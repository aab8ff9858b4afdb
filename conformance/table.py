"""Print the table of `make conformance`: path × evidence × largest error × bound.

    python conformance/table.py EVIDENCE                     the table, in Markdown
    python conformance/table.py EVIDENCE --record            and keep it in benchmarks/records/conformance.json
    python conformance/table.py EVIDENCE --missing WHAT WHY  add a row of what was not run

Rows come from the fixture `held`, and are sorted, as tests run side by side. Of several with the same path and evidence
the worst is shown, relative to its bound.
"""

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

RECORD = Path(__file__).parent.parent / "benchmarks" / "records" / "conformance.json"
Row = tuple[str, str, float | None, float | None]  # path, evidence, error and bound; neither, if it was not run


def worst(file: Path) -> list[Row]:
    """Read a file of evidence: of rows with the same path and evidence the worst."""
    rows: dict[tuple[str, str], Row] = {}
    for path, evidence, error, bound in map(json.loads, file.read_text().splitlines()):
        known = rows.get((path, evidence))
        if known is None or (error is not None and (error * known[3], error) > (known[2] * bound, known[2])):
            rows[path, evidence] = path, evidence, error, bound
    return [row for _, row in sorted(rows.items())]


def show(rows: list[Row]) -> None:
    """Print a table in Markdown."""
    cells = [("path", "evidence", "error", "bound")]
    cells += [(*row[:2], *("" if x is None else f"{x:.3g}" for x in row[2:])) for row in rows]
    widths = [max(len(row[n]) for row in cells) for n in range(4)]
    for n, row in enumerate(cells):
        padded = [row[c].ljust(widths[c]) if c < 2 else row[c].rjust(widths[c]) for c in range(4)]
        print("| " + " | ".join(padded) + " |")
        if n == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--missing", nargs=2, metavar=("WHAT", "WHY"))
    arguments = parser.parse_args()
    if arguments.missing:
        what, why = arguments.missing
        with arguments.evidence.open("a") as file:
            print(json.dumps([what, f"not run: {why}", None, None]), file=file)
        return
    rows = worst(arguments.evidence)
    show(rows)
    if arguments.record:
        date = datetime.now(timezone.utc).date().isoformat()
        rounded = [(*row[:2], *(None if x is None else float(f"{x:.3g}") for x in row[2:])) for row in rows]
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rounded)
        RECORD.write_text(f'{{\n "date": "{date}",\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
