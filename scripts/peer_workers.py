"""What :mod:`bench_cpu_peers` asks of processes of their own: speeds of trirun's decoder, bytes, bandwidth, logits.

python scripts/peer_workers.py decode CHECKPOINT THREADS ACT_BITS PROMPT TOKENS [fifo]
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator

MIB = 2**20


@contextlib.contextmanager
def ahead_of_others(wanted: bool) -> Iterator[None]:
    """All threads of this process before every other program of the machine (SCHED_FIFO, needs the privilege); for a
    second or two, since others get nothing meanwhile."""

    def schedule(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    if wanted:
        schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if wanted:
            schedule(os.SCHED_OTHER, 0)


def decode(checkpoint: str, threads: str, act_bits: str, prompt: str, tokens: str, fifo: str = "") -> None:
    """Print (prefill, decode) tokens/s; prefill is NaN without a prompt. ``fifo``: ahead of other programs."""
    from trirun_cli.backends.cpu.decoder import NativeDecoder

    decoder = NativeDecoder(checkpoint, threads=int(threads), act_bits=int(act_bits), context=2048)
    ids = [17 * i % decoder.shape.vocab for i in range(max(int(prompt), int(tokens), 2))]

    def decoded(count: int) -> float:
        started = time.perf_counter()
        for position in range(count):
            decoder.forward(ids[position : position + 1], position=position)
        return count / (time.perf_counter() - started)

    def prefilled(count: int) -> float:
        if not count:
            return float("nan")
        started = time.perf_counter()
        decoder.forward(ids[:count])
        return count / (time.perf_counter() - started)

    prefilled(int(prompt)), decoded(2)
    with ahead_of_others(fifo == "fifo"):
        print(json.dumps([prefilled(int(prompt)), decoded(int(tokens))]))


def token_bytes(path: str) -> None:
    """Print the bytes of weights that one token reads: of a checkpoint, packed layers and the 8-bit head; of a GGUF
    file, all but an embedding that is not the head."""
    from trirun_cli.checkpoint.formats.gguf.file import GgufFile
    from trirun_cli.checkpoint.reader import Checkpoint

    if path.endswith(".gguf"):
        tensors = GgufFile(path).tensors
        left_out = "token_embd.weight" if "output.weight" in tensors else ""
        print(sum(tensor.nbytes for name, tensor in tensors.items() if name != left_out))
        return
    found = Checkpoint(path)
    packed = sum(found.packed(module).nbytes for module in found.modules)
    print(packed + int(found.config["vocab_size"]) * int(found.config["hidden_size"]))


def bandwidth(threads: str, size: str) -> None:
    """Print the GB/s of reading `size` bytes again and again from 2 MiB pages with the library's own probe, median of
    sixty.

    The size is that of a token's weights: what a large cache keeps from one pass to the next, it keeps in decoding too.
    """
    import ctypes

    from trirun_kernels import native

    count = int(size)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, count, MIB):
        memory[start] = 1
    buffer = (ctypes.c_char * count).from_buffer(memory)
    seconds = []
    for _ in range(60):
        started = time.perf_counter()
        native.cpu().trirun_cpu_read(buffer, count, int(threads), ctypes.byref(ctypes.c_uint64()))
        seconds.append(time.perf_counter() - started)
    print(count / statistics.median(seconds) / 1e9)


def compare(checkpoint: str, logits: str, prompt: str, greedy: str) -> None:
    """Print how far logits [prompt, vocab] of another program are from the decoder's, in the median of rows (of a
    mixture some row has two nearly equal experts), and how many of its greedy tokens after the prompt are the decoder's
    too, before the first that is not.

    Args:
        logits: an .npy file. prompt: token ids, comma-separated. greedy: a JSON list of token ids.
    """
    import numpy as np

    from trirun_cli.backends.cpu.decoder import NativeDecoder

    decoder = NativeDecoder(checkpoint, threads=1, act_bits=16, context=512, int8_head=False)
    ids, theirs, expected = [int(token) for token in prompt.split(",")], np.load(logits), json.loads(greedy)
    ours = decoder.forward(ids, keep=len(ids))
    same, row = 0, ours[-1]
    for token in expected:
        if int(row.argmax()) != token:
            break
        row = decoder.forward([token], position=len(ids) + same)[0]
        same += 1
    found = float(np.median(np.linalg.norm(theirs - ours, axis=1) / np.linalg.norm(ours, axis=1)))
    print(json.dumps({"difference": found, "same": same, "greedy": len(expected)}))


TASKS = {"decode": decode, "bytes": token_bytes, "bandwidth": bandwidth, "compare": compare}

if __name__ == "__main__":
    TASKS[sys.argv[1]](*sys.argv[2:])
