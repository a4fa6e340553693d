"""Small random models, and one call that quantizes them: what the tests of whole runs share."""

import torch
import transformers
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.recipe import Recipe
from trirun_gptq.run.progress import Stage, Warned
from trirun_gptq.run.report import BlockReport, ModuleReport
from trirun_kernels import PackedWeight, dequantize

from tests import small_models

RECIPE = Recipe(group_size=32, grid="signed", samples=6, held_out=2, seqlen=24, sweeps=1)
SIZES = small_models.SIZES | {"vocab_size": 120, "intermediate_size": 96, "max_position_embeddings": 64}


class Tensors(dict):
    """A writer that remembers, and refuses a name given twice."""

    def add(self, name, tensor):
        assert name not in self and tensor.device.type == "cpu"
        self[name] = tensor.clone()


class Log:
    """A progress callback that remembers."""

    def __init__(self):
        self.blocks, self.modules, self.stages, self.warnings = [], [], set(), []

    def __call__(self, event):
        match event:
            case BlockReport():
                self.blocks.append(event)
            case ModuleReport():
                self.modules.append(event)
            case Stage(name, done, total):
                assert 0 <= done <= total
                self.stages.add(name)
            case Warned(message):
                self.warnings.append(message)


def make_model(directory, family="Llama", dtype=torch.float16, **extra):
    """A small random model of a family, saved as a checkpoint, with weights large enough to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    model.save_pretrained(directory)
    return directory


def calibration(count=8, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 120, (length,), generator=generator) for _ in range(count)]


def run(directory, recipe=RECIPE, sequences=None, **kwargs):
    written, log = Tensors(), Log()
    report = quantize_model(directory, recipe, sequences or calibration(), written, log, **kwargs)
    return written, report, log


def load_result(directory, written, report):
    """The quantized model as a dense float32 one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for module in report.modules:
        parts = (written[f"{module.name}.{key}"] for key in ("weight", "weight_scale"))
        packed = PackedWeight(*parts, written.get(f"{module.name}.weight_zero"), module.n, module.k, module.spec)
        model.get_submodule(module.name).weight.data.copy_(dequantize(packed))
    return model
