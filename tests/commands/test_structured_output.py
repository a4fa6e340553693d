"""``trirun generate`` with a schema, an expression, choices or a grammar."""

import json
import re

import pytest

pytest.importorskip("llguidance", reason="needs trirun[serve]")


@pytest.fixture
def answer(trirun, pytestconfig):
    """answer(*options): (exit code, the document of --json or None, standard error)."""

    def ask(*options):
        model = pytestconfig.rootpath / "configs" / "demo-model"
        code, out, err = trirun("generate", model, *options, "--json", "--seed", "1", "--temperature", "0.8")
        return code, json.loads(out) if code == 0 else None, err

    return ask


def test_each_way_to_say_what_the_text_is(answer, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],'
                      ' "additionalProperties": false}')  # fmt: skip
    grammar.write_text('start: "x" /[0-9]{1,3}/ "."')
    assert set(json.loads(answer("-p", "It", "--json-schema", schema)[1]["text"])) == {"a"}
    assert re.fullmatch(r"x[0-9]{1,3}\.", answer("-p", "It", "--grammar", grammar)[1]["text"])
    assert re.fullmatch("[ab]{3}", answer("-p", "It", "--regex", "[ab]{3}")[1]["text"])
    assert answer("-p", "It", "--choice", "sun", "--choice", "moon")[1]["text"] in ("sun", "moon")


def test_every_answer_of_a_file_follows_it(answer, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\nTwo\nThree\n")
    _, found, _ = answer("--prompts-file", prompts, "--regex", "[0-9]{4}")
    assert [bool(re.fullmatch("[0-9]{4}", line["text"])) for line in found["answers"]] == [True] * 3


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--regex", "a", "--choice", "b"), 2, "both given"),
        (("--regex", "("), 3, "unclosed"),
        (("--json-schema", "SCHEMA"), 3, "Expecting"),
        (("--choice", ""), 2, "choice"),
    ],
)
def test_what_is_no_grammar_is_one_line(answer, tmp_path, options, code, says):
    broken = tmp_path / "broken.json"
    broken.write_text('{"type": ')
    found, _, err = answer("-p", "It", *(broken if option == "SCHEMA" else option for option in options))
    assert found == code and says in err and "Traceback" not in err
