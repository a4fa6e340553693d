"""What scripts that measure write down: the replicas' losses, and the table of families."""

import families
from replicas_check import counts

from trirun_cli.bench.client import Sample


def test_an_error_belongs_to_the_killed_server_if_its_request_was_under_way() -> None:
    lost, late, early = (Sample(prompt, error=f"error {prompt}") for prompt in range(3))
    good, other = Sample(3, text="a"), Sample(3, text="b")
    samples = [(9.0, 10.1, lost), (20.0, 21.0, late), (8.0, 9.5, early), (1.0, 2.0, good), (9.0, 12.0, good)]
    found = counts(samples, killed=10.0)
    assert (found["requests"], found["answered"]) == (5, 2)
    assert found["lost_with_the_killed_server"] == 1 and found["lost_otherwise"] == 2
    assert found["errors"] == ["error 1", "error 2"] and found["prompts_with_two_answers"] == 0
    assert counts([*samples, (1.0, 2.0, other)], killed=10.0)["prompts_with_two_answers"] == 1


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
