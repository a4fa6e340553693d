"""The table of formats (trirun_cli/checkpoint/formats/README.md), walked: every cell is held against bytes and values
that the named program made."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import trirun_cli.checkpoint.formats
from tests.checkpoint.formats.gguf_writer import DATA, one_tensor
from tests.checkpoint.formats.packed_modules import packed_module
from tests.checkpoint.formats.table_models import directory_model, gguf_model, greedy
from trirun_cli import LLM, SamplingParams
from trirun_cli.checkpoint.formats import bitnet, compressed_tensors, mlx, open_foreign
from trirun_cli.checkpoint.formats.gguf.blocks import read_codes, read_values
from trirun_cli.checkpoint.formats.gguf.file import GgufFile
from trirun_cli.checkpoint.formats.gguf.floats import read_floats
from trirun_cli.checkpoint.formats.gguf.writer import PACKED, encode
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.workflows.export import TARGETS, export
from trirun_cli.workflows.pack import pack

GUIDE = Path(trirun_cli.checkpoint.formats.__file__).with_name("README.md")
BLOCKS = np.load(DATA / "gguf_blocks.npz")
PROMPT, NEW_TOKENS = [1, 2, 3], 6


@dataclass(frozen=True)
class Row:
    name: str
    imported: str
    exported: str
    exact: str
    runs: str
    compared: str

    @property
    def target(self):
        return self.exported.strip("`") if self.exported != "–" else None


def table():
    lines = re.findall(r"^\| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return [Row(*line.split(" | ")) for line in lines[1:]]


@dataclass(frozen=True)
class Gguf:
    """Blocks of another program: the array of gguf_blocks.npz, and the type's id."""

    blocks: str
    kind: int


@dataclass(frozen=True)
class Module:
    """A module of another program: of packed_modules.npz, and how config.json describes it."""

    fixture: str
    section: dict = field(default_factory=dict)


def quantization(method, **facts):
    return {"quantization_config": {"quant_method": method} | facts}


_WEIGHTS = {"num_bits": 2, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_HUMMING = {"b_dtype": "uint2", "weight_scale_type": "group", "has_zero_point": False, "weight_scale_group_size": 128}
_LLM_COMPRESSOR = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}
_KEPT = {"modules_to_not_convert": ["lm_head"]}
CASES = {
    "GGUF Q2_0": Gguf("q2_0", 42),
    "GGUF Q2_0, first files (blocks of 128)": Gguf("pq2_0", 42),
    "GGUF PQ2_0": Gguf("pq2_0", 142),
    "GGUF PTQ1_0": Gguf("ptq1_0", 143),
    "GGUF Q1_0": Gguf("q1_0", 41),
    "GGUF TQ1_0": Gguf("tq1_0", 34),
    "GGUF TQ2_0": Gguf("tq2_0", 35),
    "GGUF I2_S": Gguf("i2_s", 36),
    "GGUF IQ1_BN": Gguf("iq1_bn", 134),
    "GGUF IQ2_BN": Gguf("iq2_bn", 135),
    "GGUF F16, ternary values": Gguf("f16", 1),
    "MLX affine, 2 bits": Module("mlx_2bit_bonsai_g128", {"quantization": {"group_size": 128, "bits": 2}}),
    "compressed-tensors pack-quantized, 2 bits": Module(
        "ct_int2_sym_g128", quantization("compressed-tensors", **_LLM_COMPRESSOR)
    ),
    "GPTQ version 1, 2 bits": Module("gptq2_v1_g128", quantization("gptq", bits=2, group_size=128)),
    "GPTQ version 2, 2 bits": Module(
        "gptq2_v2_g128", quantization("gptq", bits=2, group_size=128, checkpoint_format="gptq_v2")
    ),
    "AutoRound, 2 bits": Module(
        "gptq2_v2_g128", quantization("auto-round", bits=2, group_size=128, packing_format="auto_round")
    ),
    "Humming, uint2": Module("humming_uint2_g128", quantization("humming", **_HUMMING)),
    "BitNet, `bitlinear` (divides)": Module("bitnet_bitlinear", quantization("bitnet", **_KEPT)),
    "BitNet, `autobitlinear` (multiplies)": Module(
        "bitnet_autobitlinear", quantization("bitnet", linear_class="autobitlinear", **_KEPT)
    ),
    "BitNet, `autobitlinear` online": Module(
        "online", quantization("bitnet", linear_class="autobitlinear", quantization_mode="online", **_KEPT)
    ),
    "safetensors, ternary values": Module("ternary"),
}
ROWS = {row.name: row for row in table()}


def blocks_of(case):
    """Stored bytes, and values float32 [8, 512], of eight rows."""
    if case.blocks == "f16":
        values = BLOCKS["tq2_0.values"]
        return np.frombuffer(values.astype("<f2").tobytes(), np.uint8), values
    return BLOCKS[f"{case.blocks}.bytes"], BLOCKS[f"{case.blocks}.values"]


def module_of(case):
    """Stored tensors, and values float32 [32, 256]."""
    if case.fixture in ("online", "ternary"):
        values = packed_module("bitnet_autobitlinear")[1]
        if case.fixture == "ternary":
            return {"weight": values.half()}, values.half().float()
        # Latent weights, made ternary as transformers' WeightQuant does when it runs them.
        latent = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * 0.05
        scale = 1.0 / latent.abs().mean().clamp_(min=1e-5)
        return {"weight": latent}, (latent * scale).round().clamp(-1, 1) / scale
    return packed_module(case.fixture)


def test_the_table_names_every_format_and_every_target():
    assert list(ROWS) == list(CASES)
    assert {row.target for row in ROWS.values() if row.target} == set(TARGETS)
    assert {(row.imported, row.runs) for row in ROWS.values()} == {("yes", "yes")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(case, Gguf)])
def test_blocks_have_the_values_of_their_program_and_come_back(tmp_path, name):
    row, case = ROWS[name], CASES[name]
    raw, values = blocks_of(case)
    file = GgufFile(one_tensor(tmp_path / "m.gguf", case.kind, values.shape, raw.tobytes()))
    if case.blocks == "f16":
        assert np.array_equal(read_floats(file, "x").float().numpy(), values) and row.exact == "yes"
        return
    assert np.array_equal(np.concatenate([piece for _, piece in read_values(file, "x")]), values)
    weight, error = read_codes(file, "x")
    check_exactness(row, weight, error, torch.from_numpy(values))
    if row.target is not None:
        blocks = encode(weight, PACKED[row.target.removeprefix("gguf:")])
        assert blocks.numpy().tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if isinstance(case, Module) and case.section])
def test_modules_have_the_values_of_their_program_and_come_back(model_dir, name):
    row, case = ROWS[name], CASES[name]
    tensors, values = module_of(case)
    foreign = open_foreign(model_dir(tensors, **case.section))
    assert torch.equal(foreign.dense("a"), values)
    weight, error = foreign.read("a")
    check_exactness(row, weight, error, values)
    writers = {"mlx": mlx.write, "compressed-tensors": compressed_tensors.write, "bitnet": bitnet.write}
    if row.target is not None:
        made = writers[row.target](weight)
        written = made[0] if isinstance(made, tuple) else made
        assert written.keys() == {f".{part}" for part in tensors}
        for part, tensor in tensors.items():
            # A scale of bfloat16 comes back in fp16.
            same = written[f".{part}"].to(tensor.dtype) if tensor.is_floating_point() else written[f".{part}"]
            assert torch.equal(same.view(torch.uint8), tensor.view(torch.uint8)), part


def check_exactness(row, weight, error, values):
    assert row.exact == ("yes" if error == 0 else "codes") and error <= 2.0**-11
    found = weight.dequantize()
    assert torch.equal(found.sign(), values.sign())
    assert torch.equal(found, values) if error == 0 else torch.allclose(found, values, rtol=error * 1.01, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_the_format_runs_and_is_exported_to_itself(tmp_path, name):
    row, case = ROWS[name], CASES[name]
    if isinstance(case, Gguf):
        raw, values = blocks_of(case)
        tail = raw[-32:].tobytes() if case.blocks == "i2_s" else b""
        source = gguf_model(tmp_path / "m.gguf", case.kind, raw[: len(raw) - len(tail)], tail)
        weight = torch.from_numpy(values).repeat(64, 1)
    else:
        tensors, values = module_of(case)
        tensors, weight = tiled(tensors, values)
        source = directory_model(tmp_path / "m", tensors, case.section)
    report = pack(source, tmp_path / "packed", activation_bits=16)
    assert len(report.modules) == 7 and report.exact == (row.exact == "yes")
    llm = LLM(tmp_path / "packed", device="cpu", threads=1)
    (made,) = llm.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_stop_ids=True))
    assert list(made.token_ids) == greedy(len(weight), weight, PROMPT, NEW_TOKENS)
    if row.target is not None:
        export(tmp_path / "packed", tmp_path / "again", to=row.target)
        again = tmp_path / "again"
        if row.target.startswith("gguf"):
            again = again.rename(tmp_path / "again.gguf")
        pack(again, tmp_path / "twice", activation_bits=16)
        first, second = Checkpoint(tmp_path / "packed"), Checkpoint(tmp_path / "twice")
        assert all(torch.equal(first.packed(m).words, second.packed(m).words) for m in first.modules)


def tiled(tensors, values):
    """A module [32, 256] eight times over, as one of 256 rows, and its values."""
    transposed = "qweight" in tensors
    made = {}
    for part, tensor in tensors.items():
        if part in ("weight_scale", "g_idx") and tensor.dim() == 1:
            made[part] = tensor
        elif part == "weight_shape":
            made[part] = torch.tensor([256, 256])
        else:
            made[part] = tensor.repeat(1, 8) if transposed else tensor.repeat(8, 1)
    if tensors["weight"].dtype != torch.uint8 if "weight" in tensors else True:
        return made, values.repeat(8, 1)
    # BitNet: four rows that are a quarter of the matrix apart share a byte.
    rows = torch.arange(256)
    return made, values[rows % 64 % 8 + rows // 64 * 8]
