"""``trirun generate --prompts-file``: every prompt answered as if alone, and no answer lost."""

import json
import os
import signal
from pathlib import Path

import pytest

from trirun_cli.commands.shared.options import check_output
from trirun_cli.errors import InputError
from trirun_cli.eval.report import write_text
from trirun_cli.text.prompt_files import AnswerFile, PromptLine

PROMPTS = ["Once upon a time", "The sea", "She said that", "word " * 300, "He was", "In the morning"]


@pytest.fixture
def prompts_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "id": f"p{i}"}) + "\n" for i, text in enumerate(PROMPTS)))
    return file


def lines(file):
    return sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda entry: entry["index"])


SAMPLED = ("-n", "6", "--temperature", "1", "--seed", "5")


def test_answers_are_those_of_single_prompts(trirun, packed, prompts_file, tmp_path):
    code, out, err = trirun("generate", "-c", packed, "--prompts-file", prompts_file, "--batch", 3, "--stats", *SAMPLED)
    answers = sorted((json.loads(line) for line in out.splitlines()), key=lambda entry: entry["index"])
    assert code == 1 and "1 of 6 prompts were refused" in err and "5 prompts in" in err
    assert [entry["id"] for entry in answers] == [f"p{i}" for i in range(6)]
    assert "context is 128 (--ctx)" in answers[3]["error"] and "text" not in answers[3]
    for index in (0, 4):
        options = ("-p", PROMPTS[index], "-n", "6", "--temperature", "1", "--seed", 5 + index, "--json")
        alone = json.loads(trirun("generate", "-c", packed, *options)[1])
        for name in ("text", "finish_reason", "prompt_tokens", "generated_tokens"):
            assert answers[index][name] == alone[name]


def test_tokens_after_a_stop_string_are_not_counted(trirun, packed, tmp_path):
    options = ("generate", "-c", packed, "--json")
    texts = [json.loads(trirun(*options, "-p", "The sea", "-n", n)[1])["text"] for n in range(5)]
    stop = texts[4].removeprefix(texts[2])
    count = next(n for n, text in enumerate(texts) if stop in text)
    (tmp_path / "prompts.txt").write_text("The sea\n")
    options += ("--stop", stop, "-n", 60)
    document = json.loads(trirun(*options, "--prompts-file", tmp_path / "prompts.txt")[1])
    assert document["answers"][0]["generated_tokens"] == document["generated_tokens"] == count


def test_a_run_is_taken_up_where_it_stopped(trirun, packed, prompts_file, tmp_path):
    out = tmp_path / "new" / "answers.jsonl"
    options = ("generate", "-c", packed, "--prompts-file", prompts_file, "--out", out, *SAMPLED)
    trirun(*options)
    whole = lines(out)
    assert len(whole) == 6
    code, _, err = trirun(*options)
    assert code == 2 and "exists" in err and lines(out) == whole
    kept = "".join([line for line in out.read_text().splitlines(keepends=True) if '"text"' in line][:2])
    out.write_text(kept + '{"index": 5, "prompt": "In the mor')
    code, _, err = trirun(*options, "--resume")
    assert "2 of 6 prompts are answered already" in err and lines(out) == whole
    assert out.read_text().startswith(kept)
    code, _, err = trirun(*options, "--resume", "--top-k", 3)
    assert code == 2 and "other settings" in err and lines(out) == whole
    prompts_file.write_text('{"prompt": "Another"}\n')
    code, _, err = trirun(*options, "--resume")
    assert code == 3 and "to another prompt" in err and lines(out) == whole
    code, _, _ = trirun(*options, "--overwrite")
    assert code == 0 and [entry["prompt"] for entry in lines(out)] == ["Another"]


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    AnswerFile(pipe, {}).close()
    answers = AnswerFile(pipe, {})
    answers.add(PromptLine(0, "a"), {"text": "b"})
    answers.close()
    assert json.loads(os.read(reader, 1000))["text"] == "b"
    check_output("--markdown", pipe)
    write_text(pipe, "a table")
    assert os.read(reader, 1000) == b"a table" and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    os.close(reader)


def test_a_file_that_cannot_be_written_is_known_before_anything_is_computed(tmp_path):
    with pytest.raises(OSError):
        AnswerFile(Path("/dev/null/answers.jsonl"), {})
    out = tmp_path / "answers.jsonl"
    first = AnswerFile(out, {})
    with pytest.raises(InputError, match="in use by another run"):
        AnswerFile(out, {}, resume=True)
    assert out.exists()
    first.close()
    assert not out.exists()
    again = AnswerFile(out, {})
    again.add(PromptLine(0, "a\u2028b"), {"text": "é"})
    again.close()
    assert AnswerFile(out, {}, resume=True).answers[0]["prompt"] == "a\u2028b"


def test_one_document_of_everything(trirun, packed, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The sea\n\n  two spaces\n")
    code, out, _ = trirun("generate", "-c", packed, "--prompts-file", file, "-n", 4, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.generate_many/1" and document["generated_tokens"] == 8
    assert [answer["prompt"] for answer in document["answers"]] == ["The sea", "  two spaces"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--prompt", "a"), 2, "one is enough"),
        (("--resume",), 2, "--resume needs the --out"),
        (("--batch", "0"), 2, "--batch 0"),
        (("--overwrite",), 2, "--overwrite needs the --out"),
        (("--out", "a.jsonl", "--resume", "--overwrite"), 2, "contradict"),
        (("--chat",), 3, "no chat template"),
    ],
)
def test_options_that_contradict(trirun, packed, prompts_file, options, code, message):
    found, _, err = trirun("generate", "-c", packed, "--prompts-file", prompts_file, *options)
    assert found == code and message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not JSON"),
        ('{"text": "a"}', 'a text under "prompt"'),
        (r'{"prompt": "a\ud800"}', "half a character"),
    ],
)
def test_damaged_prompts(trirun, packed, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    out = tmp_path / "out.jsonl"
    code, _, err = trirun("generate", "-c", packed, "--prompts-file", file, "--out", out)
    assert code == 3 and not out.exists() and f"{file}:2" in err.replace("\n", "") and message in err


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_keeps_what_is_finished(trirun, packed, tmp_path, monkeypatch):
    file, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    file.write_text("".join(f"Prompt {i}\n" for i in range(20)))
    add = AnswerFile.add

    def add_and_interrupt(self, prompt, answer):
        add(self, prompt, answer)
        if len(self.answers) == 3:
            signal.raise_signal(signal.SIGINT)

    options = ("generate", "-c", packed, "--prompts-file", file, "--out", out, "--batch", 2, "-n", 5)
    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", add_and_interrupt)
        code, _, err = trirun(*options)
    done = len(lines(out))
    assert code == 130 and 3 <= done <= 5 and f"{done} of 20 prompts are answered; --resume continues" in err
    assert trirun(*options, "--resume")[0] == 0
    assert [entry["prompt"] for entry in lines(out)] == [f"Prompt {i}" for i in range(20)]


@pytest.mark.parametrize("option", [("--batch", 4), ("--overwrite",), ("--out", "a.jsonl"), ("--resume",)])
def test_options_of_many_prompts_go_with_no_single_one(trirun, packed, option):
    code, out, err = trirun("generate", "-c", packed, "-p", "x", *option)
    assert code == 2 and out == "" and "belong to --prompts-file" in err


def test_a_refusal_is_no_answer_to_be_kept(trirun, packed, prompts_file, tmp_path, monkeypatch):
    out = tmp_path / "answers.jsonl"
    options = ("generate", "-c", packed, "--prompts-file", prompts_file, "--out", out, *SAMPLED)
    assert trirun(*options)[0] == 1
    before = lines(out)
    code, _, err = trirun(*options, "--resume")
    assert code == 1 and "5 of 6 prompts are answered already" in err and "1 of 6 prompts were refused" in err
    assert lines(out) == before
    monkeypatch.setattr("trirun_cli.text.detokenizer.token_ids", lambda *args, **kwargs: [5, 6, 7])
    assert trirun(*options, "--resume")[0] == 0
    after = lines(out)
    assert after[3]["text"] and after[:3] + after[4:] == before[:3] + before[4:] and len(after) == 6
    code, _, err = trirun(*options, "--resume")
    assert code == 0 and "6 of 6" in err and [file.name for file in tmp_path.glob("*answers*")] == [out.name]


def test_answers_of_another_model_or_precision_are_not_taken_up(trirun, packed, copy_of, tmp_path):
    model, out = copy_of(packed), tmp_path / "answers.jsonl"
    (tmp_path / "prompts.txt").write_text("The sea\n")
    options = ("generate", "-c", model, "--prompts-file", tmp_path / "prompts.txt", "--out", out, "-n", 3, "--resume")
    assert trirun(*options)[0] == trirun(*options, "--batch", 2)[0] == 0
    for other in (("--act-bits", 8), ("--dtype", "bfloat16"), ("--engine", "transformers"), ("--ctx", 64)):
        code, _, err = trirun(*options, *other)
        assert code == 2 and "other settings" in err
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (model / "model.safetensors").write_bytes(data)
    assert trirun(*options)[0] == 2


def test_a_file_without_prompts_is_said_so(trirun, packed, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    code, out, err = trirun("generate", "-c", packed, "--prompts-file", tmp_path / "empty.txt", "--out", tmp_path / "a")
    assert code == 0 and out == "" and "holds no prompt" in err and not (tmp_path / "a").exists()
    # Answers that are to be replaced are, be it by none.
    (tmp_path / "a").write_text("{}\n")
    options = ("--prompts-file", tmp_path / "empty.txt", "--out", tmp_path / "a")
    assert trirun("generate", "-c", packed, *options)[0] == 2 and (tmp_path / "a").exists()
    assert trirun("generate", "-c", packed, *options, "--overwrite")[0] == 0 and not (tmp_path / "a").exists()
