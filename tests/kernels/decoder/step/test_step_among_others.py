"""The step kernel, whose CTAs wait for each other, where something else holds multiprocessors that it needs."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_toolchain import find_nvcc

from tests.kernels.decoder.models import random_model

# Holds so many multiprocessors, whose shared memory it takes, until it is told to stop.
HOLDER = """
#include <cuda_runtime.h>
__global__ void spin(volatile int* stop) {
  extern __shared__ int room[];
  room[threadIdx.x] = 0;
  while (*stop == 0) __nanosleep(1000);
}
extern "C" int hold(int ctas, int* stop, cudaStream_t stream) {
  cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
  spin<<<ctas, 32, 200 << 10, stream>>>(stop);
  return cudaGetLastError();
}
"""


@pytest.fixture
def holder(tmp_path):
    """Call it with the number of multiprocessors and for how many seconds; what it holds is free in the end."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    if find_nvcc() is None:
        pytest.skip("needs nvcc")
    (tmp_path / "hold.cu").write_text(HOLDER)
    command = [str(find_nvcc()), "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", "hold.cu", "-o", "hold.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "hold.so"))
    stop, stream = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
    timers = []

    def hold(ctas: int, seconds: float) -> None:
        stop.zero_()
        pointers = (ctypes.c_void_p(stop.data_ptr()), ctypes.c_void_p(stream.cuda_stream))
        assert library.hold(ctas, *pointers) == 0
        time.sleep(0.1)  # until it runs
        timers.append(threading.Timer(seconds, lambda: stop.fill_(1)))
        timers[-1].start()

    yield hold
    stop.fill_(1)
    for timer in timers:
        timer.join()
    torch.cuda.synchronize()


def step():
    weights = random_model(hidden=256, ffn=384, heads=4, kv_heads=4, head_dim=64, spec=QuantSpec(-1, 1.0))
    decoder = CudaDecoder(CudaModel.of(weights, "cuda", torch.float16), slots=1, context=192)
    assert decoder.step_refusal is None
    inputs = Inputs(*(torch.tensor([x], dtype=torch.int32, device="cuda") for x in (3, 0, 0)))
    decoder.forward(inputs)
    torch.cuda.synchronize()
    return decoder, inputs


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [20, 132])
def test_it_waits_until_they_are_free(holder, ctas):
    decoder, inputs = step()
    expected = decoder.forward(inputs)
    holder(ctas, 1)
    found = decoder.forward(inputs)
    torch.cuda.synchronize()
    assert torch.equal(found, expected) and not decoder.gave_up


@pytest.mark.gpu
def test_it_ends_even_if_they_never_are(holder):
    decoder, inputs = step()
    expected = decoder.forward(inputs)
    holder(20, 8)
    begin = time.monotonic()
    found = decoder.forward(inputs)
    torch.cuda.current_stream().synchronize()
    # Either it has given up, or it was not begun before there was room.
    waited = time.monotonic() - begin
    assert waited < 12
    if decoder.gave_up:
        assert 3.5 < waited < 7 and torch.isnan(found).all()
    else:
        assert torch.equal(found, expected)
