"""``trirun eval --tasks list``: what can be asked for, grouped, and where its data come from."""

import json
import sys

import pytest


def groups(trirun, *options):
    code, out, _ = trirun("eval", "--tasks", "list", "--json", *options)
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.eval.tasks/1"
    return {group["title"]: group for group in document["groups"]}


def test_every_kind_of_task_is_listed(trirun, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    rows = [{"query": "The sea is", "choices": ["a", "b"], "gold": 1}]
    (tmp_path / "sayings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "damaged.jsonl").write_text("no JSON\n")
    found = groups(trirun, "--data-dir", tmp_path)
    assert found["built in"]["names"] == ["perplexity", "wikitext2", "kl"]
    assert {"piqa", "mmlu", "lambada"} <= set(found["lm-eval's, also offline"]["names"])
    assert found["files of --data-dir"]["names"] == ["sayings"]
    assert found["files of --data-dir"]["data"] == "--data-dir only"
    hub = found["lm-eval's"]
    assert {"wikitext", "gpqa_main_zeroshot"} <= set(hub["names"]) and "piqa" not in hub["names"]
    assert {"mmlu", "wikitext"} <= {folder for folder, _ in hub["families"]}
    code, out, _ = trirun("eval", "--tasks", "list", "--data-dir", tmp_path)
    assert (
        code == 0 and "sayings" in out and "data from --data-dir only" in out and max(map(len, out.splitlines())) < 161
    )


def test_names_that_are_listed_are_known(trirun, indexed_once):
    from lm_eval.tasks import TaskManager

    listed = groups(trirun)["lm-eval's"]["names"]
    known = set(TaskManager().all_tasks)
    assert len(set(listed) - known) < len(listed) / 50 and len(known - set(listed)) < len(known) / 10


def test_without_lm_eval(trirun, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("lm_eval"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, err = trirun("eval", "--tasks", "list")
    assert code == 0 and "perplexity" in out and "pip install 'trirun[eval]'" in err
