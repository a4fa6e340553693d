"""The CUDA decoder's kernels against their twins, then whole models against the twin of the decoder."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from trirun_kernels import QuantSpec, cuda_decoder_reference, decoder_reference, pack
from trirun_kernels import cuda_decoder_ops as ops
from trirun_kernels.activations import activation_bytes, int2_gemm_quantized
from trirun_kernels.cuda_decoder import CudaDecoder, Inputs, Segment
from trirun_kernels.cuda_decoder_weights import CudaModel, cuda_layer, fused
from trirun_kernels.decoder_weights import LINEARS, NORMS
from trirun_kernels.native import library_path
from trirun_kernels.packing import dequantize

from tests.kernels.decoder_models import VOCAB, random_model

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or not library_path("cuda").exists(),
    reason="no CUDA device, or libtrirun_cuda.so is not built",
)
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
MODELS = {
    "gqa": {},
    "mha, per channel": {"kv_heads": 4, "spec": QuantSpec(-1, 1.0)},
    "mqa, real zeros": {"kv_heads": 1, "spec": QuantSpec(32, None)},
    "Qwen2: biases": {"bias": True},
    "Qwen3: head norms, head_dim 128": {"qk_norm": True, "head_dim": 128},
    "BitNet: sub-norms, relu2": {"sub_norm": True, "activation": "relu2", "spec": QuantSpec(-1, 1.0)},
    "partial rotation": {"half": 5},
    "fused": {"hidden": 128, "ffn": 256, "spec": QuantSpec(128, 1.0), "kv_heads": 2, "head_dim": 64},
}
ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def error(found, expected):
    assert torch.isfinite(found).all()
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def random_packed(n, k, spec=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = spec or QuantSpec(-1, 1.0)
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, spec.groups(k), generator=generator) + 0.5).mul(k**-0.5).half()
    zeros = torch.rand(n, spec.groups(k), generator=generator).half() if spec.zero is None else None
    return pack(codes, scales, spec, zeros)


def test_structures_have_the_sizes_of_trirun_h():
    assert ctypes.sizeof(ops.SamplerStruct) == ops.SAMPLER_BYTES
    assert ctypes.sizeof(ops.RowsStruct) == 10 * 8 + 5 * 8 + 5 * 4 + 4
    assert ctypes.sizeof(ops.AttentionStruct) == 15 * 8 + 7 * 8 + 6 * 4
    assert ctypes.sizeof(ops.SampleStruct) == 13 * 8 + 4 * 8 + 2 * 4


@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(32, None)])
def test_fused_weights_are_their_rows_one_after_another(spec):
    parts = [random_packed(n, 96, spec, seed) for seed, n in enumerate((128, 64, 70))]
    whole = fused(parts)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))
    assert fused(parts[::-1]) is None, "padding would lie between the outputs"
    assert fused([parts[0], random_packed(64, 96, QuantSpec(-1, 1.5))]) is None
    dense = [torch.randn(4, 8), torch.randn(2, 8)]
    assert torch.equal(fused(dense), torch.cat(dense))


def test_drawn_tokens_have_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.0])
    allowed = cuda_decoder_reference.allowed_tokens(logits, 0.7, top_k=4, top_p=0.95)
    assert allowed.tolist() == [False, True, False, False, True]
    draws = [cuda_decoder_reference.drawn_token(logits, allowed, 0.7, 5, i)[0] for i in range(2000)]
    expected = (logits / 0.7).exp()[[1, 4]]
    assert abs(draws.count(4) / 2000 - (expected[1] / expected.sum()).item()) < 0.02


# ---- rows ----------------------------------------------------------------------------------------------------


@gpu
@BOTH
@pytest.mark.parametrize("n", [96, 512, 4096, 6912, 14336])
@pytest.mark.parametrize("normed", [False, True])
def test_rows(n, dtype, normed):
    generator = torch.Generator(device="cuda").manual_seed(n)

    def draw(*shape, kind=dtype):
        return torch.randn(*shape, device="cuda", generator=generator).to(kind)

    w = random_packed(64, n).to("cuda")
    for m in (1, 2, 3, 16, 33, 300):
        wide = draw(m, 2 * n)
        table = draw(50, n)
        tokens = torch.randint(-1, 50, (m,), device="cuda", dtype=torch.int32)
        slots = torch.arange(m, device="cuda", dtype=torch.int32)
        latest = torch.randint(0, 50, (m,), device="cuda", dtype=torch.int32)
        norm = draw(n, kind=torch.float32).abs() if normed else None
        cases = [
            (ops.RESIDUAL, draw(m, n), {"residual": draw(m, n, kind=torch.float32) * 100}),
            (ops.RESIDUAL, None, {"residual": draw(m, n, kind=torch.float32)}),
            (ops.EMBED, table, {"residual": torch.full((m, n), float("nan"), device="cuda")}),
            (ops.GATE, wide[:, :n], {"up": wide[:, n:]}),
            (ops.GATE, wide[:, :n], {"up": wide[:, n:], "activation": "relu2"}),
            (ops.PLAIN, wide[:, n:], {}),
        ]
        for source, x, options in cases:
            shared = {"norm": norm, "eps": 1e-5}
            if source == ops.EMBED:
                shared |= {"tokens": tokens, "slots": slots, "latest": latest}
            expected, residual = cuda_decoder_reference.rows(source, x, **options, **shared)
            for act_bits in (16, 8) if m <= 128 else (None,):
                y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
                if act_bits is None:
                    kept = {name: v.clone() if name == "residual" else v for name, v in options.items()}
                    ops.rows(source, x, y=y, **kept, **shared)
                    assert error(y, expected) < ROUNDING[dtype], (m, source)
                    continue
                bytes_ = activation_bytes(m, -(-n // 128) * 128, act_bits)
                digits = torch.full((bytes_,), 255, device="cuda", dtype=torch.uint8)
                kept = {name: v.clone() if name == "residual" else v for name, v in options.items()}
                ops.rows(source, x, y=y, digits=digits, act_bits=act_bits, **kept, **shared)
                assert error(y, expected) < ROUNDING[dtype], (m, source)
                if residual is not None:
                    assert torch.equal(kept["residual"], residual)
                if act_bits == 8:
                    scale = expected.abs().amax(1, keepdim=True).clamp(min=1e-5) / 127
                    rounded = (expected / scale).round().clamp(-128, 127) * scale
                else:
                    rounded = expected
                product = int2_gemm_quantized(digits, m, w, act_bits=act_bits, dtype=torch.float32)
                exact = rounded.double() @ dequantize(w, torch.float32).double().T
                # A digit that falls on the other side of a tie is one 127th of the row's largest value.
                assert error(product, exact) < (3e-4 if act_bits == 16 else 6e-3), (m, source, act_bits)


# ---- attention -----------------------------------------------------------------------------------------------


def attention_case(dtype, heads, kv_heads, head_dim, lengths, *, half=None, normed=False, seed=0):
    """(q, k, v, Heads, Cache, slots, positions): slot i holds ``lengths[i]`` tokens in scattered pages; whatever no
    token has written is NaN. A length of None is a row without a slot."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape, kind=dtype):
        return torch.randn(*shape, device="cuda", generator=generator).to(kind)

    m, half = len(lengths), head_dim // 2 if half is None else half
    blocks = max(length or 0 for length in lengths) // ops.PAGE + 1
    pages = torch.randperm(m * blocks, device="cuda", generator=generator).int().view(m, blocks)
    keys = torch.full((m * blocks, kv_heads, ops.PAGE, head_dim), float("nan"), device="cuda", dtype=dtype)
    values = keys.clone()
    for slot, length in enumerate(lengths):
        for position in range(0, length or 0, ops.PAGE):
            count, page = min(ops.PAGE, length - position), pages[slot, position // ops.PAGE]
            keys[page, :, :count], values[page, :, :count] = draw(2, kv_heads, count, head_dim)
    angles = torch.rand(blocks * ops.PAGE, half, device="cuda", generator=generator) * 6
    norms = [draw(head_dim, kind=torch.float32) if normed else None for _ in range(2)]
    sizes = heads, kv_heads, head_dim, head_dim**-0.5, 1e-5
    qkv = draw(m, (heads + 2 * kv_heads) * head_dim)
    q, k, v = qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), 1)
    order = torch.randperm(m, device="cuda", generator=generator).int()
    length_of = torch.tensor([length or 0 for length in lengths], device="cuda", dtype=torch.int32)
    padding = torch.tensor([length is None for length in lengths], device="cuda")
    slots = torch.where(padding[order.long()], -1, order).int()
    cache = ops.Cache(keys, values, pages)
    return q, k, v, ops.Heads(*sizes, angles.cos(), angles.sin(), *norms), cache, slots, length_of[order.long()]


ATTENTION = [
    (1, 1, 128, {}), (4, 2, 24, {}), (32, 32, 128, {}), (32, 8, 128, {"normed": True}), (16, 2, 64, {}),
    (12, 1, 128, {}), (6, 2, 96, {"half": 20}), (8, 4, 256, {"normed": True}), (5, 1, 8, {"half": 3}),
    (20, 5, 128, {}), (24, 2, 80, {}),
]  # fmt: skip


@gpu
@BOTH
@pytest.mark.parametrize("heads, kv_heads, head_dim, options", ATTENTION)
def test_attention(heads, kv_heads, head_dim, options, dtype):
    lengths = [0, 1, None, 15, 16, 17, 63, 64, 65, 200, 700]
    q, k, v, facts, cache, slots, positions = attention_case(dtype, heads, kv_heads, head_dim, lengths, **options)
    wide_q, wide_k = cuda_decoder_reference.prepared_heads(q, k, facts, positions)
    wide_v = v.reshape(v.shape[0], kv_heads, head_dim)
    after = cuda_decoder_reference.append(wide_k, wide_v, cache, slots, positions)
    expected = cuda_decoder_reference.attend(wide_q, facts, after, slots, positions)
    for splits in (1, 3, 8):
        own = ops.Cache(cache.keys.clone(), cache.values.clone(), cache.block_tables)
        workspace = ops.attention_workspace(len(lengths), facts, splits, q.device)
        results = []
        # Twice over one workspace: the first call must leave it fit for the second.
        for _ in range(2):
            y = torch.full_like(q, float("nan")).contiguous()
            ops.attention_decode(q, k, v, y, facts, own, slots, positions, splits, workspace)
            results.append(y[slots >= 0])
        assert torch.equal(*results)
        assert error(results[0], expected[slots >= 0]) < 2 * ROUNDING[dtype], splits
        assert torch.equal(own.values.nan_to_num(7), after.values.nan_to_num(7))
        close = (own.keys.float() - after.keys.float()).abs() <= 4 * ROUNDING[dtype] * after.keys.float().abs()
        assert (close | (own.keys.isnan() & after.keys.isnan()) | (after.keys.abs() < 1e-2)).all()
        if ops.attention_makes_digits(facts):
            m, n = q.shape
            w = random_packed(64, n).to("cuda")
            digits = torch.full((activation_bytes(m, n, 16),), 255, device="cuda", dtype=torch.uint8)
            own = ops.Cache(cache.keys.clone(), cache.values.clone(), cache.block_tables)
            ops.attention_decode(q, k, v, None, facts, own, slots, positions, splits, workspace, digits=digits)
            product = int2_gemm_quantized(digits, m, w, dtype=torch.float32)
            exact = expected.double() @ dequantize(w, torch.float32).double().T
            assert error(product[slots >= 0], exact[slots >= 0]) < 2 * ROUNDING[dtype]
            assert (product[slots < 0] == 0).all()
    # The two halves, one after the other, are the same step.
    own = ops.Cache(cache.keys.clone(), cache.values.clone(), cache.block_tables)
    rotated = torch.zeros_like(q).contiguous()
    ops.attention_append(q, k, v, rotated, facts, own, slots, positions)
    live = slots >= 0
    assert error(rotated[live], wide_q.flatten(1)[live]) < ROUNDING[dtype]
    assert torch.equal(own.values.nan_to_num(7), after.values.nan_to_num(7))


# ---- sampling ------------------------------------------------------------------------------------------------


def sampling_state(slots, vocab, rows, capacity=8):
    def zeros(*shape, dtype=torch.int32):
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    return ops.SamplingState(
        zeros(slots, ops.SAMPLER_BYTES, dtype=torch.uint8), zeros(slots), zeros(slots, vocab), zeros(slots, capacity),
        zeros(slots, capacity, dtype=torch.float32), zeros(rows, vocab, dtype=torch.float32),
    )  # fmt: skip


def bind(state, slot, **fields):
    struct = ops.SamplerStruct(**({"top_p": 1.0, "repetition": 1.0} | fields))
    state.samplers[slot].copy_(torch.frombuffer(bytearray(struct), dtype=torch.uint8))


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [203, 32000])
def test_greedy_tokens_and_what_they_advance(vocab, dtype):
    logits = torch.randn(5, vocab, device="cuda").to(dtype)
    logits[4, 7] = logits[4, 150] = 50
    state = sampling_state(6, vocab, 5)
    slots = torch.tensor([3, 0, -1, 5, 1], device="cuda", dtype=torch.int32)
    for slot in range(6):
        bind(state, slot, wants_logprobs=1)
    sampled = torch.full((5,), -7, device="cuda", dtype=torch.int32)
    positions, tokens = torch.arange(10, 15, device="cuda").int(), torch.full((5,), 99, device="cuda").int()
    wanted = torch.tensor([1, 1, 1, 0, 1], device="cuda", dtype=torch.int32)
    logprobs = torch.zeros(5, device="cuda")
    ops.sample(logits, slots, state, sampled, logprobs=logprobs, wanted=wanted, positions=positions, tokens=tokens)
    best = logits.float().argmax(1).tolist()
    assert sampled.tolist() == [best[0], best[1], -7, -1, 7]
    assert positions.tolist() == [11, 12, 12, 13, 15] and tokens.tolist() == [-1, -1, 99, 99, -1]
    assert state.latest.tolist() == [best[1], 7, 0, best[0], 0, 0]
    expected = logits.float().log_softmax(1)
    for row in (0, 1, 4):
        assert abs(logprobs[row].item() - expected[row, sampled[row].long()].item()) < 1e-3
    assert state.counts.sum().item() == 3 and state.counts[3, best[0]].item() == 1


@gpu
@pytest.mark.parametrize("vocab", [203, 32000])
def test_penalties_and_bias(vocab):
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(1, vocab, device="cuda", generator=generator) * 3
    slots = torch.zeros(1, device="cuda", dtype=torch.int32)
    sampled = torch.zeros(1, device="cuda", dtype=torch.int32)
    for trial in range(20):
        state = sampling_state(1, vocab, 1)
        state.counts[0, torch.randint(vocab, (vocab // 2,), device="cuda")] = trial % 3
        state.counts[0, torch.randint(vocab, (vocab // 4,), device="cuda")] |= ops.PROMPT_TOKEN
        penalties = {"presence": 0.7 * (trial % 2), "frequency": 0.3, "repetition": 1.0 + trial * 0.1}
        bias = {5: 2.0, 17: -100.0, int(logits.argmax()): -float(trial)}
        state.bias_tokens[0, :3] = torch.tensor(list(bias), device="cuda")
        state.bias_values[0, :3] = torch.tensor(list(bias.values()), device="cuda")
        bind(state, 0, bias_count=3, **penalties)
        expected = cuda_decoder_reference.adjusted_logits(logits[0], state.counts[0], bias=bias, **penalties)
        ops.sample(logits, slots, state, sampled)
        assert error(state.work[0], expected) < 1e-6
        assert expected[sampled.item()] >= expected.max() - 1e-5


@gpu
@pytest.mark.parametrize("vocab", [203, 32000, 151936])
def test_draws_are_those_of_the_twin(vocab):
    generator = torch.Generator().manual_seed(vocab)
    slots = torch.tensor([1], device="cuda", dtype=torch.int32)
    sampled, checked = torch.zeros(1, device="cuda", dtype=torch.int32), 0
    settings = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.9, 40, 0.8, 0.02), (2.0, 0, 1.0, 0.1),
                (0.5, 1, 1.0, 0.0), (1.0, 0, 0.001, 0.0)]  # fmt: skip
    for temperature, top_k, top_p, min_p in settings:
        logits = torch.randn(vocab, generator=generator) * 4
        state = sampling_state(2, vocab, 1)
        bind(state, 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=12345 + top_k)
        allowed = cuda_decoder_reference.allowed_tokens(logits, temperature, top_k, top_p, min_p)
        for drawn in range(12):
            token, margin = cuda_decoder_reference.drawn_token(logits, allowed, temperature, 12345 + top_k, drawn)
            ops.sample(logits.cuda().unsqueeze(0), slots, state, sampled)
            if margin > 1e-5:
                assert sampled.item() == token, (temperature, top_k, top_p, min_p, drawn)
                checked += 1
    assert checked > 60


# ---- the decoder ---------------------------------------------------------------------------------------------


def on_gpu(weights, dtype=torch.float16, slots=4, context=192, act_bits=16, **options):
    model = CudaModel.of(weights, "cuda", dtype, act_bits=act_bits)
    decoder = CudaDecoder(model, slots=slots, context=context, **options)
    blocks = decoder.block_tables.shape[1]
    order = torch.randperm(slots * blocks, generator=torch.Generator().manual_seed(0))
    decoder.block_tables.copy_(order.view(slots, blocks))
    return decoder


def run(decoder, parts):
    """One step of [(slot, position, tokens)]: single tokens first. Logits of every row, float32 on the CPU."""
    tokens, slots, positions, segments = [], [], [], []
    for slot, position, piece in parts:
        if len(piece) > 1:
            segments.append(Segment(len(tokens), len(piece), slot, position))
        tokens += piece
        slots += [slot] * len(piece)
        positions += range(position, position + len(piece))
    inputs = Inputs(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (tokens, slots, positions)))
    return decoder.forward(inputs, segments).float().cpu()


def rounded_forward(weights, tokens, act_bits, monkeypatch):
    exact = decoder_reference._linear
    with monkeypatch.context() as patch:
        patch.setattr(
            decoder_reference, "_linear", lambda linear, x, bits: exact(linear, x.half().float(), bits).half().float()
        )
        return decoder_reference.forward(weights, tokens, act_bits=act_bits)


@gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act_bits", [16, 8])
def test_whole_models_against_the_twin(name, act_bits, monkeypatch):
    weights = random_model(**MODELS[name])
    tokens = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(3))
    expected = decoder_reference.forward(weights, tokens, act_bits=act_bits)
    rounded = rounded_forward(weights, tokens, act_bits, monkeypatch)

    def close(found):
        """As far from the twin as the twin itself, its linears' inputs and outputs rounded to 16 bits; of most rows,
        since a softmax between near-equal scores or a digit next to a tie magnifies the last bits of a few."""
        errors = [((x - expected).norm(dim=1) / expected.norm(dim=1)).median() for x in (found, rounded)]
        return torch.isfinite(found).all() and errors[0] < 3 * errors[1] + 3e-4

    for digit_rows in ((1, 32), (3, 16), (1, 0)):
        decoder = on_gpu(weights, act_bits=act_bits, digit_rows=digit_rows)
        ids = tokens.tolist()
        whole = run(decoder, [(1, 0, ids)])
        assert close(whole)
        # In chunks and single tokens, beside other slots.
        pieces = [run(decoder, [(2, 0, ids[:37])])]
        pieces.append(run(decoder, [(1, 50, ids[50:51]), (3, 0, ids[:9]), (2, 37, ids[37:90])])[10:])
        for position in range(90, 100):
            pieces.append(run(decoder, [(2, position, ids[position : position + 1])]))
        assert close(torch.cat(pieces))


@gpu
@BOTH
def test_dense_and_packed_weights_are_the_same_model(dtype):
    weights = random_model(hidden=128, ffn=256)
    model = CudaModel.of(weights, "cuda", dtype)
    assert model.packed and len(model.layers[0].gate_up) == 1
    layers = [
        cuda_layer(
            {name: dequantize(getattr(layer, name).weight) for name in LINEARS}, {},
            {name: getattr(layer, name) for name in NORMS}, "cuda", dtype, 16,
        )
        for layer in weights.layers
    ]  # fmt: skip
    dense = dataclasses.replace(model, layers=layers)
    assert not dense.packed and dense.nbytes > model.nbytes
    ids = torch.arange(50).tolist()
    results = []
    for each in (model, dense):
        decoder = CudaDecoder(each, slots=1, context=64)
        results.append(run(decoder, [(0, 0, ids)]))
    assert error(*results) < 10 * ROUNDING[dtype]


@gpu
def test_captured_steps_repeat_and_go_on_by_themselves():
    weights = random_model()
    decoder = on_gpu(weights)
    ids = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(4)).tolist()
    for slot, prompt in enumerate(ids):
        run(decoder, [(slot, 0, prompt)])
    start = decoder.cache.clone()
    state = sampling_state(4, VOCAB, 4)
    for slot in range(4):
        bind(state, slot)
    static = Inputs(*(torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(3)))
    sampled = torch.zeros(4, dtype=torch.int32, device="cuda")

    def step():
        logits = decoder.forward(static)
        ops.sample(logits, static.slots, state, sampled, positions=static.positions, tokens=static.tokens)

    def begin():
        decoder.cache.copy_(start)
        static.tokens.copy_(torch.tensor([5, 6, 7, 0]))
        static.slots.copy_(torch.tensor([0, 1, 2, -1]))
        static.positions.copy_(torch.tensor([20, 20, 20, 0]))

    def roll(advance):
        begin()
        out = []
        for _ in range(40):
            advance()
            out.append(sampled[:3].tolist())
        return out

    decoder.latest = state.latest
    plain = roll(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert roll(graph.replay) == plain
    assert roll(graph.replay) == plain
    # Against the twin, teacher-forced on what the graph chose.
    for slot in range(3):
        text = ids[slot] + [5 + slot] + [step[slot] for step in plain]
        logits = decoder_reference.forward(weights, torch.tensor(text[:-1]))[20:]
        chosen = logits.gather(1, torch.tensor(text[21:]).unsqueeze(1)).squeeze(1)
        assert (logits.max(1).values - chosen).max() < 0.05 * logits.std()
