"""Both engines against the reference: several requests at once get the tokens that transformers gives each alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.small_models import FAMILIES, SIZES, open_engine, save_ternary
from trirun_cli.backends.registry import open_runner
from trirun_cli.checkpoint.model_dir import read_config
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.errors import InputError
from trirun_cli.models.description import decoder_shape

OTHERS = {
    "gpt_neox": {},
    "mistral": {"head_dim": 16, "sliding_window": 16},
    "lfm2": {"full_attn_idxs": [1], "block_multiple_of": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2, "n_groups": 1},
}
LENGTHS, TOKENS = (3, 40, 17, 1, 60), 12


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy(engine, tokens=TOKENS, start=0, **params):
    """Greedy tokens of every prompt, and the log-probabilities of the prompts, run together."""
    requests = [
        Request(str(start + i), tuple(prompt), SamplingParams(max_tokens=tokens, prompt_logprobs=0, **params))
        for i, prompt in enumerate(prompts())
    ]
    found, scores = [[] for _ in requests], [() for _ in requests]
    for event in engine.generate(requests):
        found[int(event.request_id) - start] += [token.id for token in event.tokens]
        scores[int(event.request_id) - start] += event.prompt_logprobs or ()
    return found, scores


def check(model, found, scores):
    """Every token is the reference's likeliest one, or as likely but for rounding, after the same tokens."""
    for prompt, tokens, score in zip(prompts(), found, scores, strict=True):
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0].float()
        written = logits[len(prompt) - 1 :]
        chosen = written.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        assert (written.amax(-1) - chosen).max() < 2e-2 * written.std()
        assert (written.argmax(-1) == torch.tensor(tokens)).float().mean() > 0.9
        expected = logits[: len(prompt) - 1].log_softmax(-1)
        for row, token in zip(expected, score[1:], strict=True):
            assert token.logprob == pytest.approx(row[token.id].item(), abs=5e-2)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_models(name, tmp_path):
    """Three sequences at a time, prompts in pieces, slots that others had, windows that end within them."""
    run_packed(name, "native", tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3", "bitnet"])
def test_packed_models_in_transformers(name, tmp_path):
    run_packed(name, "transformers", tmp_path)


def run_packed(name, engine, out):
    model, _, packed = save_ternary(name.split(",")[0], FAMILIES[name], out)
    runner = open_engine(packed, device="cpu", engine=engine, slots=3, exact=engine == "native")
    assert engine in runner.name
    found, scores = greedy(runner)
    check(model, found, scores)
    # Once more, from slots that hold other sequences, and with prompts that are partly in the cache.
    again, _ = greedy(runner)
    assert again == found
    half = [prompt + tokens[:5] for prompt, tokens in zip(prompts(), found, strict=True)]
    requests = [Request(str(i), tuple(prompt), SamplingParams(max_tokens=7)) for i, prompt in enumerate(half)]
    rest = [[] for _ in half]
    for event in runner.generate(requests):
        rest[int(event.request_id)] += [token.id for token in event.tokens]
    assert rest == [tokens[5:] for tokens in found]
    # Where a window has moved on, or a state, the beginning of a prompt is no longer in the cache.
    shape = decoder_shape(read_config(packed))
    if not any(shape.windows) and not shape.deltas:
        assert runner.stats.reused_tokens > 0


@pytest.mark.parametrize("family", OTHERS)
def test_other_models(family, tmp_path):
    torch.manual_seed(0)
    shape = SIZES | OTHERS[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
    model.get_input_embeddings().weight.data.normal_()
    model.save_pretrained(tmp_path / "model")
    runner = open_engine(tmp_path / "model", device="cpu", slots=2)
    assert "transformers" in runner.name
    found, scores = greedy(runner)
    check(model, found, scores)
    assert greedy(runner)[0] == found


@pytest.mark.slow
def test_compiled_models_write_the_same(tmp_path, monkeypatch):
    """The graph is captured and run as torch's own operators: compiling them is the compiler's affair, and slow."""
    family, compiled = next(iter(OTHERS)), []

    def compiler(module, dynamic):
        compiled.append(module)
        return real(module, dynamic=dynamic, backend="eager")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compiler)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | OTHERS[family]))).save_pretrained(tmp_path)
    plain, through = (open_engine(tmp_path, device="cpu", slots=2, compiled=way, tf32=way) for way in (False, True))
    assert greedy(through)[0] == greedy(plain)[0]
    assert len(compiled) == 1


def test_longrope_ends_at_the_length_of_its_first_training(tmp_path):
    """With more tokens transformers turns the keys by other angles than those in the cache."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)], "rope_theta": 1e4}
    rotary = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 60}
    config = AutoConfig.for_model("llama", **(SIZES | {"num_hidden_layers": 1, "rope_parameters": rotary}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert open_engine(tmp_path, device="cpu", slots=1).context == 60
    assert open_engine(tmp_path, device="cpu", slots=1, context=50).context == 50
    with pytest.raises(InputError, match=r"--ctx 61: transformers runs the model on up to 60 tokens \(with LongRoPE"):
        open_engine(tmp_path, device="cpu", slots=1, context=61)
    assert open_runner(tmp_path, device="cpu", scoring=True).context == 60


@pytest.mark.parametrize("family", ["lfm2", "jamba", "mamba", "mamba2", "mistral"])
def test_a_prompt_in_pieces_is_the_prompt(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | OTHERS[family])).eval()
    model.save_pretrained(tmp_path)
    runner = open_runner(tmp_path, device="cpu", slots=1, engine="transformers")
    tokens = prompts()[4]
    pieces = [runner.logits(0, start, tokens[start : start + 25], 25) for start in (0, 25, 50)]
    with torch.inference_mode():
        torch.testing.assert_close(torch.cat(pieces), model(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=1e-3)


def test_models_without_a_cache_are_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", **SIZES))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="OpenAIGPTLMHeadModel has no cache of its past"):
        open_engine(tmp_path / "model", device="cpu")
    # Its state is in its layers: one for all sequences.
    three = SIZES | {"head_dim": 16, "num_hidden_layers": 3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("recurrent_gemma", **three))
    model.save_pretrained(tmp_path / "recurrent")
    with pytest.raises(InputError, match="RecurrentGemmaForCausalLM gives back no cache of its past"):
        open_engine(tmp_path / "recurrent", device="cpu")


def test_a_model_that_transformers_does_not_run_with_a_cache_is_one_line(tmp_path):
    sizes = {"layer_types": ["linear_attention"] * 2, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": 32}
    sizes |= {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 4}
    config = AutoConfig.for_model("kimi_linear", **SIZES | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="does not run this KimiLinearForCausalLM with a cache: ValueError: "):
        open_engine(tmp_path, device="cpu")
