"""How long a run will take: from one block that was tried, and some steps of end-to-end training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..block import reconstruct
from ..block.optim import step_batches
from ..model.activations import Batch
from ..recipe import Recipe
from ..whole import training
from ..whole.rehearsal import StepTime
from .preflight import EVALUATIONS_AROUND, Trial
from .timing import TimePlan

# Times that the held-out error is measured while a block is trained and around it; while the model is trained.
BLOCK_EVALUATIONS = reconstruct.EVALUATIONS + EVALUATIONS_AROUND
MODEL_EVALUATIONS = training.EVALUATIONS + 1


def plan_time(
    trial: Trial,
    sizes: Sequence[int],
    finished: Sequence[bool],
    batches: tuple[list[Batch], list[Batch]],
    recipe: Recipe,
    steps: Iterable[tuple[int, StepTime]],
    comparison: float,
    spent: dict[str, float],
) -> TimePlan:
    """What every stage will take.

    Args:
        sizes: parameters of each block. finished: those that a stopped run has left.
        batches: training and held-out ones of this process.
        steps: of each phase of end-to-end training, and what one takes.
        comparison: of the predictions of both models, seconds per token.
        spent: what stages before the blocks have taken.
    """
    (train, tried), (held_out, held_tried) = ((_tokens(part), _tokens(part[:1])) for part in batches)
    weight = [size / sizes[trial.index] for size in sizes]
    taken = {name: stage.seconds for name, stage in trial.stages.items()}
    refined = recipe.refine_steps > 0
    # Batches of natural length share steps; one of them was tried.
    order = step_batches(batches[0], len(batches[0]), recipe.seed)
    share = _tokens([batches[0][index] for step in order for index in step]) / len(order) / tried
    checks = held_out / held_tried if held_out else 0.0
    passes = 2 * (train + held_out) + (0 if refined else held_out)
    tried_passes = 2 * (tried + held_tried) + (0 if refined else held_tried)
    kept = {"load": taken["load"], "forward": taken["forward"] * passes / tried_passes}
    made = dict(kept)
    made["hessian"] = taken.get("hessian", 0.0) * (train + held_out) / (tried + held_tried)
    made["solve"] = taken.get("solve", 0.0)
    if refined:
        evaluations = BLOCK_EVALUATIONS * len(recipe.engines) * trial.evaluation * checks
        made["refine"] = trial.refine_start + recipe.refine_steps * trial.refine_step * share + evaluations
    blocks = tuple(w * sum((kept if done else made).values()) for w, done in zip(weight, finished, strict=True))
    stages = dict(spent)
    for name, seconds in made.items():
        chosen = (w for w, done in zip(weight, finished, strict=True) if name in kept or not done)
        stages[name] = seconds * sum(chosen)
    end, end_steps = 0.0, 0
    evaluation = comparison * held_out + sum(weight) * trial.evaluation * checks
    for count, step in steps:
        end_steps += count
        one = step.block * sum(weight) + step.rest
        # What is done once is done for as many layers as a step is.
        end += count * one * share + step.start * one / (step.block + step.rest) + MODEL_EVALUATIONS * evaluation
    if end:
        stages["end to end"] = end
    elif held_out:
        stages["compare"] = comparison * held_out
    stages["write"] = trial.pack * sum(weight)
    return TimePlan(stages, blocks, end + stages.get("compare", 0.0) + stages["write"], end_steps)


def _tokens(batches: list[Batch]) -> int:
    return sum(batch.tokens.numel() for batch in batches)
