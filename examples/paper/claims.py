"""Claims of the paper beside what was measured here, and the options that all examples share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))  # quick.py is with the other examples
from quick import parsed

__all__ = ["parsed", "report"]


def report(*claims):
    """Print claims, each as (what the paper says, what was measured, whether it holds).

    Raises:
        SystemExit: If one does not hold that should. Where the third is None, that the paper's figure is not
            reproduced is known, and only said.
    """
    print()
    failed = 0
    for says, measured, holds in claims:
        is_wrong = holds is not None and not holds  # NumPy has a False of its own
        print(f"{'–' if holds is None else '✗' if is_wrong else '✓'} the paper: {says}\n  here:      {measured}")
        failed += is_wrong
    if failed:
        raise SystemExit(f"{failed} of {len(claims)} claims did not hold.")
