"""The CUDA decoder's kernels over rows and heads against their references."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder import cuda_reference as cuda_decoder_reference
from trirun_kernels.decoder import cuda_structs as structs
from trirun_kernels.gemm.activations import int2_gemm_quantized
from trirun_kernels.gemm.cuda import activation_bytes
from trirun_kernels.weights.packing import dequantize

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, error, gpu, random_packed


def test_structures_have_the_sizes_of_trirun_h():
    assert ctypes.sizeof(structs.SamplerStruct) == ops.SAMPLER_BYTES
    assert ctypes.sizeof(structs.RowsStruct) == 14 * 8 + 5 * 8 + 8 * 4
    assert ctypes.sizeof(structs.AttentionStruct) == 18 * 8 + 7 * 8 + 10 * 4
    assert ctypes.sizeof(structs.GatherStruct) == 9 * 8 + 4 * 8 + 2 * 4
    assert ctypes.sizeof(structs.SampleStruct) == 14 * 8 + 4 * 8 + 2 * 4


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
            (ops.RESIDUAL, draw(m, n), {"residual": draw(m, n, kind=torch.float32), "output_scale": 0.75}),
            (ops.RESIDUAL, None, {"residual": draw(m, n, kind=torch.float32)}),
            (ops.EMBED, table, {"residual": torch.full((m, n), float("nan"), device="cuda")}),
            (ops.GATE, wide[:, :n], {"up": wide[:, n:]}),
            (ops.GATE, wide[:, :n], {"up": wide[:, n:], "activation": "relu2"}),
            (ops.PLAIN, wide[:, n:], {}),
            # Not at 16 bytes.
            (ops.PLAIN, wide[:, 2 : n + 2], {}),
            (ops.GATE, wide[:, 6 : n + 6], {"up": wide[:, n - 2 : 2 * n - 2]}),
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
                limbs = torch.full((bytes_,), 255, device="cuda", dtype=torch.uint8)
                kept = {name: v.clone() if name == "residual" else v for name, v in options.items()}
                ops.rows(source, x, y=y, limbs=limbs, act_bits=act_bits, **kept, **shared)
                assert error(y, expected) < ROUNDING[dtype], (m, source)
                if residual is not None:
                    assert torch.equal(kept["residual"], residual)
                if act_bits == 8:
                    scale = expected.abs().amax(1, keepdim=True).clamp(min=1e-5) / 127
                    rounded = (expected / scale).round().clamp(-128, 127) * scale
                else:
                    rounded = expected
                product = int2_gemm_quantized(limbs, m, w, act_bits=act_bits, dtype=torch.float32)
                exact = rounded.double() @ dequantize(w, torch.float32).double().T
                # A limb that falls on the other side of a tie is one 127th of the row's largest value.
                assert error(product, exact) < (3e-4 if act_bits == 16 else 6e-3), (m, source, act_bits)


def attention_case(dtype, heads, kv_heads, head_dim, lengths, *, half=None, normed=False, int8=False, seed=0):
    """(q, k, v, Heads, Cache, slots, positions): slot i holds ``lengths[i]`` tokens in scattered pages; whatever no
    token has written is NaN (of int8, its scales are). A length of None is a row without a slot."""
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
    if int8:
        parts = [cuda_decoder_reference.quantize_heads(part.float()) for part in (keys, values)]
        codes = [torch.nn.functional.pad(codes, (0, -head_dim % 16)) for codes, _ in parts]
        cache = ops.Cache(*codes, pages, torch.stack([scales for _, scales in parts], -1))
    return q, k, v, ops.Heads(*sizes, angles.cos(), angles.sin(), *norms), cache, slots, length_of[order.long()]


ATTENTION = [
    (1, 1, 128, {}), (4, 2, 24, {}), (32, 32, 128, {}), (32, 8, 128, {"normed": True}), (16, 2, 64, {}),
    (12, 1, 128, {}), (6, 2, 96, {"half": 20}), (8, 4, 256, {"normed": True}), (5, 1, 8, {"half": 3}),
    (20, 5, 128, {}), (24, 2, 80, {}), (12, 2, 256, {"half": 32, "normed": True}),
    (16, 2, 512, {"normed": True}), (2, 2, 512, {}), (9, 1, 264, {"half": 66}),
]  # fmt: skip


def copied(cache):
    scales = None if cache.scales is None else cache.scales.clone()
    return ops.Cache(cache.keys.clone(), cache.values.clone(), cache.block_tables, scales)


def assert_unchanged(cache, before):
    for one, other in ((cache.keys, before.keys), (cache.values, before.values), (cache.scales, before.scales)):
        assert one is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def assert_same_cache(own, after, dtype):
    """A cache that a kernel wrote against the reference's: rotated keys up to their last bits, values exactly."""
    assert torch.equal(own.values.nan_to_num(7), after.values.nan_to_num(7))
    if own.scales is None:
        close = (own.keys.float() - after.keys.float()).abs() <= 4 * ROUNDING[dtype] * after.keys.float().abs()
        assert (close | (own.keys.isnan() & after.keys.isnan()) | (after.keys.abs() < 1e-2)).all()
        return
    assert torch.equal(own.scales[..., 1].nan_to_num(7), after.scales[..., 1].nan_to_num(7))
    scales, expected = own.scales[..., 0].float(), after.scales[..., 0].float()
    assert ((scales - expected).abs() <= 2**-9 * expected).logical_or(scales.isnan() & expected.isnan()).all()
    # A code next to a tie may fall on its other side.
    steps = (own.keys.int() - after.keys.int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-2


@gpu
@BOTH
@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(128, 1.0), QuantSpec(32, None)])
@pytest.mark.parametrize("n", [96, 144, 4096])
def test_rows_of_a_packed_embedding(dtype, spec, n):
    if spec.group_size > 0 and n % spec.group_size:
        pytest.skip("no such grid")
    packed = random_packed(203, n, spec).to("cuda")
    tokens = torch.tensor([0, 202, 63, 64, -1, 17, 8, 190], dtype=torch.int32, device="cuda")
    slots, latest = torch.arange(8, dtype=torch.int32, device="cuda"), torch.full((8,), 77, device="cuda").int()
    norm = torch.rand(n, device="cuda") + 0.5
    residual = torch.full((8, n), float("nan"), device="cuda")
    y = torch.empty(8, n, dtype=dtype, device="cuda")
    shared = {"tokens": tokens, "slots": slots, "latest": latest, "norm": norm, "eps": 1e-5}
    ops.rows(ops.EMBED, packed, residual=residual, y=y, **shared)
    assert torch.equal(residual, dequantize(packed)[torch.where(tokens < 0, 77, tokens).long()])
    assert error(y, cuda_decoder_reference.rows(ops.PLAIN, residual, norm=norm, eps=1e-5)[0]) < ROUNDING[dtype]
    # Nothing but limbs, as a step of few rows takes it.
    limbs = torch.full((activation_bytes(8, -(-n // 128) * 128, 16),), 255, device="cuda", dtype=torch.uint8)
    ops.rows(ops.EMBED, packed, residual=residual, limbs=limbs, **shared)
    assert torch.equal(residual, dequantize(packed)[torch.where(tokens < 0, 77, tokens).long()])


@gpu
@BOTH
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads, kv_heads, head_dim, options", ATTENTION)
def test_attention(heads, kv_heads, head_dim, options, int8, dtype):
    if int8 and head_dim > 256:
        pytest.skip("an int8 cache has no such heads")
    lengths = [0, 1, None, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700]
    q, k, v, facts, cache, slots, positions = attention_case(
        dtype, heads, kv_heads, head_dim, lengths, int8=int8, **options
    )
    wide_q, wide_k = cuda_decoder_reference.prepared_heads(q, k, facts, positions)
    wide_v = v.reshape(v.shape[0], kv_heads, head_dim)
    after = cuda_decoder_reference.append(wide_k, wide_v, cache, slots, positions)
    live = slots >= 0
    for splits in (1, 3, 8, 11, 30):
        own = copied(cache)
        workspace = ops.attention_workspace(len(lengths), facts, splits, q.device)
        results = []
        # Twice over one workspace: the first call must leave it fit for the second.
        for _ in range(2):
            y = torch.full_like(q, float("nan")).contiguous()
            ops.attention_decode(q, k, v, y, facts, own, slots, positions, splits, workspace)
            results.append(y[live])
        assert torch.equal(*results)
        assert_same_cache(own, after, dtype)
        expected = cuda_decoder_reference.attend(wide_q, facts, own, slots, positions)
        assert error(results[0], expected[live]) < 2 * ROUNDING[dtype], splits
        # Another layer of the same keys and values, which are stored already.
        unnormed, stored = dataclasses.replace(facts, k_norm=None), copied(own)
        y = torch.full_like(q, float("nan")).contiguous()
        ops.attention_decode(q, None, None, y, unnormed, stored, slots, positions, splits, workspace)
        assert torch.equal(y[live], results[0])
        assert_unchanged(stored, own)
        if ops.attention_makes_limbs(facts):
            m, n = q.shape
            w = random_packed(64, n).to("cuda")
            limbs = torch.full((activation_bytes(m, n, 16),), 255, device="cuda", dtype=torch.uint8)
            again = copied(cache)
            ops.attention_decode(q, k, v, None, facts, again, slots, positions, splits, workspace, limbs=limbs)
            product = int2_gemm_quantized(limbs, m, w, dtype=torch.float32)
            exact = expected.double() @ dequantize(w, torch.float32).double().T
            assert error(product[live], exact[live]) < 2 * ROUNDING[dtype]
            assert (product[slots < 0] == 0).all()
    # The two halves, one after the other, are the same step.
    appended = copied(cache)
    rotated = torch.zeros_like(q).contiguous()
    ops.attention_append(q, k, v, rotated, facts, appended, slots, positions)
    other, again = torch.zeros_like(rotated), copied(appended)
    ops.attention_append(q, None, None, other, unnormed, again, slots, positions)
    assert torch.equal(other, rotated)
    assert_unchanged(again, appended)
    turned = cuda_decoder_reference.mixed(wide_q) if int8 else wide_q
    assert error(rotated[live], turned.flatten(1)[live]) < ROUNDING[dtype]
    assert_unchanged(appended, own)
    if not int8:
        # In place, and what the cache has of them.
        again, in_place = copied(cache), torch.cat([q, k, v], 1)
        q2, k2, v2 = in_place.split((q.shape[1], k.shape[1], v.shape[1]), 1)
        ops.attention_append(q2, k2, v2, q2, facts, again, slots, positions, rotate_keys=True)
        assert torch.equal(q2[live], rotated[live]) and torch.equal(v2, v)
        assert torch.equal(again.keys.nan_to_num(7), appended.keys.nan_to_num(7))
        pages = cache.block_tables[slots.clamp(min=0).long(), positions.long() // ops.PAGE].long()
        of_cache = again.keys[pages[live], :, positions[live].long() % ops.PAGE]
        assert torch.equal(k2[live], of_cache.flatten(1))
    lengths = positions[live] + 1
    for first_pages in (torch.zeros_like(lengths), (lengths - 1) // ops.PAGE // 2):
        counts = lengths - first_pages * ops.PAGE
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        total, longest = int(starts[-1]), int(counts.max())
        found = ops.gather(own, slots[live], starts, first_pages.int(), total, longest, head_dim, dtype)
        for slot, length, first, last in zip(slots[live].tolist(), lengths, starts, starts[1:], strict=False):
            exact = cuda_decoder_reference.gathered(own, slot, int(length), head_dim)
            for part, other in zip(found, exact, strict=True):
                assert torch.equal(part[first:last], other.to(dtype).transpose(0, 1)[first - last :])


@gpu
@BOTH
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_over_int8_with_outliers(head_dim, dtype):
    """Scales that lie far apart, as they do between the first token and others, lose no bits of the small ones."""
    q, k, v, facts, cache, slots, positions = attention_case(dtype, 8, 2, head_dim, [300, 77, 64], int8=True, seed=1)
    generator = torch.Generator(device="cuda").manual_seed(2)
    spread = torch.exp2(torch.randint(-12, 5, cache.scales.shape, device="cuda", generator=generator).float())
    spread[..., 0] = 1
    cache.scales.copy_(cache.scales.float() * spread)
    v.mul_(2**-10)
    workspace = ops.attention_workspace(3, facts, 2, q.device)
    y = torch.full_like(q, float("nan")).contiguous()
    ops.attention_decode(q, k, v, y, facts, cache, slots, positions, 2, workspace)
    wide_q, _ = cuda_decoder_reference.prepared_heads(q, k, facts, positions)
    expected = cuda_decoder_reference.attend(wide_q, facts, cache, slots, positions)
    assert error(y, expected) < 2 * ROUNDING[dtype]


@gpu
def test_a_number_that_is_none_poisons_its_own_row():
    q, k, v, facts, cache, slots, positions = attention_case(torch.float16, 8, 2, 128, [40, 50, 60], int8=True)
    k, v = k.clone(), v.clone()
    k[0, 5], v[1, 130] = float("nan"), float("inf")
    workspace = ops.attention_workspace(3, facts, 2, q.device)
    y = torch.zeros_like(q).contiguous()
    ops.attention_decode(q, k, v, y, facts, cache, slots, positions, 2, workspace)
    # Query heads 0 to 3 share key head 0.
    assert y[0, :512].isnan().all() and y[0, 512:].isfinite().all()
    assert y[1, 512:].isnan().all() and y[1, :512].isfinite().all()
    assert y[2].isfinite().all()


def test_quantized_heads_keep_their_largest_element():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 500).unsqueeze(1)
    x[0] = 0
    codes, scales = cuda_decoder_reference.quantize_heads(x)
    assert codes.min() >= -127 and scales[0] == 0 and (codes[0] == 0).all()
    step = scales.float().unsqueeze(1)
    assert ((codes * step - x).abs() <= step / 2 * 1.0001).all()
    assert (step[1:] <= x[1:].abs().amax(1, keepdim=True) / 127 * (1 + 2**-10) + 2**-24).all()


@pytest.mark.parametrize("head_dim, block", [(128, 128), (64, 64), (96, 32), (80, 16), (24, 8)])
def test_mixing_changes_no_product_and_levels_outliers(head_dim, block):
    generator = torch.Generator().manual_seed(head_dim)
    q, k = torch.randn(2, 50, head_dim, generator=generator)
    k[:, 3] *= 100
    turned = cuda_decoder_reference.mixed(k)
    products = (cuda_decoder_reference.mixed(q) * turned).sum(-1)
    assert torch.allclose(products, (q * k).sum(-1), rtol=1e-4, atol=1e-3)
    # The outlier is spread over its block.
    assert (turned.abs().amax(-1) < k.abs().amax(-1) * block**-0.5 + 5).all()
    assert torch.allclose(cuda_decoder_reference.mixed(turned), k, atol=1e-4)
