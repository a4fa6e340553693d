"""``trirun eval`` on lm-eval's tasks from local files: prompts, scores, errors, and what is written."""

import csv
import json
import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

WORDS = ("sea", "ship", "captain", "storm", "harbour", "night", "lamp", "door")


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files, one for each row schema."""
    folder = tmp_path_factory.mktemp("data")
    write_rows(
        folder / "piqa.jsonl",
        [
            {
                "query": f"Question: How do I light the {word}?\n",
                "choices": [f"Take a {word} and wait.", f"Leave the {word} alone, then go home."],
                "gold": number % 2,
            }
            for number, word in enumerate(WORDS)
        ],
    )
    write_rows(
        folder / "lambada_openai.jsonl",
        [{"context": f"He went to the {word}, and then back to the", "continuation": word} for word in WORDS],
    )
    write_rows(
        folder / "winogrande_validation.jsonl",
        [
            {"sentence": f"The {word} hit the rock because _ was old.", "option1": "it", "option2": "he", "answer": "1"}
            for word in WORDS
        ],
    )
    write_rows(
        folder / "hellaswag" / "val.jsonl",
        [
            {
                "activity_label": "Sailing",
                "ctx_a": f"A man sees a {word}.",
                "ctx_b": "he" if number % 2 else "",
                "endings": [f"{other} [title] ahead." for other in WORDS[:4]],
                "label": number % 4,
            }
            for number, word in enumerate(WORDS)
        ],
    )
    write_rows(
        folder / "gsm8k.jsonl",
        [{"context": "What is 1 + 1?", "chain_of_thought": "It is 1 + 1 = 2.", "answer": "2"}],
    )
    write_rows(
        folder / "sayings.jsonl",
        [{"query": f"The {word} is", "choices": ["a", "b", "c"], "gold": 2} for word in WORDS],
    )
    questions = [(f"What, is a {word}?", "big", "small", "old", "new") for word in WORDS]
    for split in ("dev", "test"):
        # hendrycks/test: no header line, letters for answers.
        rows = [(*question, "ABCD"[number % 4]) for number, question in enumerate(questions)]
        write_csv(folder / "mmlu" / split / f"anatomy_{split}.csv", rows)
        rows = [(*question, number % 4) for number, question in enumerate(questions)]
        write_csv(
            folder / "mmlu" / f"virology_{split}.csv", [("question", *(f"choice{i}" for i in range(4)), "answer")]
        )
        with (folder / "mmlu" / f"virology_{split}.csv").open("a", newline="") as stream:
            csv.writer(stream).writerows(rows)
    return folder


def samples(folder, role, task):
    return [json.loads(line) for line in (folder / role / f"{task}.jsonl").read_text().splitlines()]


def test_original_and_packed_side_by_side(trirun, ternary_model, packed, data, tmp_path):
    arguments = (
        "eval",
        "-m",
        ternary_model,
        "-c",
        packed,
        "--data-dir",
        data,
        "--tasks",
        "piqa,lambada,mmlu_anatomy,kl",
    )
    arguments += ("--text", data / "piqa.jsonl", "--window", "32", "--log-samples", tmp_path)
    code, out, err = trirun(*arguments, "--markdown", tmp_path / "table.md", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.eval/2"
    assert document["seeds"] == {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
    assert document["versions"].keys() >= {"trirun", "torch", "transformers", "lm_eval"}
    assert document["models"]["checkpoint"]["act_bits"] == 16 and document["models"]["checkpoint"]["kernel"]
    assert "not added" in document["models"]["model"]["bos"] and "BOS <|endoftext|> (0): not added" in err
    found = {(entry["role"], entry["task"]): entry for entry in document["results"]}
    for task, questions in (("piqa", 8), ("lambada_openai", 8), ("mmlu_anatomy", 8)):
        model, checkpoint = found["model", task], found["checkpoint", task]
        assert model["questions"] == checkpoint["questions"] == model["of"] == questions
        assert model["acc"] == checkpoint["acc"] and model["acc_stderr"] == pytest.approx(checkpoint["acc_stderr"])
        left, right = (samples(tmp_path, role, task) for role in ("model", "checkpoint"))
        for a, b in zip(left, right, strict=True):
            assert a["prompt"] == b["prompt"] and a["likelihoods"] == pytest.approx(b["likelihoods"], abs=1e-2)
            assert a["prediction"] == b["prediction"]
    differences = {(entry["task"], entry["metric"]): entry for entry in document["differences"]}
    assert differences["piqa", "acc"]["value"] == 0 and differences["piqa", "acc"]["stderr"] == 0
    assert differences["piqa", "acc"]["same_answers"] == 8 and differences["piqa", "acc"]["largest_margin"] is None
    assert (
        abs(differences["lambada_openai", "perplexity"]["value"]) < found["model", "lambada_openai"]["perplexity"] / 100
    )
    kl = found["checkpoint", "kl"]
    assert 0 <= kl["percentiles"]["50"] <= kl["kl"] + 1e-9 < 1e-4 and kl["same_top"] > 0.99
    table = (tmp_path / "table.md").read_text()
    assert "| piqa | 0 | acc |" in table and "KL divergence" in table and "transformers 5." in table
    assert (
        document["models"]["model"]["time"]["piqa"]["model_s"] <= document["models"]["model"]["time"]["piqa"]["wall_s"]
    )


def test_the_same_scores_as_the_hf_model_of_lm_eval(trirun, plain_model, data, tmp_path):
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trirun_cli.eval.tasks.harness import quiet_harness
    from trirun_cli.eval.tasks.resolve import Loader

    names = ["piqa", "lambada", "winogrande", "hellaswag", "mmlu_anatomy"]
    arguments = ("-m", plain_model, "--tasks", ",".join(names), "--data-dir", data, "--num-fewshot", "0")
    code, out, _ = trirun("eval", *arguments, "--log-samples", tmp_path, "--json")
    ours = {entry["task"]: entry for entry in json.loads(out)["results"]}
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(plain_model, dtype=torch.float32)
    hf = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(plain_model), batch_size=4)
    with quiet_harness():
        for name in names:
            loaded = Loader([data], 0).load(name).loaded
            theirs = evaluate(hf, loaded, bootstrap_iters=0, log_samples=True)
            for task, entries in theirs["samples"].items():
                for mine, entry in zip(samples(tmp_path, "model", task), entries, strict=True):
                    likelihoods = [response[0][0] for response in entry["resps"]]
                    assert mine["prompt"] == entry["arguments"][0][0]
                    assert mine["likelihoods"] == pytest.approx(likelihoods, abs=1e-3)
                    assert mine["values"]["acc"] == entry["acc"]
                for metric in ours[task]["metrics"]:
                    assert ours[task][metric] == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-4)


def test_prompts_are_those_of_the_papers(trirun, plain_model, data, tmp_path):
    names = "mmlu_virology,mmlu_anatomy,hellaswag,winogrande,sayings"
    arguments = ("-m", plain_model, "--tasks", names, "--data-dir", data / "mmlu", "--data-dir", data)
    assert trirun("eval", *arguments, "--limit", "2", "--num-fewshot", "0", "--log-samples", tmp_path)[0] == 0
    for subject in ("virology", "anatomy"):
        first = samples(tmp_path, "model", f"mmlu_{subject}")[0]
        assert first["prompt"] == (
            f"The following are multiple choice questions (with answers) about {subject}.\n\n"
            "What, is a sea?\nA. big\nB. small\nC. old\nD. new\nAnswer:"
        )
        assert first["answers"] == [" A", " B", " C", " D"]
    assert samples(tmp_path, "model", "hellaswag")[1]["prompt"] == "Sailing: A man sees a ship. He"
    assert samples(tmp_path, "model", "hellaswag")[0]["answers"][0] == " sea. ahead."
    assert samples(tmp_path, "model", "winogrande")[0]["answers"] == [
        "The sea hit the rock because it",
        "The sea hit the rock because he",
    ]
    assert samples(tmp_path, "model", "sayings")[0]["prompt"] == "The sea is"
    # Flat rows of a task whose own columns cannot be told from them.
    (tmp_path / "hellaswag.jsonl").write_text((data / "sayings.jsonl").read_text())
    code, _, err = trirun("eval", "-m", plain_model, "--tasks", "hellaswag", "--data-dir", tmp_path, "--limit", "1")
    assert code == 0 and "prompts as written in hellaswag.jsonl, not lm-eval's" in err


def test_examples_come_from_the_dev_split_in_order(trirun, plain_model, data, tmp_path):
    arguments = ("-m", plain_model, "--tasks", "mmlu_virology", "--data-dir", data / "mmlu", "--log-samples", tmp_path)
    code, _, err = trirun("eval", *arguments, "--num-fewshot", "3", "--limit", "1")
    prompt = samples(tmp_path, "model", "mmlu_virology")[0]["prompt"]
    assert code == 0 and "1 prompts lost their beginning" not in err
    shots = [
        f"What, is a {word}?\nA. big\nB. small\nC. old\nD. new\nAnswer: {letter}"
        for word, letter in zip(WORDS, "ABC", strict=False)
    ]
    assert "\n\n".join(shots) + "\n\nWhat, is a sea?" in prompt
    code, _, err = trirun("eval", *arguments, "--num-fewshot", "9")
    assert code == 2 and "mmlu_virology has 8 examples" in err
    code, _, err = trirun("eval", "-m", plain_model, "--data-dir", data, "--tasks", "sayings", "--num-fewshot", "8")
    assert code == 2 and "sayings has 7 examples" in err
    code, _, err = trirun("eval", "-m", plain_model, "--data-dir", data, "--tasks", "piqa", "--num-fewshot", "2")
    assert code == 2 and "its 2 examples come from its train split" in err and "piqa_train.jsonl" in err


def test_generated_answers_and_the_chat_template(trirun, plain_model, data, tmp_path, copy_of):
    chatty = copy_of(plain_model)
    config = json.loads((chatty / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (chatty / "tokenizer_config.json").write_text(json.dumps(config))
    arguments = ("--tasks", "gsm8k", "--data-dir", data, "--num-fewshot", "0", "--log-samples", tmp_path)
    code, _, err = trirun("eval", "-m", chatty, *arguments, "--chat-template")
    assert code == 3 and "generating 256 tokens leaves no room" in err
    code, _, err = trirun("eval", "-m", plain_model, *arguments, "--chat-template")
    assert code == 3 and "has no chat template" in err
    arguments = ("--tasks", "sayings", "--data-dir", data, "--log-samples", tmp_path, "--chat-template")
    assert trirun("eval", "-m", chatty, *arguments)[0] == 0
    assert samples(tmp_path, "model", "sayings")[0]["prompt"] == "<user>The sea is"


def test_a_resumed_run_computes_nothing_twice_and_another_model_is_refused(trirun, plain_model, packed, data, tmp_path):
    arguments = ("--tasks", "piqa,perplexity", "--data-dir", data, "--window", "32", "--limit", "4", "--json")
    first = json.loads(trirun("eval", "-m", plain_model, *arguments, "--resume", tmp_path)[1])
    code, out, err = trirun("eval", "-m", plain_model, *arguments, "--resume", tmp_path)
    again = json.loads(out)
    assert code == 0 and again["results"] == first["results"]
    assert "every request was finished before" in err and "12 finished requests" in err
    assert again["models"]["model"]["time"]["perplexity"]["model_s"] == 0
    code, _, err = trirun("eval", "-m", packed, *arguments, "--resume", tmp_path)
    assert code == 3 and "was written for another sha256" in err


def test_without_lm_eval_its_tasks_are_refused_and_the_others_run(trirun, plain_model, data, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("lm_eval", "trirun_cli.eval")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = trirun("eval", "-m", plain_model, "--tasks", "piqa", "--data-dir", data)
    assert code == 4 and "needs lm-eval, which is not installed" in err and "pip install 'trirun[eval]'" in err
    code, out, _ = trirun("eval", "-m", plain_model, "--window", "32", "--limit", "1", "--json")
    assert code == 0 and json.loads(out)["results"][0]["windows"] == 1


def test_lm_eval_finds_the_model_class_by_name(packed, data):
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import evaluate

    from trirun_cli.eval.tasks.harness import quiet_harness
    from trirun_cli.eval.tasks.resolve import Loader
    from trirun_cli.integrations.lm_eval import TrirunLM

    assert get_model("trirun") is TrirunLM
    # As simple_evaluate makes it from --model_args and its own options.
    lm = get_model("trirun").create_from_arg_string(
        f"pretrained={packed},act_bits=8", {"batch_size": "auto", "max_batch_size": None, "device": "cpu"}
    )
    with quiet_harness():
        results = evaluate(lm, Loader([data], None).load("piqa").loaded, limit=2, bootstrap_iters=0)
    assert results["n-samples"]["piqa"]["effective"] == 2 and 0 <= results["results"]["piqa"]["acc,none"] <= 1


def test_every_mmlu_question_is_read(shared):
    from trirun_cli.eval.tasks.offline import MMLU, find_mmlu, load_rows

    subjects = [file.name.removesuffix("_test.csv") for file in (shared / "data/mmlu/test").glob("*.csv")]
    files = {(s, split): find_mmlu([shared / "data"], s, split) for s in subjects for split in ("test", "dev")}
    counts = {key: len(load_rows(file, MMLU.schemas)) for key, file in files.items()}
    assert len(subjects) == 57 and sum(counts.values()) == 14042 + 57 * 5
    assert sum(count for (_, split), count in counts.items() if split == "test") == 14042
