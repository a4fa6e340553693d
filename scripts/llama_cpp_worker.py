"""llama.cpp for :mod:`bench_cpu_peers`: logits, greedy tokens, and what a token costs; runs in the peer's Python.

    LLAMA_CPP_LIB_PATH=PEER/llama.cpp/bin PYTHONPATH=PEER/src/llama_cpp_python-0.3.36 PEER/bin/python \
        scripts/llama_cpp_worker.py model.gguf --threads 2 --decode 48
    ... scripts/llama_cpp_worker.py model.gguf --logits logits.npy --prompt 5,6,7 --greedy 16

The first prints tokens per second, measured ahead of other programs, as a JSON list with NaN for prompts. The second
writes the logits float32 [prompt, vocab] after every token of the prompt, one token a step, and prints the greedy
tokens that follow.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
from peer_workers import ahead_of_others


class Model:
    """A GGUF file and a context of its own.

    Raises:
        SystemExit: llama.cpp does not load it.
    """

    def __init__(self, path: Path, context: int, threads: int) -> None:
        settings = api.llama_model_default_params()
        settings.n_gpu_layers = 0
        model = api.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            raise SystemExit(f"llama.cpp does not load {path}")
        how = api.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = context
        how.n_threads = how.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, how)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def step(self, token: int) -> np.ndarray:
        """Logits float32 [vocab] after one more token, valid until the next.

        Raises:
            SystemExit: llama.cpp fails.
        """
        ids = (api.llama_token * 1)(token)
        if code := api.llama_decode(self._context, api.llama_batch_get_one(ids, 1)):
            raise SystemExit(f"llama.cpp: llama_decode returned {code}")
        logits = ctypes.cast(api.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (self.vocab,))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode", type=int, metavar="TOKENS")
    parser.add_argument("--logits", type=Path)
    parser.add_argument("--prompt", default="", help="token ids, comma-separated")
    parser.add_argument("--greedy", type=int, default=16, help="tokens to add")
    options = parser.parse_args()
    api.llama_backend_init()
    if options.decode:
        model = Model(options.file, options.decode + 2, options.threads)
        model.step(1), model.step(2)
        with ahead_of_others(True):
            started = time.perf_counter()
            for index in range(options.decode):
                model.step(17 * index % model.vocab)
            taken = time.perf_counter() - started
        print(json.dumps([float("nan"), options.decode / taken]))
        return
    prompt = [int(token) for token in options.prompt.split(",")]
    model = Model(options.file, len(prompt) + options.greedy, options.threads)
    rows, greedy = [model.step(token).copy() for token in prompt], []
    token = int(rows[-1].argmax())
    for _ in range(options.greedy - 1):
        greedy.append(token)
        token = int(model.step(token).argmax())
    np.save(options.logits, np.stack(rows))
    print(json.dumps([*greedy, token]))


if __name__ == "__main__":
    main()
