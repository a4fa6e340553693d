"""The quantization method "trirun" of vLLM: which layer is packed, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trirun_kernels.weights.names import BIAS, WEIGHT, packed_modules
from trirun_kernels.weights.spec import QuantSpec
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.transformers_utils.config import get_safetensors_params_metadata

from ..checkpoint.reader import QUANT_METHOD, Format
from .vllm_linear import TrirunLinearMethod
from .vllm_vocabulary import TrirunVocabularyMethod

# A class of vLLM 0.25 and newer; before, FusedMoE is a class that does the same.
Experts = getattr(fused_moe, "RoutedExperts", None) or fused_moe.FusedMoE


# vLLM pickles it to other processes: it holds plain data.
@register_quantization_config(QUANT_METHOD)
class TrirunConfig(QuantizationConfig):
    """``quantization_config`` of a packed checkpoint, and the names of what is in the checkpoint.

    Attributes:
        format: the section.
        modules: linear modules of the checkpoint, packed or not, as vLLM names them: a dictionary of the name to the
            name in the checkpoint, where it is packed, and to None where it is not.
    """

    def __init__(self, section: dict[str, Any]) -> None:
        super().__init__()
        self.format = Format.from_dict(section)
        self.modules: dict[str, str | None] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TrirunConfig:
        """The method for config.json's section. Raises InputError: another layout or version."""
        return cls(config)

    def get_name(self) -> str:
        """The method's name."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the kernels multiply."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0, Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the section is in config.json."""
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read from the headers of the checkpoint's files what is packed: config.json names only exceptions, and vLLM
        has linear layers where transformers has none, for example the routers of experts."""
        names = get_safetensors_params_metadata(model_name, revision=revision)
        packed = packed_modules(names)
        if not packed:
            raise ValueError(f"trirun: no packed weight is to be found in the files of {model_name}")
        plain = {name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT)}
        plain |= {name.removesuffix(BIAS) for name in names if name.endswith(BIAS)}
        self.modules = dict.fromkeys(plain) | {name: name for name in packed}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename what the checkpoint names as the model in vLLM does."""
        # Newer mappers also tell q, k and v which merged layer they go to; here their own names are needed.
        renaming = getattr(hf_to_vllm_mapper, "get_rename_mapper", lambda: hf_to_vllm_mapper)()
        self.modules = renaming.apply_dict(self.modules)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer of vLLM's.

        Raises:
            NotImplementedError: it has packed experts.
            ValueError: it merges modules of which some are packed and some not.
        """
        if isinstance(layer, Experts):
            path = prefix.partition(".routed_experts")[0] + "."
            if found := [name for name, packed in self.modules.items() if packed and name.startswith(path)]:
                raise NotImplementedError(f"trirun: packed experts do not run on vLLM: {found[0]}; use trirun serve")
            return None
        if isinstance(layer, VocabParallelEmbedding):
            specs = self._specs(self._vocabulary_modules(prefix), prefix)
            return TrirunVocabularyMethod(specs[0], self.format.activation_bits, prefix) if specs else None
        if not isinstance(layer, LinearBase):
            return None
        head, _, last = prefix.rpartition(".")
        # A layer may be merged in vLLM, and merged in the checkpoint too.
        merged = [] if prefix in self.modules else self.packed_modules_mapping.get(last, [])
        specs = self._specs([f"{head}.{part}" if head else part for part in merged] or [prefix], prefix)
        return TrirunLinearMethod(specs, self.format.activation_bits, prefix) if specs else UnquantizedLinearMethod()

    def _vocabulary_modules(self, prefix: str) -> list[str]:
        """The module that an embedding or a head is stored as: a head that is tied to the embedding has none."""
        if prefix in self.modules or not prefix.endswith("lm_head"):
            return [prefix]
        return [name for name in self.modules if name.endswith("embed_tokens")][:1]

    def _specs(self, modules: list[str], prefix: str) -> list[QuantSpec]:
        """The grids of these modules, which a layer merges; none where they are not packed."""
        stored = [name for module in modules if (name := self.modules.get(module)) is not None]
        if stored and len(stored) < len(modules):
            raise ValueError(f"trirun: {prefix} merges {', '.join(modules)}, of which some are packed and some are not")
        return [self.format.spec(name) for name in stored]
