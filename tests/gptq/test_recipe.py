"""Recipes: strict keys, types and ranges; overrides by pattern; a lossless trip through plain values."""

from pathlib import Path

import pytest
from trirun_gptq.errors import QuantizationError
from trirun_gptq.patterns import matches
from trirun_gptq.recipe import Recipe, load_recipe
from trirun_kernels import QuantSpec

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group_sise": 64}, "unknown key 'group_sise'; did you mean 'group_size'?"),
        ({"grid": "sined"}, "unknown grid 'sined'; did you mean 'signed'?"),
        ({"wbits": 4}, "wbits=4: only 2 is supported"),
        ({"group_size": 100}, "group_size=100 is not one of"),
        ({"group_size": None}, "group_size must be int, got None"),
        ({"sweeps": True}, "sweeps must be int, got True"),
        ({"clip": 1}, "clip must be bool, got 1"),
        ({"damp": "small"}, "damp must be a float, got 'small'"),
        ({"damp": 0}, r"damp=0.0: a fraction in \(0, 1\]"),
        ({"samples": 0}, "samples=0: at least 1"),
        ({"refine_steps": 5, "held_out": 0}, "refine_steps needs held_out > 0"),
        ({"correction": 0.5, "held_out": 0}, "correction needs held_out > 0"),
        ({"ignore": "lm_head"}, "ignore must be a list of strings"),
        ({"ignore": ["("]}, r"'\(' is not a regular expression"),
        ({"overrides": {"down": {"grop_size": 64}}}, "unknown key 'grop_size'; did you mean 'group_size'"),
        ({"overrides": {"down": {"group_size": 48}}}, "group_size=48 is not one of"),
        ({"overrides": {"down": {"group_size": 0}}}, "group_size=0 is not one of"),
        ({"overrides": {"down": {"grid": ""}}}, "unknown grid ''"),
        ({"refine_lr": -1}, "refine_lr=-1.0: a number of at least 0"),
        ({"refine_scale_lr": float("inf")}, "refine_scale_lr=inf: a number of at least 0"),
        ({"e2e_lr": float("nan")}, "e2e_lr=nan: a number of at least 0"),
        ({"e2e_code_lr": -1}, "e2e_code_lr=-1.0: a number of at least 0"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    with pytest.raises(QuantizationError, match=message):
        Recipe.from_dict(values)


def test_plain_values_round_trip():
    override = {"group_size": -1, "grid": "zero"}
    values = {"name": "mine", "group_size": 64, "ignore": ["k_proj"], "overrides": {"down": override}}
    recipe = Recipe.from_dict(values)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.to_dict()["overrides"] == values["overrides"]


def test_the_last_matching_override_wins():
    recipe = Recipe.from_dict(
        {
            "ignore": ["q_proj"],
            "overrides": {"mlp": {"group_size": 64}, "down": {"grid": "ternary"}, r"\.0\.": {"keep": True}},
        }
    )
    assert recipe.choice("layers.1.self_attn.k_proj") == (QuantSpec(128, 1.0), False)
    assert recipe.choice("layers.1.mlp.down_proj") == (QuantSpec(64, 1.0), True)
    assert recipe.choice("layers.0.mlp.down_proj") is None
    assert recipe.choice("layers.1.self_attn.q_proj") is None
    last = Recipe.from_dict({"overrides": {"mlp": {"keep": True}, "down": {"group_size": 64}}})
    assert last.choice("layers.0.mlp.up_proj") is None and last.choice("layers.0.mlp.down_proj").spec.group_size == 64


def test_yaml_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nrefine_lr: 1e-4\nsweeps: 3\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.refine_lr, recipe.sweeps) == ("mine", 1e-4, 3)
    path.write_text("sweps: 3\n")
    with pytest.raises(QuantizationError, match=r"mine.yaml: recipe: unknown key 'sweps'; did you mean 'sweeps'"):
        load_recipe(path)
    path.write_text("a: [1\n")
    with pytest.raises(QuantizationError, match="not valid YAML"):
        load_recipe(path)
    path.write_text("- 1\n")
    with pytest.raises(QuantizationError, match="a mapping of keys to values is needed, got list"):
        load_recipe(path)
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(QuantizationError, match=r"mine.yaml: not UTF-8 text"):
        load_recipe(path)
    with pytest.raises(QuantizationError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_the_fast_preset_is_what_a_recipe_is_without_choices():
    assert load_recipe(CONFIGS / "fast.yaml") == Recipe()


def test_a_pattern_that_would_take_forever_is_refused():
    # Python's own search of this pattern in this name does not end within hours.
    module = "model.layers.0.self_attn.q_proj"
    with pytest.raises(QuantizationError, match=r"takes more than 0\.1 s to be looked for in model"):
        matches(r"(?:.|\w)+[A-Z]$", module, seconds=0.1)
    assert matches("self_attn|up$", module) and not matches("mlp", module)
    assert Recipe(ignore=("q_proj",)).candidates(module) == ()
