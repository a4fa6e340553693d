"""``trirun generate`` and what it stands on: streaming text, stop strings."""

import io
import json

import pytest
import torch

from trirun_cli.errors import InputError
from trirun_cli.runtime.generation import GenerationStats, generate_tokens
from trirun_cli.runtime.sampling import SamplingParams
from trirun_cli.runtime.text import TextStream, load_tokenizer


class ScriptedModel:
    """Says the next of its tokens whatever it is told."""

    vocab_size, max_positions, engine = 100, 16, "scripted"

    def __init__(self, script):
        self.script, self.seen = list(script), []

    def reset(self):
        self.seen = []

    def forward(self, tokens, *, last_only=True):
        self.seen.extend(tokens.tolist())
        logits = torch.zeros(1, self.vocab_size)
        logits[0, self.script.pop(0)] = 1
        return logits


def run(model, prompt, **params):
    stats = GenerationStats()
    tokens = list(generate_tokens(model, prompt, SamplingParams(**params), {99}, stats))
    return tokens, stats


def test_stops_at_the_end_token_and_reports_why():
    tokens, stats = run(ScriptedModel([5, 6, 99, 7]), [1, 2])
    assert tokens == [5, 6] and stats.finish_reason == "stop" and stats.prompt_tokens == 2
    tokens, stats = run(ScriptedModel([5, 6, 7]), [1], max_tokens=2)
    assert tokens == [5, 6] and stats.finish_reason == "length"
    assert run(ScriptedModel([5]), [1], max_tokens=0)[0] == []
    assert run(ScriptedModel([5]), [1], max_tokens=1)[0] == [5]


def test_the_context_is_the_limit():
    model = ScriptedModel([5] * 20)
    tokens, stats = run(model, [1] * 14, max_tokens=50)
    assert len(tokens) == 2 and stats.finish_reason == "length" and len(model.seen) <= 16
    with pytest.raises(InputError, match="the prompt has 17 tokens, the model's context is 16"):
        run(model, [1] * 17)
    with pytest.raises(InputError, match="token id 100 is outside"):
        run(model, [100])


@pytest.fixture(scope="module")
def tokenizer(plain_model):
    return load_tokenizer(plain_model)


@pytest.mark.parametrize(
    "text",
    [
        "The sea was calm, and the ship lay still.",
        "naïve café — 日本語 🙂👩‍👩‍👧 done",
        "  two  spaces\n\nlines\t",
        "é" * 200,
    ],
)
def test_streaming_gives_the_same_text_in_whole_characters(tokenizer, text):
    prompt, ids = tokenizer("Say: ")["input_ids"], tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_never_completes_is_still_shown(tokenizer):
    ids = tokenizer("a🙂")["input_ids"][:-1]
    stream = TextStream(tokenizer, [])
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]).startswith("a")


@pytest.mark.parametrize("stop", ["still", "l", "ship lay st", "the ship", "ll."])
def test_stop_strings_across_token_borders(tokenizer, stop):
    text = "The sea was calm, and the ship lay still."
    stream, shown = TextStream(tokenizer, [], (stop, "never this")), ""
    for token in tokenizer(text)["input_ids"]:
        shown += stream.push(token)
        assert stop not in shown
        if stream.stopped:
            break
    assert stream.stopped and shown + stream.flush() == text[: text.index(stop)]


def test_an_unfinished_stop_string_is_released_at_the_end(tokenizer):
    stream = TextStream(tokenizer, [], ("still going",))
    ids = tokenizer("it lay still")["input_ids"]
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == "it lay still"


def test_greedy_text_of_packed_and_original_is_the_same(trirun, packed, ternary_model):
    options = ("--prompt", "Once upon a time", "--max-tokens", "12", "--json")
    code, out, _ = trirun("generate", "--checkpoint", packed, *options)
    document = json.loads(out)
    assert code == 0 and document["generated_tokens"] == 12 and document["finish_reason"] == "length"
    _, original, _ = trirun("generate", "--model", ternary_model, *options)
    assert json.loads(original)["text"] == document["text"]


def test_prompt_from_standard_input_and_file(trirun, packed, tmp_path):
    (tmp_path / "prompt.txt").write_text("Once upon a time\n")
    options = ("-c", packed, "-n", "5")
    _, piped, _ = trirun("generate", *options, stdin=io.StringIO("Once upon a time\n"))
    _, filed, _ = trirun("generate", *options, "-f", tmp_path / "prompt.txt")
    _, given, _ = trirun("generate", *options, "-p", "Once upon a time")
    assert piped == filed == given and given.startswith("Once upon a time")


def test_a_seed_repeats_and_stats_are_printed(trirun, packed):
    options = ("generate", "-c", packed, "-p", "The", "-n", "8", "--temperature", "1", "--top-p", "0.95", "--stats")
    texts = {trirun(*options, "--seed", "7")[1] for _ in range(2)}
    assert len(texts) == 1
    _, other, err = trirun(*options, "--seed", "8")
    assert other not in texts and "tokens/s" in err and "first token after" in err


def test_prompt_longer_than_the_context(trirun, packed):
    code, _, err = trirun("generate", "-c", packed, "-p", "word " * 300)
    assert code == 3 and "the model's context is 128" in err
