"""Texts of a trained model on the CUDA decoder beside those of the CPU."""

from __future__ import annotations

import pytest
import torch

from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.engine.scoring import ScoringModel
from trirun_cli.workflows.pack import pack


@pytest.mark.gpu
def test_a_thousand_greedy_tokens_are_those_of_the_cpu(shared, tmp_path):
    """Each is the CPU's choice after the same text, wherever its two likeliest tokens differ by more than rounding."""
    pack(shared / "models" / "bookshelf-28m-ternary", tmp_path / "packed")
    texts = {"0": [5, 700, 61], "1": [4000, 12]}
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_stop_ids=True)
    made: dict[str, list[int]] = {name: [] for name in texts}
    engine = Engine(open_runner(tmp_path / "packed", device="cuda", slots=2))
    for event in engine.generate([Request(name, tuple(text), params) for name, text in texts.items()]):
        made[event.request_id] += [token.id for token in event.tokens]
    cpu = ScoringModel(open_runner(tmp_path / "packed", device="cpu", scoring=True, exact=True))
    for name, text in texts.items():
        cpu.reset()
        logits = cpu.forward(torch.tensor(text + made[name][:-1]), last_only=False)[-1000:]
        behind = logits.amax(1) - logits.gather(1, torch.tensor(made[name]).unsqueeze(1)).squeeze(1)
        assert len(made[name]) == 1000 and (behind / logits.std(1)).max() < 5e-3
        assert (behind > 0).float().mean() < 0.01
