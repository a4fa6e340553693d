"""Two processes on one machine quantize as one: sums over both parts of the text decide, both carry the same model."""

from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing
from trirun_gptq.run import distributed as ranks

from tests.gptq.models import RECIPE, calibration, make_model, run


def work(rank, world, directory, settings, port):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    written, report, _ = run(directory / "model", replace(RECIPE, **settings))
    torch.save((dict(written), report.tokens, report.predictions), directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def loaded():
    """Processes begin as copies of one that has loaded what both need, which takes longer than what they do."""
    multiprocessing.set_forkserver_preload(["transformers.models.llama.modeling_llama", "tests.gptq.models"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"refine_steps": 8, "e2e_steps": 4, "e2e_lr": 5e-3}])
def test_two_processes_are_one_run(tmp_path, settings, unused_port, loaded):
    make_model(tmp_path / "model")
    arguments = (2, tmp_path, settings, unused_port)
    multiprocessing.start_processes(work, arguments, nprocs=2, start_method="forkserver")
    (first, tokens, predictions), (second, *others) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert [tokens, predictions] == others and tokens == 6 * 24
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone, report, _ = run(tmp_path / "model", replace(RECIPE, **settings))
    assert report.predictions.tokens == predictions.tokens
    assert predictions.divergence == pytest.approx(report.predictions.divergence, rel=0.15)
    if not settings:
        # The same sums in another order: a handful of ties may fall the other way.
        codes = [name for name in alone if alone[name].dtype == torch.int32]
        same = [(alone[name] == first[name]).float().mean() for name in codes if "layers.0.self_attn.q" in name]
        assert min(same) > 0.9


def test_shares_are_equal(monkeypatch):
    sequences = calibration(7)
    assert ranks.share(sequences) == sequences and ranks.total_of(3, 0.5) == [3, 0.5]
    monkeypatch.setattr(ranks, "world", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        parts.append(ranks.share(sequences))
    assert [len(part) for part in parts] == [2, 2, 2]
    assert len({id(sequence) for part in parts for sequence in part}) == 6
