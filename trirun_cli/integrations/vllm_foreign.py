"""trirun's kernels under 2-bit checkpoints of compressed-tensors (``pack-quantized``, ``uint2b2``) in vLLM.

vLLM asks its linear kernels in turn which can run a layer; one that is registered comes last. On CPUs no other takes 2
bits. On GPUs Humming does, where it is installed: ``VLLM_DISABLED_KERNELS=HummingLinearKernel`` leaves such layers to
trirun. 2-bit GPTQ checkpoints do not come this far: vLLM's ``AutoGPTQConfig`` refuses them (its ``TYPE_MAP`` holds 4
and 8 bits); ``trirun pack`` makes a checkpoint of trirun of them, without loss.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from trirun_kernels.weights.packing import pack
from trirun_kernels.weights.spec import GROUP_SIZES, QuantSpec
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig, register_linear_kernel
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from .vllm_linear import product, set_packed

# Stored codes of uint2b2 mean code - 2.
ZERO = 2.0


class TrirunInt2LinearKernel(MPLinearKernel):
    """A linear layer of 2-bit codes with a zero point of 2, packed into tile64 once it is loaded."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0, Ampere."""
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether a layer of this kind runs here, and why not."""
        k, _ = c.partition_weight_shape
        if getattr(scalar_types, "uint2b2", None) != c.weight_type:
            return False, f"trirun's kernel is for uint2b2 weights, not {c.weight_type}"
        if c.zero_points or getattr(c, "has_g_idx", False):  # newer versions have no g_idx
            return False, "trirun's kernel for other checkpoints has no zero points and no g_idx"
        if c.group_size not in GROUP_SIZES or (c.group_size != -1 and k % c.group_size):
            return False, f"trirun's kernel has no groups of {c.group_size} on {k} columns"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Codes int32 [n, k/16], the first in the lowest bits, and scales [n, groups] into the packed form.

        Raises:
            PackError: a scale is not exact in float16.
        """
        words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        k, n = self.config.partition_weight_shape
        shifts = torch.arange(0, 32, 2, dtype=torch.int32, device=words.device)
        codes = (words.data.unsqueeze(-1) >> shifts & 3).view(n, -1)[:, :k].to(torch.uint8)
        packed = pack(codes, scales.data.view(n, -1), QuantSpec(self.config.group_size, ZERO))
        for name in (self.w_q_name, self.w_s_name):
            delattr(layer, name)
        set_packed(layer, packed)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] → [..., n]."""
        return product(layer, x, bias, 16)


@cache
def register_kernel() -> None:
    """Offer the kernel on CPUs and on GPUs of NVIDIA."""
    for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):
        register_linear_kernel(TrirunInt2LinearKernel, platform)
