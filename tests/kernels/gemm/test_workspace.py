"""Working memory of CUDA products: who shares it, who zeroes its counters; without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from trirun_kernels.gemm import workspace as module
from trirun_kernels.gemm.workspace import LEAST, scratch, workspace

CPU, COUNTERS = torch.device("cpu"), 64 << 10


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    """A stream that captures where its ``capture`` is not 0; memory that begins as anything."""
    here = SimpleNamespace(capture=0)
    library = SimpleNamespace(trirun_cuda_capture_id=lambda stream: here.capture)
    monkeypatch.setattr(module, "cuda", lambda: library)
    monkeypatch.setattr(module, "limits", lambda: SimpleNamespace(counter_bytes=COUNTERS))
    monkeypatch.setattr(module, "_buffers", {})
    monkeypatch.setattr(module, "_captured", {})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(7))
    return here


def counters(stream=0):
    held = module._captured.get((None, stream))
    return (module._buffers[None, stream] if held is None else held.buffer)[:COUNTERS]


def test_a_stream_has_one_buffer_that_grows():
    first, size = workspace(CPU, 1, 100, counts=True)
    assert size == LEAST and not counters(1).any()
    assert workspace(CPU, 1, LEAST, counts=False) == (first, LEAST)
    assert workspace(CPU, 1, LEAST + 1, counts=False)[1] == LEAST + 1 and not counters(1).any()
    assert workspace(CPU, 2, 100, counts=True)[0] != workspace(CPU, 1, 100, counts=True)[0]
    assert workspace(CPU, 3, 0, counts=True) == (None, 0) and (None, 3) not in module._buffers


def test_a_capture_has_a_buffer_of_its_own_and_zeroes_it_once(stream):
    outside, _ = workspace(CPU, 0, 100, counts=True)
    stream.capture = 1
    inside, _ = workspace(CPU, 0, 100, counts=False)
    assert inside != outside and counters().any()  # nobody needs zeros yet: no fill in the graph
    assert workspace(CPU, 0, 200, counts=True)[0] == inside and not counters().any()
    counters().fill_(5)
    assert workspace(CPU, 0, 200, counts=True)[0] == inside and counters().any()  # kernels keep them zero
    grown, _ = workspace(CPU, 0, LEAST + 1, counts=True)
    assert grown != inside and not counters().any()
    stream.capture = 0
    assert workspace(CPU, 0, 100, counts=True)[0] == outside and not module._captured


def test_captures_do_not_share_a_buffer(stream):
    stream.capture = 1
    workspace(CPU, 0, 100, counts=True)
    first = module._captured[None, 0].buffer
    stream.capture = 2
    workspace(CPU, 0, 100, counts=True)
    assert module._captured[None, 0].buffer is not first and not counters().any()
    workspace(CPU, 4, 100, counts=True)  # of another stream in the same capture
    assert module._captured[None, 4].buffer is not module._captured[None, 0].buffer


def test_kernels_without_counters_leave_them_alone():
    address, size = scratch(CPU, 0, LEAST)
    assert address == workspace(CPU, 0, 1, counts=True)[0] + COUNTERS and size == LEAST
    assert scratch(CPU, 0, 0) == (None, 0)
