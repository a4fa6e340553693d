"""What scripts/fuzz.py feeds: every reader of bytes that others have made, and whole inputs to start from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_files
import fuzz_models
import fuzz_requests
import fuzz_texts
from fuzz_seeds import (
    ANSWER,
    BLOCK,
    BLOCK_FACTS,
    CONFIGS,
    FORMATS,
    HEADER,
    PROMPT,
    RECIPE,
    SIZES,
    TOKENIZER,
    TRAIN_FACTS,
    TRAINING,
    checkpoint,
    dumped,
    gguf_bytes,
    mapping,
    safetensors_bytes,
    value,
)

MESSAGES = [{"role": "user", "content": "a"}]


@dataclass(frozen=True, slots=True)
class Target:
    """A reader.

    Attributes:
        seeds: whole inputs. read: reads one, given a folder in memory that it may write to.
        structured: the share of inputs that are JSON, changed as such; the others are changed as bytes.
        below: levels of the JSON that are left as they are, since they are the harness' and no file's: 2 are the whole
            and the values of its keys.
    """

    seeds: list[bytes]
    read: Callable[[bytes, Path], Any]
    structured: float = 0.8
    below: int = 0


def _safetensors(raw: bytes, folder: Path) -> None:
    from trirun_kernels.weights.safetensors_dir import SafetensorsDir

    (folder / "model.safetensors").write_bytes(raw)
    opened = SafetensorsDir(folder)
    for tensor in opened:
        opened.tensor(tensor)


def _index(raw: bytes, folder: Path) -> None:
    from trirun_kernels.weights.safetensors_dir import SafetensorsDir

    (folder / "a.safetensors").write_bytes(safetensors_bytes({"w": ["F16", [2]]}))
    (folder / "model.safetensors.index.json").write_bytes(raw)
    SafetensorsDir(folder)


def _config(raw: bytes, folder: Path) -> None:
    from trirun_cli.checkpoint.model_dir import read_config
    from trirun_cli.models.description import UnsupportedModel, gpu_decoder_shape, longest_context

    (folder / "config.json").write_bytes(raw)
    config = read_config(folder)
    try:
        longest_context(config)
        gpu_decoder_shape(config)
    except UnsupportedModel as error:
        assert str(error)


def _checkpoint(raw: bytes, folder: Path) -> None:
    """A directory as ``{"config", "tensors": {name: [dtype, shape]}}``: opened, and every packed module read."""
    from trirun_cli.checkpoint.facts import module_facts, totals
    from trirun_cli.checkpoint.formats import open_foreign
    from trirun_cli.checkpoint.model_dir import ModelDir
    from trirun_cli.checkpoint.reader import Checkpoint

    checkpoint(raw, folder)
    source = ModelDir(folder)
    if source.quant_method == "trirun":
        packed = Checkpoint(folder)
        totals(packed, [module_facts(packed, each) for each in packed.modules])
        return
    foreign = open_foreign(source)
    if foreign is None:
        return
    for module in {module for name in source if (module := foreign.packed(name))}:
        foreign.read(module)
        foreign.dense(module)


def _recipe(raw: bytes, folder: Path) -> None:
    from trirun_gptq.recipe import Recipe

    Recipe.from_dict(mapping(raw))


def _train_recipe(raw: bytes, folder: Path) -> None:
    from trirun_gptq.train.recipe import TrainRecipe

    TrainRecipe.from_dict(mapping(raw))


def _yaml(raw: bytes, folder: Path) -> None:
    from trirun_gptq.recipe import load_recipe

    (folder / "recipe.yaml").write_bytes(raw)
    load_recipe(folder / "recipe.yaml")


def _prompts(raw: bytes, folder: Path) -> None:
    from trirun_cli.text.prompt_files import read_prompts

    (folder / "prompts.jsonl").write_bytes(raw)
    read_prompts(folder / "prompts.jsonl")


def _answers(raw: bytes, folder: Path) -> None:
    from trirun_cli.text.prompt_files import AnswerFile, PromptLine

    file = folder / "answers.jsonl"
    file.write_bytes(raw.replace(b"DIGEST", b"44136fa355b3") + b"\n")
    answers = AnswerFile(file, {}, resume=True)
    try:
        answers.check([PromptLine(0, "a")])
    finally:
        answers.close()


def _run_state(raw: bytes, folder: Path) -> None:
    from trirun_gptq.run.resume import RunState

    (folder / "state.json").write_bytes(raw)
    RunState(folder, {"format": "2"})


def _block_state(raw: bytes, folder: Path) -> None:
    from trirun_gptq.run.resume import RunState

    whole = value(raw)
    (folder / "block-0000.safetensors").write_bytes(safetensors_bytes(BLOCK, whole))
    RunState(folder, {}).load(0)


def _train_state(raw: bytes, folder: Path) -> None:
    from trirun_gptq.train.state import TrainState

    whole = value(raw)
    (folder / "training.safetensors").write_bytes(safetensors_bytes(TRAINING, whole))
    TrainState(folder, {}).load()


def _requests(raw: bytes, folder: Path) -> None:
    from trirun_cli.eval.request_cache import RequestCache

    (folder / "requests.jsonl").write_bytes(raw + b"\n")
    RequestCache(folder / "requests.jsonl", {}).close()


def _gguf_header(raw: bytes, folder: Path) -> None:
    from trirun_cli.checkpoint.formats.gguf.header import Header

    Header(raw, folder / "model.gguf")  # type: ignore[arg-type]


def _tokenizer(raw: bytes, folder: Path) -> None:
    from trirun_cli.errors import InputError
    from trirun_cli.text.tokenizer import light_tokenizer

    (folder / "tokenizer.json").write_bytes(dumped(TOKENIZER)[0])
    (folder / "tokenizer_config.json").write_bytes(raw)
    if light_tokenizer(folder) is None:
        raise InputError("what this reader does not take goes to transformers")


def _tokenizer_json(raw: bytes, folder: Path) -> None:
    from trirun_cli.errors import InputError
    from trirun_cli.text.tokenizer import light_tokenizer

    (folder / "tokenizer.json").write_bytes(raw)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "b"}')
    tokenizer = light_tokenizer(folder)
    if tokenizer is None:
        raise InputError("what this reader does not take goes to transformers")
    tokenizer.decode(tokenizer("ab a")["input_ids"])


def _generation(raw: bytes, folder: Path) -> None:
    from trirun_cli.engine.generation import sampling_defaults, stop_ids
    from trirun_cli.engine.sampling import SamplingParams

    (folder / "config.json").write_bytes(b"{}")
    (folder / "generation_config.json").write_bytes(raw)
    stop_ids(folder)
    SamplingParams(**sampling_defaults(folder))


def _template(raw: bytes, folder: Path) -> None:
    from jinja2 import TemplateError

    from trirun_cli.text.chat_template import LightTemplate

    with contextlib.suppress(TemplateError):
        template = LightTemplate(raw.decode("utf-8", "replace"), {})
        try:
            template(MESSAGES, tools=[], add_generation_prompt=True, seconds=0.5)
        except MemoryError:
            raise
        # A program may end in any error, and whoever renders one says so.
        except Exception:
            return


TARGETS = {
    "safetensors": Target([HEADER], _safetensors, 0),
    "index": Target(dumped({"metadata": {}, "weight_map": {"w": "a.safetensors"}}), _index),
    "config": Target(dumped(*(SIZES | each for each in CONFIGS)), _config),
    **{name: Target(dumped(whole), _checkpoint, 1, 2) for name, whole in FORMATS.items()},
    "recipe": Target(dumped(RECIPE), _recipe, 1),
    "train_recipe": Target(dumped({"method": "learned", "steps": 4, "lr": 0.1, "ignore": ["a"]}), _train_recipe, 1),
    "yaml": Target(
        [b"name: &a x\ngrid: ternary\n", b"ignore: [a, 'b']\ndamp: 1e-2\n", b"---\nseed: 0x1f # a\n"], _yaml, 0
    ),
    "prompts": Target(dumped(PROMPT), _prompts),
    "answers": Target(dumped(ANSWER), _answers),
    "run_state": Target(dumped({"format": "2"}), _run_state),
    "block_state": Target(dumped(BLOCK_FACTS), _block_state, 1),
    "train_state": Target(dumped(TRAIN_FACTS), _train_state, 1),
    "requests": Target(dumped({"schema": "trirun.eval.requests/1"}), _requests),
    "gguf_header": Target([gguf_bytes()], _gguf_header, 0),
    "gguf": Target(fuzz_models.GGUF, fuzz_models.gguf, 0),
    "gguf_types": Target(fuzz_models.GGUF_TYPES, fuzz_models.gguf, 0),
    "gguf_part": Target([fuzz_models.PART], fuzz_models.gguf_part, 0),
    "tokenizer_config": Target(
        dumped({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "b"}, "chat_template": "x"}),
        _tokenizer,
    ),
    "tokenizer": Target(dumped(TOKENIZER), _tokenizer_json),
    "generation": Target(
        dumped({"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "eos_token_id": [1, 2]}),
        _generation,
    ),
    "decoder": Target(dumped(*fuzz_models.CHECKPOINTS), fuzz_models.decoder, 1, 2),
    "rewritten": Target(dumped(*fuzz_models.CHECKPOINTS[::2]), fuzz_models.rewritten, 1, 2),
    "sums": Target(fuzz_files.SUMS, fuzz_files.sums, 0),
    "record": Target(fuzz_files.RECORD, fuzz_files.record, 0),
    "generated": Target([fuzz_files.GENERATED], fuzz_files.generated, 0),
    "calibration": Target(dumped(*fuzz_files.TEXTS), fuzz_files.calibration),
    "rows": Target(dumped(*fuzz_files.ROWS), fuzz_files.rows),
    "csv": Target(fuzz_files.CSV, fuzz_files.csv_rows, 0),
    "exported": Target(dumped(*fuzz_files.EXPORTED), fuzz_files.exported, 1),
    "names": Target(dumped(*fuzz_files.NAMES), fuzz_files.names, 1),
    "schema": Target(dumped(*fuzz_texts.SCHEMAS), fuzz_texts.schema, 1),
    "regex": Target(fuzz_texts.EXPRESSIONS, fuzz_texts.expression, 0),
    "grammar": Target(fuzz_texts.GRAMMARS, fuzz_texts.grammar, 0),
    "vocabulary": Target(dumped(TOKENIZER), fuzz_texts.vocabulary),
    "headers": Target(fuzz_requests.HEADERS, fuzz_requests.headers, 0),
    "answered": Target(dumped(*fuzz_requests.ANSWERED), fuzz_requests.answered),
    "calls": Target(fuzz_texts.CALLS, fuzz_texts.calls, 0),
    "http": Target(dumped(*fuzz_requests.BODIES), fuzz_requests.http),
    "chat_template": Target(
        [b"{% for m in messages %}{{ m['role'] | tojson }}{% endfor %}{% set n = namespace(a=1) %}"], _template, 0
    ),
}
