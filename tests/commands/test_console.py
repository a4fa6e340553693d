"""The terminal: words as they are, documents that any JSON reader takes."""

import json
import math
from functools import partialmethod

import pytest
from rich.console import Console as RichConsole

from trirun_cli.console import Console
from trirun_cli.errors import TrirunError


def test_words_are_shown_as_they_are(capsys):
    console = Console()
    console.note("hf:x:train [b] of [/b]")
    console.error(TrirunError("hf:x: [red] is no name", "give :rocket: instead"))
    console.table("a :x: table", ["[b]"], [[":x:"]])
    out, err = capsys.readouterr()
    assert "hf:x:train [b] of [/b]" in err and "hf:x: [red] is no name" in err and "give :rocket: instead" in err
    assert "a :x: table" in out and "[b]" in out and "│ :x:" in out


def test_what_speaks_to_the_terminal_is_written_out(capsys):
    """Names come from files of others: this one renames the window and clears it."""
    name = "up\x1b]0;mine\x07\x1b[2J_proj"
    console = Console()
    console.note(f"one\ntwo {name}")
    console.warn(name)
    console.error(TrirunError(name, name))
    console.table(name, ["module"], [[name]])
    out, err = capsys.readouterr()
    written = r"up\x1b]0;mine\x07\x1b[2J_proj"
    assert out.count(written) == 2 and err.count(written) == 4 and f"one\ntwo {written}\n" in err
    assert "\x1b" not in out + err and "\x07" not in out + err


def test_documents_hold_no_number_that_json_lacks(capsys):
    Console(as_json=True).json("test/1", {"values": [math.nan, (math.inf, 1.5)], "inner": {"least": -math.inf}})
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: 1 / 0)
    assert document == {"schema": "trirun.test/1", "values": [None, [None, 1.5]], "inner": {"least": None}}


def test_quiet_keeps_warnings_and_errors(capsys):
    console = Console(quiet=True)
    console.note("a note")
    console.warn("a warning")
    out, err = capsys.readouterr()
    assert out == "" and "a note" not in err and "a warning" in err


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_tables_lose_no_number(capsys, monkeypatch, columns):
    monkeypatch.setattr(Console, "__init__", partialmethod(_narrow, columns))
    name, numbers = "model.layers.11.self_attn.down_proj", ["123456.789", "0.0381 … 0.185", "18% 32% 32% 18%"]
    Console().table("a title", ["module", "read share of all", "|scale| min … max", "codes"], [[name, *numbers]])
    lines = capsys.readouterr().out.splitlines()
    assert any(all(number in line for number in numbers) for line in lines)
    assert "".join(line.split("│")[1].strip() for line in lines if line.startswith("│")) == name
    assert columns == 40 or max(map(len, lines)) <= columns


def _narrow(console, columns):
    console.as_json = console.quiet = False
    console._out = RichConsole(highlight=False, emoji=False, soft_wrap=True, width=columns)
