"""POST /v1/completions: what is asked is what is done, and answered in OpenAI's words."""

import asyncio

import pytest

from trirun_cli.engine.sampling import Token
from trirun_cli.server.replies import CompletionReply
from trirun_cli.server.request_group import Delta
from trirun_cli.server.tokenizer import ServerTokenizer

PATH = "/v1/completions"


def test_a_completion(site):
    async def scenario():
        async with site(" was calm") as demo:
            status, answer = await demo.post(PATH, {"model": "demo", "prompt": "The sea", "max_tokens": 30})
            assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "demo"
            assert answer["id"].startswith("cmpl-") and answer["created"] > 1.6e9
            (choice,) = answer["choices"]
            assert choice == {"index": 0, "text": " was calm", "logprobs": None, "finish_reason": "stop"}
            count = len(demo.runner.bound[0].prompt)
            assert answer["usage"]["prompt_tokens"] == count
            assert answer["usage"]["total_tokens"] == count + answer["usage"]["completion_tokens"]

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["The sea", ["The sea"], "ids", "list of ids"])
def test_every_form_of_a_prompt(site, tokenizer, prompt):
    ids = tokenizer("The sea")["input_ids"]
    given = {"ids": ids, "list of ids": [ids]}.get(prompt if isinstance(prompt, str) else "", prompt)

    async def scenario():
        async with site() as demo:
            status, _ = await demo.post(PATH, {"prompt": given})
            assert status == 200 and [request.prompt for request in demo.runner.bound] == [tuple(ids)]

    asyncio.run(scenario())


def test_prompts_and_choices_keep_their_order(site, tokenizer):
    texts = [" one", " two", " three"]

    def script(request):
        number = tokenizer.decode(list(request.prompt))
        return tokenizer(texts[int(number)] + f" seed {request.params.seed}")["input_ids"]

    async def scenario():
        async with site(script) as demo:
            _, answer = await demo.post(PATH, {"prompt": ["0", "1", "2"], "n": 2, "seed": 7, "max_tokens": 40})
            got = [(choice["index"], choice["text"]) for choice in answer["choices"]]
            assert got == [(2 * i + j, f"{texts[i]} seed {7 + j}") for i in range(3) for j in range(2)]
            # A prompt counts once, however many choices it has.
            assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer(str(i))["input_ids"]) for i in range(3))

    asyncio.run(scenario())


def test_every_sampling_field_reaches_the_engine(site):
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "max_tokens": 9,
        "min_tokens": 4,
        "stop": ("end", "over"),
    }

    async def scenario():
        async with site() as demo:
            extra = {"logit_bias": {"5": -100, "6": 1.5}, "stop_token_ids": [9], "logprobs": 2}
            status, _ = await demo.post(PATH, {"prompt": "x", **fields, **extra})
            assert status == 200
            (request,) = demo.runner.bound
            assert {name: getattr(request.params, name) for name in fields} == fields
            assert dict(request.params.logit_bias) == {5: -100, 6: 1.5} and request.params.logprobs == 2
            assert request.stop_ids == {0, 9} and request.params.prompt_logprobs is None
            await demo.post(PATH, {"prompt": "x", "ignore_eos": True, "top_k": -1})
            assert demo.runner.bound[1].stop_ids == frozenset() and demo.runner.bound[1].params.top_k == 0

    asyncio.run(scenario())


def test_defaults_are_openais_or_the_models(site):
    async def scenario():
        async with site() as demo:
            await demo.post(PATH, {"prompt": "x"})
            params = demo.runner.bound[0].params
            assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, 16)
        async with site(defaults={"temperature": 0.6, "top_k": 20}) as demo:
            await demo.post(PATH, {"prompt": "x"})
            await demo.post(PATH, {"prompt": "x", "temperature": 0})
            first, second = (request.params for request in demo.runner.bound)
            assert (first.temperature, first.top_k, second.temperature) == (0.6, 20, 0.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limit", "text", "reason"), [(0, "", "length"), (1, " one", "length"), (5, " one two", "stop")]
)
def test_max_tokens(site, limit, text, reason):
    async def scenario():
        async with site(" one two") as demo:
            _, answer = await demo.post(PATH, {"prompt": "x", "max_tokens": limit})
            assert answer["choices"][0]["text"] == text and answer["choices"][0]["finish_reason"] == reason
            chunks = await demo.stream(PATH, {"prompt": "x", "max_tokens": limit})
            assert "".join(c["choices"][0]["text"] for c in chunks) == text
            assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == reason

    asyncio.run(scenario())


def test_echo_and_logprobs(site, tokenizer):
    """What lm-eval asks for: the prompt's own log-probabilities, and where its tokens are in the text."""
    prompt, new = tokenizer("naïve 日本")["input_ids"], tokenizer(" é")["input_ids"]

    async def scenario():
        async with site(lambda request: new) as demo:
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 20}
            _, answer = await demo.post(PATH, body)
            (choice,) = answer["choices"]
            scores = choice["logprobs"]
            ids = prompt + new
            assert choice["text"] == "naïve 日本 é"
            assert len(scores["tokens"]) == len(scores["text_offset"]) == len(scores["top_logprobs"]) == len(ids)
            assert scores["token_logprobs"] == [None] + [-(token % 7) - 0.5 for token in ids[1:]]
            assert scores["top_logprobs"][0] is None
            for logprob, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
                assert max(top.values()) == logprob and len(top) <= 3
            # Parts of a character are shown as bytes; the offsets count whole characters.
            whole = b"".join(as_bytes(token) for token in scores["tokens"]).decode()
            assert whole == choice["text"]
            assert scores["text_offset"][0] == 0 and scores["text_offset"] == sorted(scores["text_offset"])
            assert scores["text_offset"][len(prompt)] == len("naïve 日本")
            # The same streamed: the pieces put together.
            chunks = [chunk["choices"][0] for chunk in await demo.stream(PATH, body)]
            assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
            for name, values in scores.items():
                assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values
            _, scored = await demo.post(PATH, body | {"max_tokens": 0})
            assert scored["choices"][0]["text"] == "naïve 日本"
            assert scored["choices"][0]["logprobs"]["token_logprobs"] == scores["token_logprobs"][: len(prompt)]
            _, plain = await demo.post(PATH, {"prompt": "naïve", "echo": True, "max_tokens": 3})
            assert plain["choices"][0]["text"] == "naïve é" and plain["choices"][0]["logprobs"] is None

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["the sea", " the sea"])
def test_offsets_leave_out_what_the_tokenizer_adds_to_a_prompt(text):
    """A BOS token, and the space before the first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {piece: id for id, piece in enumerate(["<s>", "▁", "▁the", "▁sea", "▁was"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.add_special_tokens(["<s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    served = ServerTokenizer(tokenizer, size=5, context=64)
    ids = tokenizer(text)["input_ids"]

    def offsets(echo):
        reply = CompletionReply("m", served, logprobs=True, token_ids=False, echoes=[echo])
        chunk = reply.chunk(Delta(0, " was", [Token(4, -1.0)], [Token(ids[0]), *(Token(id, -1.0) for id in ids[1:])]))
        (choice,) = chunk["choices"]
        return choice["text"], dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))

    start = len(text) - len("the sea")
    assert offsets(text) == (f"{text} was", {"<s>": 0, " the": 0, " sea": start + 3, " was": start + 7})
    # Where the text has it, as that of a prompt of ids, it counts.
    assert offsets("<s> the sea") == ("<s> the sea was", {"<s>": 0, " the": 3, " sea": 7, " was": 11})


def as_bytes(token):
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:])


def test_streams_whole_characters_and_ends_with_usage(site, tokenizer):
    text = " naïve 🙂👩‍👩‍👧 日本"

    async def scenario():
        async with site(text) as demo:
            chunks = await demo.stream(
                PATH, {"prompt": "x", "max_tokens": 60, "stream_options": {"include_usage": True}}
            )
            *parts, last = chunks
            assert "".join(part["choices"][0]["text"] for part in parts) == text
            assert not any("\ufffd" in part["choices"][0]["text"] for part in parts)
            assert all(part["usage"] is None for part in parts) and len({part["id"] for part in chunks}) == 1
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(tokenizer(text)["input_ids"])
            plain = await demo.stream(PATH, {"prompt": "x", "max_tokens": 60})
            assert all("usage" not in part for part in plain)
            assert [part["choices"][0]["finish_reason"] for part in plain][-1] == "stop"

    asyncio.run(scenario())


@pytest.mark.parametrize("stop", ["still", "l", "ship lay st", ["nothing", "the ship"], ["ll.", "st"]])
def test_stop_strings_are_never_seen_and_free_their_place(site, stop):
    text = " The sea was calm, and the ship lay still. And on and on it went"
    wanted = min(
        (text[: text.index(one)] for one in ([stop] if isinstance(stop, str) else stop) if one in text), key=len
    )

    async def scenario():
        async with site(text) as demo:
            body = {"prompt": "x", "max_tokens": 50, "stop": stop}
            _, answer = await demo.post(PATH, body)
            assert answer["choices"][0]["text"] == wanted and answer["choices"][0]["finish_reason"] == "stop"
            chunks = [chunk["choices"][0] for chunk in await demo.stream(PATH, body)]
            assert "".join(chunk["text"] for chunk in chunks) == wanted and chunks[-1]["finish_reason"] == "stop"
            await demo.idle()

    asyncio.run(scenario())


def test_token_ids_on_request(site, tokenizer):
    ids = tokenizer(" was calm")["input_ids"]

    async def scenario():
        async with site(" was calm") as demo:
            body = {"prompt": "x", "return_token_ids": True}
            _, answer = await demo.post(PATH, body)
            assert answer["choices"][0]["token_ids"] == ids
            chunks = await demo.stream(PATH, body)
            assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == ids

    asyncio.run(scenario())


def test_an_empty_prompt_begins_with_the_beginning_of_text(site):
    async def scenario():
        async with site() as demo:
            status, _ = await demo.post(PATH, {"prompt": ""})
            assert status == 200 and demo.runner.bound[0].prompt == (0,)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_is_part_of_the_output_where_asked(site, stream):
    async def scenario():
        async with site(" the sea was calm and on it went") as demo:
            for include, expected in ((None, " the sea was"), (False, " the sea was"), (True, " the sea was calm an")):
                body = {"prompt": "x", "stop": [" calm an", "nowhere"], "include_stop_str_in_output": include}
                if stream:
                    choices = [choice for event in await demo.stream(PATH, body) for choice in event["choices"]]
                else:
                    choices = (await demo.post(PATH, body))[1]["choices"]
                assert "".join(choice["text"] for choice in choices) == expected
                assert choices[-1]["finish_reason"] == "stop"

    asyncio.run(scenario())
