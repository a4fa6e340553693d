"""How many sequences run at once by default, on described devices."""

import json

import pytest

from trirun_cli.backends.capacity import CpuDevice, GpuDevice, ModelNeeds, default_slots
from trirun_cli.backends.registry import open_runner

GIB = 2**30
# Bytes of a token's cache: keys and values, 16 bits, layers × heads × head size.
LLAMA_2_7B = ModelNeeds(2 * 2 * 32 * 32 * 128, context=4096, vocab=32000)
LLAMA_3_8B = ModelNeeds(2 * 2 * 32 * 8 * 128, context=8192, vocab=128256)
SMALL = ModelNeeds(2 * 2 * 8 * 4 * 64, context=1024, vocab=8192)


@pytest.mark.parametrize(
    ("free_gib", "model", "least", "most"),
    [
        # An H200, an A100, an L4 and a GPU of a laptop, each with 2-bit weights already there.
        (137, LLAMA_2_7B, 256, 256),
        (137, LLAMA_3_8B, 256, 256),
        (77, LLAMA_2_7B, 200, 256),
        (20, LLAMA_2_7B, 60, 70),
        (20, LLAMA_3_8B, 200, 256),
        (5, LLAMA_2_7B, 10, 20),
        (5, SMALL, 256, 256),
        (0.1, LLAMA_2_7B, 1, 1),
        (0, LLAMA_3_8B, 1, 1),
    ],
)
def test_a_gpu_takes_as_many_as_its_cache_has_room_for(free_gib, model, least, most):
    number, reason = default_slots(GpuDevice(int(free_gib * GIB)), model)
    assert least <= number <= most and "room for" in reason and ("most by default" in reason) == (number == 256)


def test_int8_keys_and_values_give_room_for_more():
    half = ModelNeeds(LLAMA_2_7B.token_bytes // 2, LLAMA_2_7B.context, LLAMA_2_7B.vocab)
    assert default_slots(GpuDevice(20 * GIB), half).number > 1.9 * default_slots(GpuDevice(20 * GIB), LLAMA_2_7B).number


@pytest.mark.parametrize(
    ("free_gib", "threads", "model", "expected"),
    [
        # All of its context for everybody, whatever the threads.
        (64, 2, SMALL, 64),
        (64, 64, SMALL, 64),
        (0.375, 2, SMALL, 24),
        (0.25, 2, SMALL, 16),
        # 1 GiB a sequence of its whole context, of which 16 and more would have less.
        (24, 2, LLAMA_3_8B, 16),
        (24, 8, LLAMA_3_8B, 32),
        # 1 GiB a sequence of 2048 tokens.
        (64, 64, LLAMA_2_7B, 32),
        (16, 8, LLAMA_2_7B, 8),
        (1, 8, LLAMA_2_7B, 1),
        (0, 8, LLAMA_2_7B, 1),
    ],
)
def test_a_cpu_takes_as_many_as_its_threads_and_memory_allow(free_gib, threads, model, expected):
    number, reason = default_slots(CpuDevice(int(free_gib * GIB), threads), model)
    assert number == expected
    assert ("half of the free memory" in reason) == (model is LLAMA_2_7B)
    assert ("room for" in reason) == (model is LLAMA_2_7B or (model is SMALL and number != 16))


def test_a_context_that_the_user_chose_is_held_whole_on_a_cpu():
    chosen = ModelNeeds(LLAMA_2_7B.token_bytes, context=4096, vocab=32000, fixed_context=True)
    assert default_slots(CpuDevice(16 * GIB, 8), chosen).number == 4


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_runner_says_why_it_has_its_slots(packed, engine):
    by_default = open_runner(packed, device="cpu", engine=engine, slots=None, threads=1)
    assert by_default.slots == (64 if engine == "native" else 16) and by_default.why_slots
    chosen = open_runner(packed, device="cpu", engine=engine, slots=3)
    assert chosen.slots == 3 and not chosen.why_slots


def test_little_memory_gives_fewer_slots_and_not_shorter_ones(packed, monkeypatch):
    from trirun_cli.engine import cache_memory

    config = json.loads((packed / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = -(-(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 16) * 16
    token = 2 * 2 * config["num_hidden_layers"] * heads * head
    context = config["max_position_embeddings"]
    monkeypatch.setattr(cache_memory, "available_bytes", lambda: int(2 * 5.5 * token * context))
    runner = open_runner(packed, device="cpu", slots=None)
    assert (runner.slots, runner.context) == (5, context) and "half of the free memory" in runner.why_slots
