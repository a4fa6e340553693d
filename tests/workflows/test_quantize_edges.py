"""``trirun quantize`` at its edges: stopped and failed runs, published recipes, short text, models that do not fit."""

import hashlib
import json

import yaml
from trirun_gptq.block.walk import BlockRun
from trirun_gptq.errors import QuantizationError

OPTIONS = ("--preset", "fast", "--group-size", "64", "--samples", "4", "--seqlen", "64")


def digest(directory):
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_overwriting_a_checkpoint_continues_a_run_of_the_same_kind(trirun, plain_model, tmp_path, monkeypatch):
    command, run = ("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, "--overwrite"), BlockRun.run

    def stop(self):
        if self.index == 1:
            raise KeyboardInterrupt
        return run(self)

    with monkeypatch.context() as patched:
        patched.setattr(BlockRun, "run", stop)
        assert trirun(*command)[0] == 130
    code, _, err = trirun(*command)
    assert code == 0 and err.count("taken from the stopped run") == 1


def test_an_end_that_fails_leaves_blocks_that_can_be_published(trirun, plain_model, tmp_path, monkeypatch):
    def fail(*_):
        raise QuantizationError("no more")

    (tmp_path / "own.yaml").write_text("{samples: 4, seqlen: 64, group_size: 64, e2e_steps: 2}")
    command = ("quantize", plain_model, "--out", tmp_path / "Q", "--recipe", tmp_path / "own.yaml")
    with monkeypatch.context() as patched:
        patched.setattr("trirun_gptq.pipeline.tune", fail)
        code, _, err = trirun(*command)
    assert code == 3 and "with --no-end-to-end it writes the checkpoint of these blocks" in " ".join(err.split())
    code, _, err = trirun(*command, "--no-end-to-end")
    assert code == 0 and err.count("taken from the stopped run") == 2


def test_the_recipe_that_is_published_is_a_recipe_and_names_no_place(trirun, plain_model, tmp_path):
    out = tmp_path / "P"
    assert trirun("quantize", plain_model, "--out", out, *OPTIONS)[0] == 0
    published = (out / "trirun_recipe.yaml").read_text()
    made = yaml.safe_load(published)
    assert str(plain_model.parent) not in published and str(out.parent) not in published and "configs/" not in published
    assert made["model"]["name"] == plain_model.name and made["calibration"]["name"] == "calibration.txt"
    assert (
        made["model"]["sha256"]["model.safetensors"] == digest(plain_model) and len(made["calibration"]["sha256"]) == 64
    )
    code, _, _ = trirun("quantize", plain_model, "--out", tmp_path / "Q", "--recipe", out / "trirun_recipe.yaml")
    assert code == 0 and digest(tmp_path / "Q") == digest(out)
    (tmp_path / "packed.yaml").write_text("{trirun: 1.0.0, command: pack, model: M}")
    code, _, err = trirun("quantize", plain_model, "--out", tmp_path / "R", "--recipe", tmp_path / "packed.yaml")
    assert code == 3 and "was written by trirun pack and holds no recipe of trirun quantize" in " ".join(err.split())


def test_text_that_is_too_short_is_taken_as_it_is(trirun, plain_model, tmp_path):
    (tmp_path / "short.txt").write_text("The sea was calm, and the old house stood above it. " * 60)
    command = ("quantize", plain_model, "--preset", "fast", "--group-size", "64", "--seqlen", "64", "--json", "--out")
    code, text, err = trirun(*command, tmp_path / "Q", "--calibration", tmp_path / "short.txt")
    recipe = json.loads(text)["recipe"]
    found = recipe["samples"] + recipe["held_out"]
    assert code == 0 and 2 <= found < 30 and 1 <= recipe["held_out"] <= found / 5 + 1
    warned = f"holds {found} sequences of 64 tokens: calibrating on {recipe['samples']}, {recipe['held_out']} held out"
    assert warned in " ".join(err.split())
    # A number that was asked for is kept, or refused.
    code, _, err = trirun(*command, tmp_path / "R", "--calibration", tmp_path / "short.txt", "--samples", "100")
    assert code == 3 and "108 sequences of 64 need 6912" in " ".join(err.split())
    (tmp_path / "word.txt").write_text("The sea.")
    code, _, err = trirun(*command, tmp_path / "R", "--calibration", tmp_path / "word.txt")
    assert code == 3 and "tokens, 136 sequences of 64 need 8704" in " ".join(err.split())


def test_all_layers_that_a_group_size_does_not_fit_are_named(trirun, save_llama, tmp_path):
    source = save_llama(hidden_size=96, intermediate_size=160, num_attention_heads=4, head_dim=24)
    code, _, err = trirun("quantize", source, "--out", tmp_path / "Q", "--preset", "fast")
    err = " ".join(err.split())
    assert code == 2 and "model.layers.0.mlp.down_proj and 1 more down_proj have k=160 input features" in err
    assert (
        "q_proj and 1 more q_proj have k=96" in err and "--override 'down_proj=g32'" in err and "--group-size 32" in err
    )


def test_what_is_kept_as_asked_is_said_and_recorded(trirun, plain_model, tmp_path):
    overrides = ("--override", "embed_tokens=keep", "--override", r"\.0\..*q_proj=keep")
    code, _, err = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, *overrides)
    kept = {"model.embed_tokens": "Embedding [8192, 128]", "model.layers.0.self_attn.q_proj": "Linear [128, 128]"}
    said = "1 × model.embed_tokens (Embedding [8192, 128]), 1 × model.layers.*.self_attn.q_proj (Linear [128, 128])"
    assert code == 0 and f"kept in 16 bits, as the recipe or --override says: {said}" in " ".join(err.split())
    made = yaml.safe_load((tmp_path / "Q" / "trirun_recipe.yaml").read_text())
    assert made["kept"] == kept and made["recipe"]["overrides"]["embed_tokens"] == {"keep": True}


def test_matrices_of_other_modules_are_named_where_there_is_no_linear_layer():
    import transformers

    from trirun_cli.workflows.output import matrix_kinds

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96))
    found = matrix_kinds(model.transformer.h)
    assert found == ": its matrices belong to 8 Conv1D modules, and only nn.Linear is packed"
