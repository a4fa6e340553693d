"""Tables of plans: how they are read and written, and that the checked-in ones hold together."""

from itertools import product

import pytest
from trirun_kernels.plan.problem import Device, Problem
from trirun_kernels.plan.stream import facts
from trirun_kernels.plan.table import FOLDER, first, parsed, stored, table, written

from tests.kernels.plan.support import needs_library

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_files_are_what_the_tuning_script_writes(name):
    assert written(stored(name)) == (FOLDER / f"{name}.json").read_text()
    assert {"about", "device"} <= stored(name).keys()


def test_constants_lose_their_words():
    entry = {"a": {"about": "of a tile", "value": 7}, "b": {"about": "by size", "64": 1.5, "128x64": [1, 2], "all": 3}}
    assert parsed(entry) == {"a": 7, "b": {64: 1.5, (128, 64): [1, 2], "all": 3}}


def test_the_first_rule_that_holds_answers():
    rules = parsed(
        [{"k": ">=6144 <8192", "x": "values", "plans": 1}, {"r": ">2/3 <=1", "plans": 2}, {"m": "2", "plans": 3}]
    )
    known = {"k": 6144, "x": "values", "r": 0.5, "m": 2}
    assert first(rules, known) == 1
    assert first(rules, known | {"k": 8192}) == 3
    assert first(rules, known | {"x": "quantized", "r": 89 / 132}) == 2
    assert first(rules, known | {"k": 8192, "r": 88 / 132, "m": 1}) is None  # two thirds, exactly
    with pytest.raises(KeyError):
        first(rules, {"k": 6144})


@needs_library
def test_every_rule_of_the_stream_kernel_decides_some_problem():
    reached = {section: set() for section in ("act16", "act8_fused", "act8")}
    n_tiles = (8, 16, 33, 34, 44, 45, 63, 66, 88, 89, 99, 100, 132, 133, 198, 199, 264, 265, 396, 397, 544, 792, 793)
    ks = (1024, 2048, 3968, 4096, 5120, 6144, 8192, 12288, 14336, 16384)
    for tiles, k, m, group, quantized in product(n_tiles, ks, (1, 2, 3, 5, 9), (-1, 128), (False, True)):
        known = facts(Problem(64 * tiles, k, m, group, 16, Device(90, 132), quantized))
        for section in reached:
            if m <= (8 if section == "act16" else 16) and not (quantized and section == "act8_fused"):
                rules = table("stream")[section]
                found = next((i for i, rule in enumerate(rules) if rule.holds(known)), None)
                assert found is not None or section == "act8_fused", known
                reached[section].add(found)
    for section, found in reached.items():
        assert set(range(len(table("stream")[section]))) <= found, section
