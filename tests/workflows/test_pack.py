"""``trirun pack``: lossless or not at all."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from trirun_gptq.run.progress import ModuleStarted
from trirun_kernels import dequantize

from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.cuda.weights import load_model
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.checkpoint.writer import CheckpointWriter
from trirun_cli.workflows.pack import pack


def test_every_matrix_is_exact_and_smaller(trirun, ternary_model, tmp_path):
    code, out, _ = trirun("pack", ternary_model, "--out", tmp_path / "T", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.pack/1"
    assert document["exact"] and len(document["modules"]) == 14
    assert all(module["exact"] and module["scale_per"] == "tensor" for module in document["modules"])
    assert document["bytes_after"] < document["bytes_before"]
    source = load_file(ternary_model / "model.safetensors")
    packed = Checkpoint(tmp_path / "T")
    for name in packed.modules:
        assert torch.equal(dequantize(packed.packed(name), torch.float16), source[f"{name}.weight"])
    # What is not a packed matrix is there unchanged; the companions came along.
    assert torch.equal(packed.tensor("model.embed_tokens.weight"), source["model.embed_tokens.weight"])
    for companion in ("tokenizer.json", "generation_config.json", "trirun_recipe.yaml"):
        assert (tmp_path / "T" / companion).is_file()
    assert not (tmp_path / "T.partial").exists()


def test_tied_embeddings_may_be_stored_by_the_name_of_the_head(trirun, ternary_model, packed, stored_by_head, tmp_path):
    assert trirun("pack", stored_by_head(ternary_model), "--out", tmp_path / "T")[0] == 0
    assert "model.embed_tokens.weight" not in Checkpoint(tmp_path / "T") and trirun("verify", tmp_path / "T")[0] == 0
    expected, found = (NativeDecoder(out, threads=1).forward([5, 6, 7]) for out in (packed, tmp_path / "T"))
    assert (found == expected).all()
    # As the CUDA decoder takes it.
    on_gpu = load_model(tmp_path / "T", device=torch.device("cpu"))
    assert torch.equal(on_gpu.embedding, Checkpoint(tmp_path / "T").tensor("lm_head.weight"))


def test_scales_per_row_and_per_group_are_found(save_llama, tmp_path):
    def change(model):
        for layer in model.model.layers:
            for name, module in layer.named_modules():
                if isinstance(module, torch.nn.Linear):
                    n, k = module.weight.shape
                    signs = torch.randint(-1, 2, (n, k)).half()
                    if "mlp" in name:
                        scales = (torch.rand(n, 1) + 0.5).half()
                    else:
                        scales = (torch.rand(n, k // 64) + 0.5).half().repeat_interleave(64, 1)
                    module.weight.data = signs * scales

    source = save_llama(change)
    layers = pack(source, tmp_path / "T").modules
    assert {layer.structure for layer in layers if "mlp" in layer.name} == {"row"}
    assert {layer.structure for layer in layers if "attn" in layer.name} == {"64"}
    assert Checkpoint(tmp_path / "T").format.overrides


def test_a_model_that_is_not_ternary_is_refused_by_name(trirun, plain_model, tmp_path):
    code, out, err = trirun("pack", plain_model, "--out", tmp_path / "T")
    assert code == 3 and out == ""
    assert "is not ternary" in err and "model.layers.0" in err and "worst is row" in err
    assert "trirun quantize makes a model 2-bit" in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_kinds_of_matrices_are_shown_and_each_only_if_asked(trirun, ternary_model, tmp_path):
    _, text, _ = trirun("pack", ternary_model, "--out", tmp_path / "T")
    assert "14 matrices packed" in text and "q_proj" in text and "layers.0" not in text and len(text.splitlines()) < 20
    _, text, _ = trirun("pack", ternary_model, "--out", tmp_path / "T", "--overwrite", "--verbose")
    assert all(f"model.layers.{index}.mlp.up_proj" in text for index in (0, 1))
    assert trirun("pack", ternary_model, "--out", tmp_path / "T", "--overwrite", "-q")[1:] == ("", "")


def test_kept_layers_stay_dense(trirun, save_llama, to_ternary, tmp_path):
    def change(model):
        dense = model.model.layers[0].mlp.down_proj.weight.clone()
        to_ternary(model)
        model.model.layers[0].mlp.down_proj.weight.data = dense

    source = save_llama(change)
    code, _, _ = trirun("pack", source, "--out", tmp_path / "T", "--keep", r"layers\.0\.mlp\.down_proj")
    assert code == 0
    packed = Checkpoint(tmp_path / "T")
    assert "model.layers.0.mlp.down_proj" in packed.format.modules_to_not_convert
    assert packed["model.layers.0.mlp.down_proj.weight"].dtype == "F16"


def test_a_pattern_that_keeps_nothing_is_refused(trirun, ternary_model, tmp_path):
    code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "T", "--keep", "zzz")
    assert code == 2 and "--keep zzz: matches none of the model's modules" in err and not list(tmp_path.iterdir())


def test_sharded_source_and_sharded_output(save_llama, to_ternary, tmp_path):
    source = save_llama(to_ternary, shard_size="300KB", vocab_size=1024)
    assert (source / "model.safetensors.index.json").is_file()
    pack(source, tmp_path / "T")
    whole = ModelDir(source)
    with CheckpointWriter(tmp_path / "S", whole, max_shard_bytes=300_000) as writer:
        packed = Checkpoint(tmp_path / "T")
        for name in packed.names:
            writer.add(name, packed.tensor(name))
        reports = [_Module(name, *packed.shape(name), packed.format.spec(name)) for name in packed.modules]
        writer.finish(reports, [report.name for report in reports], {})
    sharded = Checkpoint(tmp_path / "S")
    assert len(sharded.files) > 1 and sharded.names == packed.names
    assert all(torch.equal(sharded.tensor(name), packed.tensor(name)) for name in packed.names)


def test_nan_weights_are_named(trirun, ternary_model, copy_of, tmp_path):
    damaged = copy_of(ternary_model)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    code, _, err = trirun("pack", damaged, "--out", tmp_path / "T")
    assert code == 3 and "model.layers.1.mlp.up_proj: weight[3, 5] = nan is not finite" in err
    assert not (tmp_path / "T").exists() and not (tmp_path / "T.partial").exists()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_the_old_checkpoint(ternary_model, tmp_path, interrupt):
    pack(ternary_model, tmp_path / "T")
    before = (tmp_path / "T" / "model.safetensors").read_bytes()

    def stop(event):
        if isinstance(event, ModuleStarted) and "layers.1" in event.name:
            raise interrupt

    with pytest.raises(interrupt):
        pack(ternary_model, tmp_path / "T", overwrite=True, progress=stop)
    assert (tmp_path / "T" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["T"]


class _Module:
    def __init__(self, name, n, k, spec):
        self.name, self.n, self.k, self.spec = name, n, k, spec


def test_a_mount_point_is_refused_before_the_work(trirun, ternary_model, tmp_path, monkeypatch):
    (tmp_path / "T").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "T")
    code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "T")
    assert (
        code == 3 and "is a mount point" in err and "name a folder inside it" in err and os.listdir(tmp_path) == ["T"]
    )
    code, _, err = trirun("pack", ternary_model, "--out", "/")
    assert code == 3 and "error: /" in err


def test_weight_files_are_as_readable_as_the_others(ternary_model, tmp_path):
    umask = os.umask(0o027)
    try:
        pack(ternary_model, tmp_path / "T")
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "T").iterdir()} == {0o640}


@pytest.mark.parametrize("place", ["safetensors.torch.save_file", "yaml.safe_dump"])
def test_a_full_disk_is_named(trirun, ternary_model, tmp_path, monkeypatch, place):
    def full(*_, **__):
        if "yaml" in place:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(place, full)
    code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "T")
    assert code == 1 and "T.partial: no space left to write" in " ".join(err.split()) and not list(tmp_path.iterdir())


def test_a_second_run_to_the_same_place_leaves_the_first_alone(trirun, ternary_model, tmp_path):
    (tmp_path / "T.partial").mkdir()
    (tmp_path / "T.partial" / "left by a killed run").write_text("x")
    with CheckpointWriter(tmp_path / "T", ModelDir(ternary_model)) as writer:
        writer.add("a", torch.zeros(3))
        assert list(writer.partial.iterdir()) == []
        writer._close_shard()
        code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "T")
        assert code == 3 and "another run is writing" in err
        assert [path.name for path in writer.partial.iterdir()] == ["shard-0"]
    assert list(tmp_path.iterdir()) == []
    assert trirun("pack", ternary_model, "--out", tmp_path / "T")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["T"]
