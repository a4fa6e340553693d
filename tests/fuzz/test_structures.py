"""A few of hypothesis' structures through every reader: ``scripts/fuzz.py all --structures 10000`` makes many."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from fuzz import structured
from fuzz_structures import PROPERTIES


@pytest.mark.parametrize("name", PROPERTIES)
def test_structures_end_in_a_result_or_in_one_line(name: str) -> None:
    report = structured(name, examples=6, seed=1)
    assert report == {"structures": name, "inputs": 6, "crashes": {}}
