"""What libtrirun_cuda.so launches on GPUs of every architecture, without one: no kernel runs, but shared memory,
registers, grids, clusters and tensor maps are held against the limits of the GPU and of the kernel as compiled."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from itertools import product as combinations
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from trirun_kernels import QuantSpec, pack
from trirun_kernels.decoder.cuda import CudaDecoder
from trirun_kernels.decoder.cuda_ops import attention_workspace
from trirun_kernels.decoder.cuda_structs import AttentionStruct
from trirun_kernels.f16acc.cuda import WGMMA, select_f16acc
from trirun_kernels.gemm import cuda, workspace
from trirun_kernels.native import F16AccPlanStruct, NativeError, limits
from trirun_kernels.plan.problem import PREFILL, Device
from trirun_kernels.plan.select import select

from tests.kernels.described_devices import GPUS, MEMORY, built_archs, describe, launched, link, product

ARCHS = built_archs()
pytestmark = pytest.mark.skipif(not ARCHS, reason="libtrirun_cuda.so was not built in this tree, or there is no nvcc")
HERE = [pytest.param(gpu, marks=pytest.mark.skipif(gpu.code not in ARCHS, reason="not built")) for gpu in GPUS]
on_every_gpu = pytest.mark.parametrize("gpu", HERE, ids=[gpu.name for gpu in GPUS])

SHAPES = [(4096, 4096), (22016, 4096), (4096, 11008), (8192, 8192), (57344, 8192), (8192, 28672), (10240, 8192)]
SHAPES += [(2560, 2560), (13824, 2560), (2560, 6912), (3072, 8192), (5120, 8192), (2560, 9728), (512, 512), (64, 128)]
SHAPES += [(4096, 22016), (8192, 57344), (128256, 4096), (3584, 18944), (192, 1152)]
# Query heads, key heads, columns of a head: Llama 2 and 3, Qwen 2.5 of 1.5B and 7B, Gemma 2B, Phi, BitNet 2B,
# Qwen 3.5 27B, Gemma 4 31B's layers that see everything.
HEADS = [(32, 32, 128), (64, 8, 128), (32, 8, 128), (12, 2, 128), (28, 4, 128), (8, 1, 256), (32, 32, 80), (20, 5, 128)]
HEADS += [(24, 4, 256), (32, 4, 512), (8, 8, 512)]


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    return link(tmp_path_factory.mktemp("described"))


@on_every_gpu
def test_products_of_every_shape_are_launched(linked, gpu):
    describe(linked, gpu)
    seen = 0
    for shape, m, group, bits in combinations(SHAPES, (1, 2, 3, 8, 9, 33, 128, 600), (-1, 32, 128), (8, 16)):
        plan = select(*shape, m, group, bits, gpu.device)
        assert not product(linked, shape, m, group, bits, plan), (shape, m, group, bits, plan)
        plan = select(*shape, m, group, bits, gpu.device, plain=False)
        if group != -1:
            assert not product(linked, shape, m, group, bits, plan, zeros=True), (shape, m, group, bits, plan)
        seen += 1
    assert seen == len(SHAPES) * 48


@on_every_gpu
def test_products_that_cannot_quantize_in_their_prologue_are_launched(linked, gpu):
    describe(linked, gpu)
    seen = 0
    most = limits().decode_rows if gpu.arch == 90 else 4
    for shape, m, group, bits in combinations(SHAPES, (1, 2, 3, 4, 8, 33), (-1, 32, 128), (8, 16)):
        plan = select(*shape, m, group, bits, gpu.device, apart=True)
        if plan.kernel not in PREFILL:
            assert not plan.fused
            assert not product(linked, shape, m, group, bits, plan, odd=True), (shape, m, group, bits, plan)
        for quantized, rows in ((False, min(m, most)), (True, min(m, 8))):
            try:
                plan = select(*shape, rows, group, bits, gpu.device, quantized=quantized, wide=not quantized)
            except ValueError:  # such rows fit no CTA, and there is no other way for them
                assert shape[1] > 16384 and gpu.arch != 90, (shape, rows, group, bits)
                continue
            dtype = "float16" if quantized else "float32"
            told = product(linked, shape, rows, group, bits, plan, dtype=dtype, quantized=quantized)
            assert not told, (shape, rows, group, bits, plan)
            seen += 1
    assert seen > len(SHAPES) * 50


@on_every_gpu
def test_attention_of_every_model_is_launched(linked, gpu):
    describe(linked, gpu)
    decode = linked.trirun_cuda_attention_decode
    for (heads, kv_heads, head_dim), int8 in combinations(HEADS, (False, True)):
        if int8 and head_dim > 256:
            continue
        shape = SimpleNamespace(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        decoder = SimpleNamespace(_heads=[shape], _device=gpu.device)
        for rows in (*range(1, 17), 24, 32, 64, 128):
            splits = CudaDecoder.default_splits(decoder, rows)
            attention = AttentionStruct(
                *(MEMORY, 2 * MEMORY, 3 * MEMORY, 4 * MEMORY, None, 0),
                *(5 * MEMORY, 6 * MEMORY, 7 * MEMORY if int8 else None, 8 * MEMORY, 9 * MEMORY, 10 * MEMORY),
                *(None, None, None, 11 * MEMORY, 12 * MEMORY, None),
                *(rows, heads, kv_heads, heads * head_dim, kv_heads * head_dim, heads * head_dim, 64),
                *(head_dim, head_dim // 2, splits, 1, 0, 0, 1e-5, 1.0, 0.0),
            )
            size = linked.trirun_cuda_attention_workspace(ctypes.byref(attention))
            assert size == attention_workspace(rows, shape, splits, torch.device("cpu")).numel()
            linked.described_clear()
            code = decode(ctypes.byref(attention), 13 * MEMORY, size, None)
            told = linked.described_complaint().decode()
            assert (code, told) == (0, ""), (heads, kv_heads, head_dim, int8, rows, splits)


@on_every_gpu
def test_dense_products_of_fp16_sums_are_launched(linked, gpu):
    describe(linked, gpu)
    gemm = linked.trirun_cuda_f16acc_gemm
    for m, n, k in combinations((1, 100, 4096), (8, 4096, 11000), (64, 1000, 8192)):
        plan = select_f16acc(m, n, k, 256, gpu.device)
        for along in (0, 2, 3) if plan.kernel == WGMMA else (0,):
            struct = F16AccPlanStruct(plan.kernel, plan.tile_n, plan.chunk, plan.parts, along)
            size, (wide, columns) = linked.trirun_cuda_f16acc_workspace(m, n, ctypes.byref(struct)), (-(-m // 8) * 8, n)
            code = gemm(
                MEMORY, wide if along & 1 else k, 2 * MEMORY, columns if along & 2 else k, 3 * MEMORY, 4 * MEMORY,
                columns, m, n, k, ctypes.byref(struct), 5 * MEMORY, size, None,
            )  # fmt: skip
            assert (code, linked.described_complaint()) == (0, b""), (m, n, k, plan, along)


needs_hopper = pytest.mark.skipif("90a" not in ARCHS, reason="not built")
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")


@needs_hopper
def test_code_of_an_older_gpu_is_refused_by_name(linked):
    linked.described_device(90, 80, 132, 227 * 1024)
    told = product(linked, (4096, 4096), 1, -1, 16, select(4096, 4096, 1, -1, 16, Device(90, 132)))
    assert told.startswith("libtrirun_cuda.so was built for older GPUs than this one")
    assert not launched(linked)


@needs_hopper
def test_what_a_kernel_may_have_never_shrinks(linked):
    describe(linked, H200)
    shape = (8192, 8192)
    assert not product(linked, shape, 1, -1, 16, select(*shape, 1, -1, 16, H200.device))
    kernel = launched(linked)[-1].encode()
    most = linked.described_allowance(kernel)
    assert most > 48 << 10
    assert not product(linked, (64, 128), 1, -1, 16, select(64, 128, 1, -1, 16, H200.device))
    assert (launched(linked)[-1].encode(), linked.described_allowance(kernel)) == (kernel, most)


@pytest.fixture
def hopper_for_cpu_tensors(linked, monkeypatch):
    """trirun_kernels.gemm.cuda takes CPU tensors, whose products are launched on a described H200."""
    describe(linked, H200)
    monkeypatch.setattr(cuda, "library", lambda: linked)
    monkeypatch.setattr(cuda, "device_of", lambda index: H200.device)
    monkeypatch.setattr(cuda, "_stream", lambda: 0)
    monkeypatch.setattr(workspace, "cuda", lambda: linked)
    buffer = torch.zeros(8 << 20, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 256 :]  # aligned as memory of a GPU is
    monkeypatch.setattr(workspace, "_buffers", {(None, 0): buffer})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    cuda._prepared.cache_clear()
    yield
    cuda._prepared.cache_clear()
    linked.described_pause(0)


def weight(n, k):
    return pack(torch.ones(n, k, dtype=torch.uint8), torch.ones(n, 1), QuantSpec(-1, 1.0))


def operands(n, k):
    w = weight(n, k)
    return w.words, w.scales, w.zeros, None, n, k, -1, 1.0, 16


@needs_hopper
@pytest.mark.usefixtures("hopper_for_cpu_tensors")
def test_products_of_views(linked):
    k, rows = 256, torch.zeros(8, 2 * 256 + 1, dtype=torch.float16)
    views = [rows[:1, :k].expand(5, k), rows[:, 1 : k + 1], rows[:, : 2 * k : 2], rows[0, 1 : k + 1]]
    views += [torch.zeros(k, 8).T, rows[0, : k + 4].unfold(0, k, 1)]
    views += [rows[:1, :k].expand(2, 40, k), rows[:1, :k].as_strided((1, k), (0, 1))]
    for x in views:
        before = linked.described_launches()
        assert cuda.int2_gemm(x, *operands(64, k)).shape == (*x.shape[:-1], 64)
        assert linked.described_launches() > before
    with pytest.raises(NativeError, match="a size is negative"):
        cuda.run_plan(
            torch.zeros(3, k).as_strided((3, k), (1, 1)), weight(64, k), None, torch.zeros(3, 64), 16,
            select(64, k, 3, -1, 16, H200.device, wide=True),
        )  # fmt: skip


@needs_hopper
@pytest.mark.usefixtures("hopper_for_cpu_tensors")
def test_threads_on_one_stream_keep_their_launches_together(linked):
    linked.described_pause(100)
    sizes = [(64, 256), (128, 1024)]

    def multiply(n, k):
        x, w = torch.zeros(2, k), operands(n, k)
        for _ in range(20):
            cuda.int2_gemm(x, *w)

    threads = [Thread(target=multiply, args=size) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = ["quantize" if "quantize" in name else "product" for name in launched(linked)]
    assert kinds == ["quantize", "product"] * 40
