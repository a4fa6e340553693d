"""Reasoning in tags, apart from the answer, across any borders of a stream."""

import pytest

from trirun_cli.text.reasoning import CLOSE, ReasoningParser, reasons


def parse(text, size, inside=False):
    parser, reasoning, answer = ReasoningParser(inside), "", ""
    for i in range(0, len(text), size):
        more, rest = parser.feed(text[i : i + size])
        reasoning, answer = reasoning + more, answer + rest
        assert CLOSE not in more
    more, rest = parser.flush()
    return reasoning + more, answer + rest


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes.\n", False, ("hm\n\nso", "Yes.\n")),
        ("\n<think>hm</think>Yes", False, ("hm", "Yes")),
        ("hm\n</think>\n\nYes <think>", True, ("hm", "Yes <think>")),
        ("</think>\n\nYes", True, ("", "Yes")),
        ("a < b </th and", True, ("a < b </th and", "")),
        ("cut off\n", True, ("cut off", "")),
        ("Plain <think> text", False, ("", "Plain <think> text")),
        ("\n\nPlain", False, ("", "\n\nPlain")),
        ("<thin", False, ("", "<thin")),
        ("", False, ("", "")),
    ],
)
def test_split(text, inside, expected, size):
    assert parse(text, size, inside) == expected


def test_templates_that_know_of_it():
    assert reasons("{{ m.content.split('</think>')[-1] }}") and not reasons("{{ m.content }}") and not reasons(None)
