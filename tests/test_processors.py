"""How many threads to compute with: what the user says, the environment, the processors, a container's quota."""

import os

import pytest

from trirun_cli import processors


@pytest.fixture
def eight(monkeypatch):
    """Eight processors, and no quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(processors, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("omp", "quota", "threads"),
    [
        (None, None, 8),
        ("3", None, 3),
        ("3,2", None, 3),
        ("99", None, 8),
        ("", None, 8),
        ("many", None, 8),
        ("0", None, 8),
        (None, 2.0, 2),
        (None, 1.5, 2),
        (None, 0.2, 1),
        (None, 64.0, 8),
        ("4", 2.0, 4),
    ],
)
def test_the_number_of_threads(eight, monkeypatch, omp, quota, threads):
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(processors, "cpu_quota", lambda: quota)
    assert processors.default_threads() == threads


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000", "cpu.max": "900000 100000"}, 4.0),
        ("0::/on/the/host\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("4:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quotas_of_control_groups(tmp_path, membership, files, quota):
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    assert processors.cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == quota
    assert processors.cpu_quota(tmp_path / "cgroup", tmp_path / "none") is None


def test_torch_gets_the_number_it_is_given(eight, monkeypatch):
    import torch

    before = torch.get_num_threads()
    try:
        processors.set_torch_threads(3)
        assert torch.get_num_threads() == 3
        processors.set_torch_threads(None)
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(processors, "cpu_quota", lambda: 2.0)
        processors.set_torch_threads(None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_native_decoder_takes_as_many(eight, monkeypatch, packed):
    from trirun_cli.backends.cpu.decoder import NativeDecoder

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert NativeDecoder(packed).threads == 1 and NativeDecoder(packed, threads=2).threads == 2
