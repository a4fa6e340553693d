"""Sampling parameters in the lines of a prompts file."""

import json

import pytest


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def answers(out):
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda entry: entry["index"])


def test_every_line_has_its_own(trirun, packed, tmp_path):
    file = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "The sea"},
        {"prompt": "The sea", "max_tokens": 3},
        {"prompt": "The sea", "temperature": 1.5, "seed": 7, "top_k": 50, "max_tokens": None},
        {"prompt": "The sea", "max_tokens": 40, "stop": ["e", "a"]},
    )
    code, out, _ = trirun("generate", packed, "--prompts-file", file, "-n", 8)
    found = answers(out)
    assert code == 0 and [entry["generated_tokens"] for entry in found[:3]] == [8, 3, 8]
    assert "params" not in found[0]
    assert found[2]["params"] == {"temperature": 1.5, "seed": 7, "top_k": 50}
    alone = ("-p", "The sea", "-n", 8, "--json")
    for entry, options in ((found[0], ()), (found[2], ("--temperature", 1.5, "--seed", 7, "--top-k", 50))):
        assert entry["text"] == json.loads(trirun("generate", packed, *alone, *options)[1])["text"]
    stopped = ("-p", "The sea", "-n", 40, "--stop", "e", "--stop", "a", "--json")
    assert found[3]["text"] == json.loads(trirun("generate", packed, *stopped)[1])["text"]
    # What is not there is of the options.
    code, out, _ = trirun("generate", packed, "--prompts-file", file, "-n", 5, "--temperature", 0.5, "--seed", 1)
    assert [entry["generated_tokens"] for entry in answers(out)[:3]] == [5, 3, 5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "many"}, "max_tokens is 'many'"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"temperature": [1]}, "temperature is [1]"),
        ({"top_p": 2}, "top_p must be above 0"),
        ({"stop": [1]}, "stop is [1]"),
        ({"stop": ""}, "stop must be"),
    ],
)
def test_values_are_checked_before_anything_is_computed(trirun, packed, tmp_path, fields, message):
    file = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, {"prompt": "The sea"} | fields)
    code, out, err = trirun("generate", packed, "--prompts-file", file)
    assert code == 3 and out == "" and f"{file}:2: " in err.replace("\n", "") and message in err


def test_fields_of_no_use_are_named(trirun, packed, tmp_path):
    file = write(tmp_path / "prompts.jsonl", {"prompt": "The sea", "max_token": 3, "topic": "sea", "id": 1})
    code, _, err = trirun("generate", packed, "--prompts-file", file, "-n", 1)
    assert code == 0 and "not used of its lines: max_token, topic" in err


def test_a_run_is_not_continued_with_other_parameters(trirun, packed, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    options = ("generate", packed, "--prompts-file", file, "--out", out, "--resume", "-n", 4)
    write(file, {"prompt": "The sea", "stop": ["x"], "max_tokens": 3}, {"prompt": "He"})
    assert trirun(*options)[0] == trirun(*options)[0] == 0
    write(file, {"prompt": "The sea", "stop": ["x"], "max_tokens": 2}, {"prompt": "He"})
    code, _, err = trirun(*options)
    assert code == 3 and "answer 0 is of other parameters" in err.replace("\n", " ")
