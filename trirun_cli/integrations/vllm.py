"""vLLM serves packed checkpoints on trirun's kernels: :func:`register` is the entry point ``trirun`` of the group
``vllm.general_plugins``, which every process of vLLM calls (server, engine, workers). vLLM 0.21 or newer."""

from __future__ import annotations


def register() -> None:
    """Register with vLLM the quantization method "trirun", and a kernel for 2-bit checkpoints of compressed-tensors. A
    second call does nothing."""
    from . import vllm_config  # noqa: F401  (a decorator in it registers the method)
    from .vllm_foreign import register_kernel

    register_kernel()
