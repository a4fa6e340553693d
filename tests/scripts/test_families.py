"""The table of families: one short line for each."""

from __future__ import annotations

import families


def test_a_reason_is_its_first_line_at_the_width_of_a_cell():
    assert families.brief("no such file\nTraceback of many lines") == "no such file"
    assert families.brief("") == "no reason"
    long = families.brief("AttributeError: " + "one of many classes, " * 40)
    assert len(long) <= families.CELL and long.startswith("AttributeError: one of") and long.endswith(" ...")


def test_a_refusal_is_a_row_of_one_line():
    cells = {"quantize": families.brief("error: it has | no\nblocks"), "pack": "yes"}
    table = families.markdown([families.Row("strange", linear=4, cells=cells)])
    assert table.splitlines()[2:] == ["| strange | error: it has / no | yes | – | – | 0 of 4 | nan |"]


def test_what_transformers_cannot_build_is_no_row():
    rows = [
        families.Row(name, cells={"quantize": cell}) for name, cell in (("a", "yes"), ("b", "not tried: too large"))
    ]
    assert [row.family for row in filter(families.was_built, rows)] == ["a"]
