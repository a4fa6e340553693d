"""What ``trirun eval`` says about tasks and data files that are wrong: one line, with the file and the line of it."""

import csv
import importlib
import json

import pytest

from trirun_cli.errors import MissingError
from trirun_cli.eval.tasks.resolve import needs_lm_eval

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def test_tasks_and_files_that_are_wrong_are_named_in_a_line(trirun, plain_model, tmp_path):
    write_rows(tmp_path / "piqa.jsonl", [{"query": "Question: a\n", "choices": ["x", "y"], "gold": 0}] * 2)
    with (tmp_path / "piqa.jsonl").open("a") as stream:
        stream.write('{"query": "Question: b\\n", "choices": ["x", "y"], "gold": 2}\n')
    (tmp_path / "arc_easy.jsonl").write_text('{"query": "Question: a", \n')
    (tmp_path / "boolq.jsonl").write_text("\n")
    (tmp_path / "gsm8k.jsonl").write_text('["no", "object"]\n')
    (tmp_path / "openbookqa.jsonl").write_bytes(b'{"query": "\xff"}\n')
    write_rows(tmp_path / "winogrande.jsonl", [{"something": "else"}])
    write_csv(tmp_path / "anatomy_test.csv", [("q", "a", "b", "c", "d", "A"), ("q", "a", "b", "c", "d", "E")])
    write_csv(tmp_path / "virology_test.csv", [("question", "choice0", "choice3", "answer"), ("q", "a", "b")])
    for name, code, message in [
        ("piqa", 3, "piqa.jsonl:3: 'gold' must be a number from 0 to 1, got 2"),
        ("arc_easy", 3, "arc_easy.jsonl:1: not valid JSON"),
        ("boolq", 3, "boolq.jsonl has no rows"),
        ("gsm8k", 3, "gsm8k.jsonl:1: an object is wanted"),
        ("openbookqa", 3, "openbookqa.jsonl is not UTF-8"),
        ("winogrande", 3, "winogrande.jsonl: its columns are something"),
        ("mmlu_anatomy", 3, "anatomy_test.csv:2: 'answer' must be a letter from A to D, got 'E'"),
        ("mmlu_virology", 3, "virology_test.csv:2: 3 fields where 4 are wanted"),
        ("hellaswag", 3, f"hellaswag: no file of its validation split in {tmp_path}"),
        ("mmlu", 3, "mmlu: 55 of 57 subjects missing"),
        ("wikitext2", 3, "wikitext2: no wiki.test.raw in"),
        ("mmlu_anatomi", 2, "no task of that name (close: mmlu_anatomy"),
        ("piqqa", 2, "no task of that name (close: piqa"),
        ("mmlu_stem,mmlu_virology", 3, "mmlu_stem: "),
    ]:
        found, out, err = trirun("eval", "-m", plain_model, "--tasks", name, "--data-dir", tmp_path)
        assert (found, out) == (code, "") and message in err
        assert len(err.strip().splitlines()) <= 2
    code, _, err = trirun(
        "eval", "-m", plain_model, "--tasks", "mmlu_virology,piqa", "--data-dir", tmp_path / "nowhere"
    )
    assert code == 2 and "no such file or directory" in err


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            ModuleNotFoundError("No module named 'sklearn.metrics'", name="sklearn.metrics"),
            "lm-eval needs sklearn, which",
        ),
        (ModuleNotFoundError("`sympy` is required for\nminerva_math"), "packages are missing: `sympy` is required for"),
    ],
)
def test_a_package_that_a_task_imports_is_named(trirun, plain_model, monkeypatch, indexed_once, failure, words):
    from lm_eval.tasks import TaskManager

    def fail(*arguments, **options):
        raise failure

    monkeypatch.setattr(TaskManager, "load", fail)
    code, _, err = trirun("eval", "-m", plain_model, "--tasks", "piqa")
    assert code == 4 and f"error: --tasks piqa: {words}" in err


def test_a_package_that_lm_eval_imports_is_named_with_who_wants_it(monkeypatch, tmp_path):
    (tmp_path / "lm_eval_stand_in.py").write_text("import sacrebleu_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = "lm_eval_stand_in needs sacrebleu_that_nobody_has, and"
    with pytest.raises(MissingError, match=words), needs_lm_eval(["piqa"]):
        importlib.import_module("lm_eval_stand_in")
