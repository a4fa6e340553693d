"""The Python API: what ``trirun_cli.LLM`` gives is what the commands write."""

import io
import json
import os
import subprocess
import sys

import pytest

import trirun_cli
from trirun_cli import LLM, Completion, SamplingParams
from trirun_cli.errors import InputError, UsageError

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PROMPTS = ["Once upon a time", "The sea was calm", "a"]


@pytest.fixture(scope="module")
def llm(packed):
    with LLM(packed, device="cpu") as found:
        yield found


@pytest.fixture
def chatty(copy_of, packed):
    model = copy_of(packed)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return model


def command(trirun, *options):
    code, out, err = trirun(*options, "--json", "--device", "cpu")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}])
def test_the_text_is_that_of_generate(trirun, llm, packed, options):
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=12, **options))
    assert [completion.text for completion in found] == [
        completion.text
        for i, prompt in enumerate(PROMPTS)
        for completion in llm.generate(
            prompt, SamplingParams(max_tokens=12, **(options | ({"seed": 7 + i} if options else {})))
        )
    ]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    document = command(trirun, "generate", "-c", packed, "-p", PROMPTS[0], "-n", 12, *given)
    assert found[0].text == document["text"] and len(found[0].token_ids) == document["generated_tokens"] == 12
    assert found[0].finish_reason == document["finish_reason"] == "length"


def test_prompts_of_a_file_get_the_same(trirun, llm, packed, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ("-n", 8, "--temperature", 1, "--seed", 5)
    document = command(trirun, "generate", "-c", packed, "--prompts-file", tmp_path / "prompts.txt", *options)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=1, seed=5))
    assert [completion.text for completion in found] == [answer["text"] for answer in document["answers"]]


def test_token_ids_and_log_probabilities(llm):
    (text,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5))
    ids = list(text.prompt_token_ids)
    assert isinstance(text, Completion) and ids == llm.tokenizer(PROMPTS[0])["input_ids"] and text.logprobs is None
    (scored,) = llm.generate([ids], SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=0))
    assert scored.token_ids == text.token_ids and scored.text == text.text
    assert [token.id for token in scored.logprobs] == list(scored.token_ids)
    assert all(len(token.top) == 2 and token.logprob == token.top[0][1] <= 0 for token in scored.logprobs)
    assert [token.id for token in scored.prompt_logprobs] == ids and scored.prompt_logprobs[0].logprob is None
    assert scored.usage.prompt_tokens == len(ids)


def test_params_of_their_own_and_stop_strings(llm):
    (whole,) = llm.generate("The", SamplingParams(max_tokens=12))
    stop = whole.text[len(whole.text) // 2 :][:5]
    each = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=12, stop=(stop,))]
    short, stopped = llm.generate(["The", "The"], each)
    assert whole.text.startswith(short.text) and len(short.token_ids) == 3
    assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"
    assert llm.generate([]) == [] and len(llm.generate("The")[0].token_ids) > 12
    with pytest.raises(UsageError, match="2 params for 1 prompts"):
        llm.generate(["The"], each)


def test_a_text_has_its_fewest_tokens(llm):
    ends = dict.fromkeys(llm._stop_ids, 100.0)
    (none,) = llm.generate("The", SamplingParams(logit_bias=ends))
    (five,) = llm.generate("The", SamplingParams(logit_bias=ends, min_tokens=5))
    assert not none.token_ids and len(five.token_ids) == 5 and five.finish_reason == "stop"
    assert llm.generate("The", SamplingParams(max_tokens=5))[0].token_ids == five.token_ids


def test_streams_are_the_text(llm):
    (whole,) = llm.generate("The", SamplingParams(max_tokens=20))
    pieces = list(llm.stream("The", SamplingParams(max_tokens=20)))
    assert "".join(pieces) == whole.text
    stop = whole.text[len(whole.text) // 2 :][:5]
    shown = "".join(llm.stream("The", SamplingParams(max_tokens=20, stop=(stop,))))
    assert shown == whole.text[: whole.text.index(stop)]
    # One that is left does not hold its slot, and several run side by side.
    first = llm.stream("The", SamplingParams(max_tokens=20))
    begun = next(first)
    assert "".join(llm.stream("The", SamplingParams(max_tokens=20))) == whole.text
    assert begun + "".join(first) == whole.text
    left = llm.stream("The", SamplingParams(max_tokens=100))
    next(left)
    left.close()
    assert llm.generate("The", SamplingParams(max_tokens=20))[0].text == whole.text
    assert llm._engine.stats.running == llm._engine.stats.waiting == 0


def test_conversations(trirun, chatty):
    asked = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    code, out, err = trirun(
        "chat", "-c", chatty, "--json", "-n", 5, "--system", "Be kind", "--device", "cpu", stdin=io.StringIO("Hello\n")
    )
    assert code == 0, err
    said = json.loads(out)["messages"][-1]["content"]
    with LLM(chatty, device="cpu", max_batch=2) as llm:
        params = SamplingParams(max_tokens=5)
        (one,) = llm.chat(asked, params)
        again, other = llm.chat([asked, asked[1:]], params)
        assert one.text == again.text == said and len(other.prompt_token_ids) < len(one.prompt_token_ids)


def test_what_does_not_fit_is_refused_before_anything_runs(llm, packed):
    with pytest.raises(InputError, match=r"the context is 128 \(--ctx\)"):
        llm.generate(["The", "word " * 300])
    with pytest.raises(InputError, match="token id 9000"):
        llm.stream([9000])
    with pytest.raises(InputError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(UsageError, match="a text or a list of token ids"):
        llm.generate([["a"]])
    for wrong in ({"act_bits": 4}, {"dtype": "int8"}, {"engine": "lean"}, {"max_batch": 0}, {"ctx": 1000}):
        with pytest.raises(UsageError):
            LLM(packed, device="cpu", **wrong)
    with pytest.raises(InputError, match="no such directory"):
        LLM(packed / "nowhere" / "at" / "all")


def test_defaults_are_the_models(copy_of, packed, llm):
    assert llm.default_params == SamplingParams()
    model = copy_of(packed)
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 1, "eos_token_id": 0}')
    with LLM(model, device="cpu", ctx=64) as found:
        assert found.default_params == SamplingParams(temperature=1.0, top_k=1) and found.context == 64
        (greedy,) = llm.generate("The", SamplingParams(max_tokens=60))
        (sampled,) = found.generate("The")
        assert greedy.text.startswith(sampled.text[:20])


def test_models_of_transformers_say_why_they_are_slower(plain_model, llm):
    with LLM(plain_model, device="cpu") as found:
        assert found.name == "transformers on cpu" and "packed checkpoints" in found.why_slower
        assert len(found.generate("The", SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert llm.name.startswith("native decoder on cpu") and llm.why_slower == ""


def test_names_are_found_on_first_use():
    assert {*trirun_cli._PLACES, "__version__"} == {*trirun_cli.__all__}
    assert trirun_cli.load.__name__ == "load" and callable(trirun_cli.pack)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trirun_cli.nothing  # noqa: B018


LIGHT = """
import sys
import trirun_cli
assert [name for name in sys.modules if name.startswith("trirun_cli.")] == ["trirun_cli.version"]
with trirun_cli.LLM(sys.argv[1], device="cpu") as llm:
    print(llm.generate("The", trirun_cli.SamplingParams(max_tokens=3))[0].text)
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


def test_a_packed_model_needs_neither_torch_nor_transformers(packed, llm):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LIGHT, packed], capture_output=True, text=True, env=environment)
    (expected,) = llm.generate("The", SamplingParams(max_tokens=3))
    assert done.returncode == 0 and done.stdout.rstrip("\n") == expected.text.rstrip("\n"), done.stderr
