"""The step kernel without a GPU: its CUDA source compiled for the host, where threads are fibers (on_host/fibers.h),
run through the same Python as on a GPU, against the decoder's reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import reference
from trirun_kernels.decoder.cuda import Inputs
from trirun_kernels.decoder.cuda_ops import PAGE, Cache, Heads
from trirun_kernels.decoder.cuda_reference import append, int8_round_trip
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_kernels.decoder.step.cuda import ROWS, CudaStep, refusal, rows_taken
from trirun_kernels.plan.problem import Device

from tests.kernels.decoder.models import VOCAB, random_model
from tests.kernels.host_sources import host_library, needs_tools

ROOM, CTAS = 160 << 10, 8  # so little memory that the ring goes round; MOST_CTAS of on_host/fibers.h
PLAIN = {"hidden": 256, "ffn": 384, "heads": 4, "kv_heads": 4, "head_dim": 64, "spec": QuantSpec(-1, 1.0), "layers": 2}

# Of so many CTAs to a cluster.
FOUR = {"hidden": 512, "ffn": 512, "heads": 8, "layers": 1}
EIGHT = {"hidden": 1024, "ffn": 1024, "heads": 16, "layers": 1}
WIDEST = {"head_dim": 256, "layers": 1}
WIDE = {"head_dim": 128, "sub_norm": True, "layers": 1}

# What a model has, bits of activations, dtype, whether the cache has 8 bits, tokens of the rows' texts.
CASES = [
    ({}, 16, torch.float16, False, [0]),
    ({}, 16, torch.bfloat16, False, [70]),
    ({"kv_heads": 2, "vocabulary": QuantSpec(128, None)}, 16, torch.float16, False, [17, 150]),
    ({**FOUR, "kv_heads": 2}, 16, torch.float16, True, [64, 129]),
    ({"kv_heads": 1, "bias": True, "layers": 1}, 8, torch.float16, False, [3, 130, 180, 64]),
    ({"head_dim": 128, "spec": QuantSpec(128, None), "kv_heads": 2}, 16, torch.float16, False, [90, 3]),
    ({"heads": 6, "kv_heads": 1}, 16, torch.float16, True, [140]),
    ({**WIDEST, "kv_heads": 2}, 8, torch.float16, False, [75, 21]),
    ({**WIDEST, "heads": 5, "kv_heads": 1, "qk_norm": True}, 16, torch.bfloat16, False, [150]),
    ({**WIDEST, "heads": 6, "kv_heads": 1}, 16, torch.float16, True, [130]),
    ({"heads": 16, "kv_heads": 1}, 16, torch.bfloat16, False, [135]),
    ({"heads": 12, "kv_heads": 1, "half": 16, "layers": 1}, 8, torch.float16, True, [100]),
    ({"head_dim": 128, "spec": QuantSpec(128, 1.0), "qk_norm": True}, 16, torch.float16, False, [90]),
    ({**WIDE, "heads": 2, "kv_heads": 1, "activation": "relu2"}, 8, torch.float16, False, [77]),
    ({**WIDE, "kv_heads": 2}, 16, torch.float16, True, [33, 140]),
    ({"spec": QuantSpec(-1, 1.5), "activation": "gelu_tanh", "ffn": 640}, 16, torch.float16, False, [5] * 4),
    ({"kv_heads": 2, "ffn": 256, "layers": 1}, 8, torch.bfloat16, False, [9] * 8),
    ({"kv_heads": 2, "ffn": 1792}, 16, torch.float16, False, [9, 70, 3, 140, 5, 64, 20, 33]),
    ({**FOUR, "kv_heads": 4, "sub_norm": True}, 16, torch.float16, False, [9, 70, 3, 140, 5, 64, 20, 33]),
    ({"heads": 6, "kv_heads": 1, "ffn": 1792, "layers": 1}, 16, torch.float16, True, [9, 70, 3, 140, 5, 64, 20, 33]),
    ({"heads": 6, "kv_heads": 1, "head_dim": 128}, 16, torch.bfloat16, True, [150]),
    ({**EIGHT, "kv_heads": 2}, 16, torch.float16, False, [180]),
    ({**EIGHT, "kv_heads": 4, "sub_norm": True}, 8, torch.float16, True, [150]),
    ({**FOUR, "kv_heads": 1, "sub_norm": True}, 8, torch.float16, False, [170]),
    ({**EIGHT, "kv_heads": 4, "sub_norm": True}, 16, torch.float16, False, [180]),
    ({**FOUR, "sub_norm": True, "kv_heads": 4}, 16, torch.float16, False, [5, 190, 64, 7]),
]  # fmt: skip


def instances() -> str:
    """The kernel's instances that :data:`CASES` want, as a condition in C++: all would take a minute to compile."""
    wanted = set()
    for options, act_bits, dtype, int8, _ in CASES:
        of = PLAIN | options
        spec, element = of["spec"], "INT8" if int8 else "BF16" if dtype == torch.bfloat16 else "FP16"
        scale = "CHANNEL" if spec.group_size == -1 else "K_TILE" if spec.zero is None else "K_TILE_PLAIN"
        packed = str(of["heads"] // of["kv_heads"] <= 4).lower()
        wanted.add(
            f"LIMBS == {act_bits // 8} && SCALE == gemm_decode::PER_{scale} && HD == {of['head_dim']} && "
            f"ELEMENT == {element} && PACKED == {packed}"
        )
    return "(" + ") || (".join(sorted(wanted)) + ")"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel's library, as ``trirun_kernels.native.cuda`` would have it."""
    begin = "Kernel of_rows(const trirun_cuda_step& s) {\n"
    made = host_library(
        tmp_path_factory.mktemp("step"), "step/step_sm90.cu", ROOM,
        # PyTorch aligns memory of a CPU to 64 bytes.
        ("aligned_to(s->messages, 256)", "aligned_to(s->messages, 64)"),
        (begin, f"{begin}  if constexpr (!({instances()})) return nullptr; else\n"),
    )  # fmt: skip
    made.trirun_cuda_step_messages.restype = ctypes.c_size_t
    made.trirun_cuda_step_messages.argtypes = [ctypes.c_void_p]
    made.trirun_cuda_decoder_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return made


def heads_of(model):
    (mixer,) = {layer.mixer for layer in model.shape.layers}
    cosines, sines = (None, None) if mixer.rotary is None else model.rotary[mixer.rotary]
    return [
        Heads(mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.scale, model.shape.norm_eps, cosines, sines,
              layer.norms.get("q_norm"), layer.norms.get("k_norm"), interleaved=mixer.interleaved)
        for layer in model.layers
    ]  # fmt: skip


def texts_of(lengths, more):
    """Random tokens of texts, so many ``more`` than their lengths."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (length + more,), generator=generator) for length in lengths]


def filled(model, texts, weights, int8, new=2):
    """Logits of every text's tokens, and caches of all layers that hold the texts but for their last ``new`` tokens."""
    mixer, slots = model.shape.layers[0].mixer, len(texts)
    pages = max(-(-len(text) // PAGE) for text in texts)
    sizes = (slots * pages, mixer.kv_heads, PAGE, mixer.head_dim)
    kind = torch.int8 if int8 else model.dtype
    tables = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(1)).view(slots, -1).to(torch.int32)
    # What is behind a text is no number.
    nothing = torch.full(sizes, 127 if int8 else torch.nan).to(kind)
    scales = torch.full((*sizes[:3], 2), torch.nan, dtype=torch.float16) if int8 else None
    caches = [Cache(nothing.clone(), nothing.clone(), tables, scales) for _ in model.layers]
    logits = []
    for slot, text in enumerate(texts):
        kept = []

        def stored(k, v, kept=kept):
            kept.append((k, v))
            return int8_round_trip(k, v) if int8 else (k.to(model.dtype).float(), v.to(model.dtype).float())

        logits.append(reference.forward(weights, text, act_bits=model.act_bits, stored=stored))
        count = len(text) - new
        for index, (k, v) in enumerate(kept):
            at = (torch.full((count,), slot), torch.arange(count))
            caches[index] = append(k[:count], v[:count], caches[index], *at)
    return logits, caches


def errors_of(library, monkeypatch, weights, model, caches, logits, steps):
    """How far logits of rows, pairs of a text and a position, are from the reference's; the steps go one by one."""
    monkeypatch.setattr("trirun_kernels.decoder.step.cuda.library", lambda: library)
    codes = []
    monkeypatch.setattr("trirun_kernels.decoder.step.cuda.check_cuda", lambda code, _: codes.append(code))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=None))
    texts, logits = zip(*logits, strict=True)
    latest, head, errors = torch.zeros(len(texts), dtype=torch.int32), reference.dense_matrix(weights.head), []
    rows, one_text = 1 << (len(steps[0]) - 1).bit_length(), len({slot for slot, _ in steps[0]}) == 1 < len(steps[0])
    step = CudaStep(model, heads_of(model), caches, latest, rows, CTAS, one_text)
    for each in steps:
        tokens = torch.stack([texts[slot][position] for slot, position in each]).to(torch.int32)
        slots, positions = (torch.tensor(part, dtype=torch.int32) for part in zip(*each, strict=True))
        latest[slots[-1]], tokens[-1] = tokens[-1].clone(), -1  # as if the kernel before had sampled it
        padded = Inputs(tokens, slots, positions).padded(rows)
        y = step(padded.tokens, padded.slots, padded.positions)[: len(each)]
        assert not any(codes)
        expected = torch.stack([logits[slot][position] for slot, position in each])
        errors += ((y.float() @ head.T - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
    return errors


@needs_tools
@pytest.mark.parametrize(("options", "act_bits", "dtype", "int8", "lengths"), CASES)
def test_steps_against_the_reference(library, monkeypatch, options, act_bits, dtype, int8, lengths):
    weights = random_model(**PLAIN | options)
    model = CudaModel.of(weights, "cpu", dtype, act_bits=act_bits)
    assert refusal(model, 90, []) is None
    texts = texts_of(lengths, 2)
    logits, caches = filled(model, texts, weights, int8)
    # The second one attends to what the first has appended.
    steps = [[(slot, len(text) - back) for slot, text in enumerate(texts)] for back in (2, 1)]
    known = list(zip(texts, logits, strict=True))
    errors = errors_of(library, monkeypatch, weights, model, caches, known, steps)
    # Of most rows: of 8 bits a code next to a tie makes some differ by more.
    limit = (2e-2 if act_bits == 8 or int8 else 4e-3) if dtype == torch.float16 else 2e-2
    assert torch.tensor(errors).median() < limit and max(errors) < 10 * limit, errors


def with_positions(weights, count):
    """Weights of heads of 64 with so many positions' angles."""
    angles = torch.arange(count).unsqueeze(1) * 10000.0 ** -(torch.arange(32) / 32)
    return replace(weights, rotary=[(angles.cos(), angles.sin())])


TEN_HEADS = {"heads": 10, "kv_heads": 10, "layers": 1}


@needs_tools
@pytest.mark.parametrize(
    ("options", "lengths", "slow"),
    [
        # Eight CTAs have an equal part each of ten key heads' keys, or with a norm behind attention two rounds.
        (TEN_HEADS, [600], None),
        ({**TEN_HEADS, "sub_norm": True}, [600], None),
        # Four or eight CTAs of a cluster put together what they have of a key head.
        ({**FOUR, "kv_heads": 2, "sub_norm": True, "layers": 2}, [600], None),
        ({**FOUR, "kv_heads": 2, "sub_norm": True, "layers": 2}, [600], 16),
        ({**EIGHT, "kv_heads": 1, "sub_norm": True, "layers": 2}, [600], 17),
        # Ten or twenty pairs of a row and a key head as one sequence, one row much shorter than others among them.
        ({**TEN_HEADS, "kv_heads": 5, "layers": 2}, [600, 600], None),
        ({**TEN_HEADS, "kv_heads": 5}, [770, 530], None),
        ({**TEN_HEADS, "kv_heads": 5}, [1200, 1100, 3, 1000], None),
    ],
)
def test_behind_long_texts_ctas_attend_in_rounds_together_or_in_equal_parts(
    library, monkeypatch, options, lengths, slow
):
    if slow is not None:
        monkeypatch.setenv("ON_HOST_SLOW_WARP", str(slow))
    weights = with_positions(random_model(**PLAIN | options), max(lengths) + 2 + PAGE)
    model, texts = CudaModel.of(weights, "cpu", torch.float16), texts_of(lengths, 2)
    logits, caches = filled(model, texts, weights, False)
    steps = [[(slot, length + more) for slot, length in enumerate(lengths)] for more in (0, 1)]
    known = list(zip(texts, logits, strict=True))
    assert max(errors_of(library, monkeypatch, weights, model, caches, known, steps)) < 6e-4  # a key more: 2e-3


@needs_tools
@pytest.mark.parametrize(("slow", "rows"), [*((warp, 1) for warp in (0, 15, 16, 17, 18, 19)), (16, 2), (17, 4), (0, 4)])
def test_a_warp_that_hardly_runs(library, monkeypatch, slow, rows):
    # Gate | up goes round the ring several times, and warps that multiply do not wait for each other there.
    monkeypatch.setenv("ON_HOST_SLOW_WARP", str(slow))
    weights = random_model(**PLAIN | EIGHT | {"kv_heads": 2, "ffn": 2048})
    model, texts = CudaModel.of(weights, "cpu", torch.float16), [torch.tensor([3 + row, 7]) for row in range(rows)]
    logits, caches = filled(model, texts, weights, False)
    known, step = list(zip(texts, logits, strict=True)), [(row, 0) for row in range(rows)]
    assert max(errors_of(library, monkeypatch, weights, model, caches, known, [step])) < 4e-3


@needs_tools
@pytest.mark.parametrize(
    ("options", "int8", "lengths", "rows"),
    [
        ({"kv_heads": 2}, False, [70], [0, 0]),
        ({}, False, [60], [0] * 7),
        ({"kv_heads": 2}, False, [100, 17], [0, 1, 1, 1]),
        ({**FOUR, "kv_heads": 2}, True, [131], [0] * 4),
        ({"heads": 6, "kv_heads": 1}, True, [0, 90], [0, 0, 1, 1]),
        ({**WIDEST, "heads": 6, "kv_heads": 1}, True, [61], [0] * 4),
        ({"kv_heads": 2}, False, [130], [0] * 8),
        ({"heads": 6, "kv_heads": 1, "layers": 1}, True, [60, 33], [0] * 6 + [1] * 2),
        ({**WIDE, "kv_heads": 2}, True, [33], [0] * 8),
        ({**WIDEST, "heads": 6, "kv_heads": 1}, True, [40], [0] * 8),
    ],
)
def test_rows_of_one_sequence(library, monkeypatch, options, int8, lengths, rows):
    weights = random_model(**PLAIN | options)
    model, texts = CudaModel.of(weights, "cpu", torch.float16), texts_of(lengths, 16)
    logits, caches = filled(model, texts, weights, int8, new=16)
    positions, steps = list(lengths), []
    for _ in range(2):
        steps.append([])
        for slot in rows:
            steps[-1].append((slot, positions[slot]))
            positions[slot] += 1
    errors = errors_of(library, monkeypatch, weights, model, caches, list(zip(texts, logits, strict=True)), steps)
    limit = 2e-2 if int8 else 4e-3
    assert torch.tensor(errors).median() < limit and max(errors) < 10 * limit, errors


@needs_tools
@pytest.mark.parametrize("options", [{}, {"sub_norm": True}])
def test_parts_of_a_step_before_are_not_taken_for_new_ones(library, monkeypatch, options):
    # A short text has fewer splits, so that parts lie where they were left some steps ago.
    weights = with_positions(random_model(**PLAIN | FOUR | {"kv_heads": 2} | options), 420 + PAGE)
    model, texts = CudaModel.of(weights, "cpu", torch.float16), texts_of((420, 40), 0)
    logits, caches = filled(model, texts, weights, False, new=30)
    # The long text's next token, and up to four of the short one.
    slots = [slot for between in range(5) for slot in (0, *(1,) * between)]
    steps = [[(slot, (390, 10)[slot] + slots[:step].count(slot))] for step, slot in enumerate(slots)]
    known = list(zip(texts, logits, strict=True))
    assert max(errors_of(library, monkeypatch, weights, model, caches, known, steps)) < 4e-3


@needs_tools
@pytest.mark.parametrize(
    ("options", "act_bits", "int8", "context", "taken"),
    [
        ({"kv_heads": 2}, 8, False, 8192, (1, 2, 4, 8)),
        ({"kv_heads": 2}, 16, False, 8192, (1, 2, 4, 8)),
        ({"heads": 10, "kv_heads": 2}, 16, False, 4096, (1, 2, 4, 8)),
        ({"heads": 10, "kv_heads": 2}, 16, False, 4160, (1, 2, 4)),  # beyond MOST_WEIGHTS, which is lower here
        ({"heads": 6, "kv_heads": 1, "head_dim": 256}, 16, True, 4096, (1, 2, 4)),
        ({"heads": 10, "kv_heads": 2}, 8, False, 8192, (1, 2, 4, 8)),
        ({"kv_heads": 1}, 16, True, 8192, (1, 2, 4, 8)),
        ({"heads": 32, "kv_heads": 32}, 16, False, 8192, (1, 2, 4)),  # 128 pairs of four rows
        ({"heads": 16, "kv_heads": 16}, 8, False, 4096, (1, 2, 4)),
        ({"heads": 40, "kv_heads": 40}, 16, False, 4096, (1, 2)),
        ({"kv_heads": 2, "ffn": 14336}, 8, False, 8192, (1, 2, 4)),  # room for two chunks of eight rows
        ({"kv_heads": 2, "ffn": 40960}, 8, False, 8192, ()),
    ],
)
def test_rows_that_are_faster_than_by_the_chain(library, monkeypatch, options, act_bits, int8, context, taken):
    sizes = SimpleNamespace(
        trirun_cuda_step_ctas=lambda _: 0,  # as many as there are multiprocessors
        trirun_cuda_step_messages=library.trirun_cuda_step_messages,
    )
    monkeypatch.setattr("trirun_kernels.decoder.step.cuda.library", lambda: sizes)
    monkeypatch.setattr("trirun_kernels.decoder.step.cuda.MOST_WEIGHTS", 1_500_000)
    model = CudaModel.of(random_model(**PLAIN | FOUR | options), "cpu", torch.float16, act_bits=act_bits)
    found, reason = rows_taken(ROWS, model, Device(90, 132), heads_of(model), context, int8_cache=int8)
    assert found == taken and (reason is None) == bool(taken)
