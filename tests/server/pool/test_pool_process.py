"""``trirun serve`` with several packed checkpoints as a process: memory that comes back, deleted files, signals."""

import os
import shutil
import signal
import threading
import time

import httpx
import pytest

STORY = "The old house stood alone upon the hill, and"
# Growth of the resident memory after the first rounds; the weights alone of one of the models are more.
RSS_BOUND = 6 * 2**20


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c"):
        shutil.copytree(checkpoint, folder / name)
    return folder


@pytest.fixture
def start(start_server, models):
    options = ("--threads", "1", "--max-batch", "2", "--ctx", "128")
    return lambda most: start_server("--max-models", most, *options, several=models)


def ask(server, model, client=httpx):
    body = {"model": model, "prompt": STORY, "max_tokens": 8, "temperature": 0}
    return client.post(f"{server.url}/v1/completions", json=body, timeout=60)


def usage(server):
    """Resident bytes, file descriptors and threads of a server."""
    process = f"/proc/{server.process.pid}"
    with open(f"{process}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task"))


@pytest.mark.slow
def test_unloading_gives_everything_back(start):
    server = start(1)
    texts, seen = set(), []
    for _ in range(20):
        for name in "ab":
            answer = ask(server, name)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
        seen.append(usage(server))
    assert len(texts) == 1
    (settled, descriptors, threads), last = seen[4], seen[-1]
    assert last[0] <= settled + RSS_BOUND, seen
    # A thread that has unloaded a model may just be ending.
    assert last[1] <= descriptors + 1 and last[2] <= threads + 1, seen
    assert server.stop()[0] == 0


@pytest.mark.slow
def test_a_deleted_model_fails_alone(start, models):
    server = start(1)
    shutil.move(models / "c", models.parent / "gone")
    try:
        answer = ask(server, "c")
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "model_load_failed"
        assert "'c'" in answer.json()["error"]["message"] and "no such directory" in answer.json()["error"]["message"]
        # It did not cost another model its place.
        assert httpx.get(f"{server.url}/health").json()["models"]["a"] == "loaded"
    finally:
        shutil.move(models.parent / "gone", models / "c")
    assert ask(server, "c").status_code == 200
    code, err = server.stop()
    assert code == 0 and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_during_loads_end_it_well(start, number):
    server = start(1)
    answers = []
    # Made before: four clients at once take a busy machine longer than the signal waits.
    with httpx.Client() as client:
        asking = [
            threading.Thread(target=lambda name=name: answers.append(ask(server, name, client))) for name in "bcbc"
        ]
        for thread in asking:
            thread.start()
        time.sleep(0.2)
        code, err = server.stop(number)
        for thread in asking:
            thread.join()
    assert code == 0 and "Traceback" not in err
    assert len(answers) == 4 and {answer.status_code for answer in answers} <= {200, 503}
