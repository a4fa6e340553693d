"""Streaming text and stop strings: what is shown, and when."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from trirun_cli.text.detokenizer import Detokenizer, load_tokenizer


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
@pytest.mark.parametrize("burst", [1, 2, 5, 100])
def test_streaming_gives_the_same_text_in_whole_characters(tokenizer, text, burst):
    prompt, ids = tokenizer("Say: ")["input_ids"], tokenizer(text)["input_ids"]
    stream = Detokenizer(tokenizer, prompt)
    bursts = [ids[first : first + burst] for first in range(0, len(ids), burst)]
    pieces = [*map(stream.extend, bursts), stream.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("burst", [1, 100])
def test_a_character_that_the_prompt_left_unfinished(tokenizer, burst):
    ids = tokenizer("a🙂 b")["input_ids"]
    for cut in range(1, len(ids)):
        stream = Detokenizer(tokenizer, ids[:cut])
        rest = [ids[first : first + burst] for first in range(cut, len(ids), burst)]
        text = "".join([*map(stream.extend, rest), stream.flush()])
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert before + text == "a🙂 b"
    # One that is written there is not.
    prompt = tokenizer("a\ufffd")["input_ids"]
    stream = Detokenizer(tokenizer, prompt)
    assert "".join(map(stream.push, tokenizer("b")["input_ids"])) == "b"


@pytest.mark.parametrize("burst", [1, 7])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_are_no_characters_hide_none(tokenizer, burst, seed):
    pieces = {piece: id for piece, id in tokenizer.get_vocab().items() if len(piece) == 1 and not piece.isascii()}
    ids = random.Random(seed).choices(sorted(pieces.values()), k=3000)
    stream = Detokenizer(tokenizer, tokenizer("a")["input_ids"])
    bursts = [ids[first : first + burst] for first in range(0, len(ids), burst)]
    assert "".join([*map(stream.extend, bursts), stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("burst", [1, 7])
@pytest.mark.parametrize("start", [9, 13, 15, 18])
def test_characters_of_a_token_for_every_byte(burst, start):
    """Where a run of bytes is decoded as a whole or not at all, it must not begin within a character."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = "日本語🙂é" * 20
    ids = [byte + 1 for byte in text.encode()]
    stream = Detokenizer(backend, ids[:start])
    bursts = [ids[first : first + burst] for first in range(start, len(ids), burst)]
    shown = "".join([*map(stream.extend, bursts), stream.flush()])
    assert shown == text[len(text.encode()[:start].decode()) :]


def test_a_character_that_never_completes_is_still_shown(tokenizer):
    ids = tokenizer("a🙂")["input_ids"][:-1]
    stream = Detokenizer(tokenizer, [])
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]).startswith("a")


@pytest.mark.parametrize("stop", ["still", "l", "ship lay st", "the ship", "ll."])
@pytest.mark.parametrize("burst", [1, 4])
def test_stop_strings_across_token_borders(tokenizer, stop, burst):
    text = "The sea was calm, and the ship lay still."
    stream, shown = Detokenizer(tokenizer, [], (stop, "never this")), ""
    ids = tokenizer(text)["input_ids"]
    for first in range(0, len(ids), burst):
        shown += stream.extend(ids[first : first + burst])
        assert stop not in shown
        if stream.stopped:
            break
    assert stream.stopped and shown + stream.flush() == text[: text.index(stop)]


@pytest.mark.parametrize("burst", [1, 4])
def test_the_first_tokens_are_not_searched_for_stop_strings(tokenizer, burst):
    text = "one two one two one two"
    ids = tokenizer(text)["input_ids"]
    fewest = len(tokenizer("one two one")["input_ids"])
    stream = Detokenizer(tokenizer, [], ("two",), min_tokens=fewest)
    shown = "".join(stream.take(ids[first : first + burst]).text for first in range(0, len(ids), burst))
    assert stream.stopped and shown == "one two one "
    stream = Detokenizer(tokenizer, [], ("two",), min_tokens=len(ids))
    assert stream.take(ids, last=True).text == text and not stream.stopped


def test_an_unfinished_stop_string_is_released_at_the_end(tokenizer):
    stream = Detokenizer(tokenizer, [], ("still going",))
    ids = tokenizer("it lay still")["input_ids"]
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == "it lay still"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("burst", [1, 4, 100])
def test_tokens_after_a_stop_string_are_not_of_the_answer(tokenizer, include, burst):
    text, stop = "The sea was calm, and the ship lay still.", "ship lay st"
    ids = tokenizer(text)["input_ids"]
    detokenizer = Detokenizer(tokenizer, [], ("never this", stop), include_stop=include)
    shown, kept = "", []
    for first in range(0, len(ids), burst):
        new = ids[first : first + burst]
        piece, count = detokenizer.take(new, last=first + burst >= len(ids))
        shown, kept = shown + piece, kept + new[:count]
        assert count == len(new) or detokenizer.stopped
    assert detokenizer.stopped and shown == text[: text.index(stop) + (len(stop) if include else 0)]
    # The last token that counts is the one that completes it.
    assert stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])


def test_of_several_stop_strings_the_first_in_the_text_ends_it(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], ("still", "calm"))
    text, count = detokenizer.take(tokenizer("The sea was calm, it lay still")["input_ids"], last=True)
    assert text == "The sea was " and count < 10 and detokenizer.take([5, 6], last=True) == ("", 0)
