"""The CUDA decoder's kernels over rows and heads against their twins."""

from __future__ import annotations

import ctypes

import pytest
import torch
from trirun_kernels import cuda_decoder_ops as ops
from trirun_kernels import cuda_decoder_reference
from trirun_kernels.activations import activation_bytes, int2_gemm_quantized
from trirun_kernels.packing import dequantize

from tests.kernels.cuda_support import BOTH, ROUNDING, error, gpu, random_packed


def test_structures_have_the_sizes_of_trirun_h():
    assert ctypes.sizeof(ops.SamplerStruct) == ops.SAMPLER_BYTES
    assert ctypes.sizeof(ops.RowsStruct) == 10 * 8 + 5 * 8 + 5 * 4 + 4
    assert ctypes.sizeof(ops.AttentionStruct) == 15 * 8 + 7 * 8 + 6 * 4
    assert ctypes.sizeof(ops.SampleStruct) == 13 * 8 + 4 * 8 + 2 * 4


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
