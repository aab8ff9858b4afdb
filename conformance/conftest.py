"""Fixtures of the tests in all environments: errors are held to bounds, and kept for the table at the end."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Held = Callable[[str, str, float, float], None]


@pytest.fixture
def held() -> Held:
    """Return a function that asserts an error within its bound, and keeps the row for `table.py`.

    Its arguments are the path of the computation, the evidence, the error and the bound.
    """

    def hold(path: str, evidence: str, error: float, bound: float) -> None:
        if file := os.environ.get("QATTN_EVIDENCE"):
            with Path(file).open("a") as rows:
                print(json.dumps([path, evidence, error, bound]), file=rows)
        assert error <= bound  # false for NaN

    return hold
