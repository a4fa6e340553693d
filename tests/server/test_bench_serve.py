"""``trirun bench serve``: what it counts, when it asks, and that it notices what is wrong."""

import asyncio
import json
from contextlib import nullcontext

import pytest

pytest.importorskip("aiohttp", reason="needs trirun[serve]")

from trirun_cli.bench.client import Client, Load, Sample
from trirun_cli.bench.serve import LoadResult, differing, pick_prompts, run_load
from trirun_cli.bench.server_process import ServerProcess
from trirun_cli.errors import InputError


class FakeClient:
    """Answers after a while; ``answer(prompt, asked)`` is the text, or an exception's message to fail with."""

    def __init__(self, answer=lambda prompt, asked: "x", seconds=0.01):
        self.answer, self.seconds = answer, seconds
        self.asked, self.at_once, self.most, self.dues = [], 0, 0, []

    async def ask(self, load, prompt, due=None):
        self.asked.append(prompt)
        self.dues.append(due)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        return Sample(prompt, text=self.answer(prompt, len(self.asked)), generated_tokens=1, total_s=self.seconds)


def test_a_closed_loop_keeps_its_clients_busy():
    client = FakeClient()
    result = asyncio.run(run_load(client, Load(["a", "b", "c"], concurrency=4, requests=11)))
    assert len(result.samples) == 11 and client.most == 4
    assert sorted(client.asked) == sorted([0, 1, 2] * 3 + [0, 1])


def test_a_closed_loop_ends_in_time():
    result = asyncio.run(run_load(FakeClient(), Load(["a"], concurrency=2, seconds=0.2)))
    assert 0.2 <= result.seconds < 2 and len(result.samples) > 2


def test_an_open_loop_does_not_wait_for_the_server():
    client = FakeClient(seconds=0.5)
    load = Load(["a"], rate=200, requests=40, seed=1)
    result = asyncio.run(run_load(client, load))
    # 40 requests at 200 per second are all sent before the first is answered.
    assert client.most == 40 and len(result.samples) == 40
    gaps = [after - before for before, after in zip(client.dues, client.dues[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 200, rel=0.6)
    again = FakeClient()
    asyncio.run(run_load(again, load))
    assert [d - again.dues[0] for d in again.dues] == pytest.approx([d - client.dues[0] for d in client.dues], abs=1e-6)


def test_the_report_adds_up():
    samples = [
        Sample(0, first_s=0.1 * i, total_s=0.1 * i + 1, gaps=[0.5, 0.5], generated_tokens=3, prompt_tokens=5)
        for i in range(101)
    ]
    samples += [Sample(1, error="status 429: busy", total_s=9)] * 2
    report = LoadResult(samples, 10, 2.5).document()
    assert report["client_cpu_share"] == 0.25
    assert report["requests"] == 103 and report["errors"] == {"status 429: busy": 2}
    assert report["generated_tokens_per_s"] == pytest.approx(30.3) and report["prompt_tokens"] == 505
    first = report["latency_ms"]["time_to_first_token"]
    assert [first[name] for name in ("p50", "p95", "p99", "mean")] == pytest.approx([5000, 9500, 9900, 5000])
    assert report["latency_ms"]["per_output_token"]["p50"] == pytest.approx(500)
    # What failed has no latency.
    assert report["latency_ms"]["end_to_end"]["p99"] < 11_000
    nothing = LoadResult(samples[-2:], 1, 0).document()
    assert nothing["latency_ms"]["end_to_end"] is None and nothing["generated_tokens"] == 0


def test_the_check_finds_answers_that_a_lone_request_does_not_get():
    load = Load(["a", "b", "c"])
    samples = [Sample(0, text="x"), Sample(1, text="other"), Sample(2, text="x"), Sample(2, text="also other")]
    samples.append(Sample(0, text="half", error="the stream ended without [DONE]"))
    assert asyncio.run(differing(FakeClient(), load, samples)) == [1, 2]


def test_prompts_come_from_the_text_and_the_seed():
    text = " ".join(f"w{i}" for i in range(100))
    prompts = pick_prompts(text, count=5, words=10, seed=3)
    assert all(prompt in text and len(prompt.split()) == 10 for prompt in prompts) and len(set(prompts)) > 1
    assert prompts == pick_prompts(text, count=5, words=10, seed=3) != pick_prompts(text, count=5, words=10, seed=4)
    with pytest.raises(InputError, match="3 words"):
        pick_prompts("a b c", count=1, words=4, seed=0)


def test_streams_that_go_wrong_are_errors():
    from aiohttp import web

    streams = {
        "cut": b'data: {"choices": [{"text": "x"}]}\n\n',
        "failed": b'data: {"error": {"message": "the device is gone"}}\n\ndata: [DONE]\n\n',
        "garbage": b"data: {\n\n",
        "a number": b"data: 5\n\n",
        "an error of its own kind": b'data: {"error": "no more"}\n\n',
        "no text": b'data: {"usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n',
    }

    async def answer(request):
        body = await request.json()
        if body["prompt"] == "busy":
            return web.json_response({"error": {"message": "too many"}}, status=429)
        return web.Response(body=streams[body["prompt"]], content_type="text/event-stream")

    async def scenario():
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with Client(f"http://127.0.0.1:{port}/v1/") as client:
            load = Load([*streams, "busy"])
            samples = [await client.ask(load, i) for i in range(len(load.prompts))]
        await runner.cleanup()
        return dict(zip(load.prompts, samples, strict=True))

    samples = asyncio.run(scenario())
    errors = {prompt: sample.error for prompt, sample in samples.items()}
    assert "without [DONE]" in errors["cut"] and "the device is gone" in errors["failed"] and errors["garbage"]
    assert "not an object" in errors["a number"] and "no more" in errors["an error of its own kind"]
    assert errors["no text"] is None and errors["busy"] == "status 429: too many"
    # Where no text came there was no first text, and no 0 that would flatter the median.
    report = LoadResult(list(samples.values()), 1, 0).document()
    assert report["latency_ms"]["time_to_first_token"] is None and report["generated_tokens"] == 1


@pytest.fixture
def bench(trirun):
    """Run ``trirun bench serve``: (exit code, stdout, stderr)."""
    return lambda *arguments: trirun("bench", "serve", *arguments)


def test_a_running_server(bench, server):
    options = ("--requests", 6, "--max-tokens", 8, "--prompts", 3, "--prompt-words", 8)
    code, out, _ = bench(server.url, "--concurrency", 3, "--check", "--json", *options)
    report = json.loads(out)
    assert code == 0 and report["schema"] == "trirun.bench.serve/1" and report["model"] == "checkpoint"
    assert report["requests"] == 6 and report["errors"] == {} and report["generated_tokens"] <= 48
    assert report["check"] == {"prompts": 3, "differing_prompts": []}
    assert report["latency_ms"]["time_to_first_token"]["p50"] > 0
    code, out, _ = bench(server.url, "--rate", 20, *options)
    assert code == 0 and "20 requests/s at random times" in out and "end to end" in out


def test_failures_are_counted_and_end_with_a_failure(bench, server):
    # No prompt of 3000 words fits the context.
    code, out, err = bench(server.url, "--requests", 2, "--concurrency", 1, "--prompt-words", 3000, "--json")
    report = json.loads(out)
    assert code == 1 and sum(report["errors"].values()) == 2 and "context" in next(iter(report["errors"]))
    assert "2 of 2 requests failed" in err


def test_a_server_of_its_own(bench, checkpoint):
    options = ("--requests", 4, "--concurrency", 2, "--max-tokens", 8, "--serve-options", "--max-batch 2")
    code, out, _ = bench(checkpoint, "--json", *options)
    report = json.loads(out)
    assert code == 0 and report["server"]["slots"] == 2 and report["errors"] == {}


def test_two_backends_take_the_same_load_in_turn(bench, server, checkpoint, monkeypatch):
    started = []

    class Running(nullcontext):
        url, facts, memory = server.url, {"engine": "some"}, [(1.0, 2)]

        def __init__(self, path, options):
            super().__init__(self)
            started.append(options)

    monkeypatch.setattr("trirun_cli.bench.server_process.ServerProcess", Running)
    options = ("--requests", 4, "--concurrency", 2, "--max-tokens", 8, "--serve-options", "--max-batch 2")
    vllm = ("--backend", "trirun", "--backend", "vllm", "--vllm-options", "--dtype 'float32'")
    code, out, _ = bench("--checkpoint", checkpoint, *vllm, *options, "--json")
    report = json.loads(out)
    assert code == 0 and report["schema"] == "trirun.bench.serve.backends/1"
    assert [report[name]["requests"] for name in ("trirun", "vllm")] == [4, 4]
    # The memory of the process that starts vLLM is not vLLM's.
    assert "server_memory" in report["trirun"] and "server_memory" not in report["vllm"]
    assert started == [["--max-batch", "2"], ["--backend", "vllm", "--max-batch", "2", "--", "--dtype", "float32"]]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "or a checkpoint to start one on"),
        (("http://127.0.0.1:1", "--checkpoint", "x"), 2, "both given; one is enough"),
        (("http://127.0.0.1:1", "--rate", "1", "--concurrency", "1"), 2, "open one"),
        (("http://127.0.0.1:1", "--rate", "0"), 2, "--rate 0: more than 0"),
        (("http://127.0.0.1:1", "--seconds", "inf"), 2, "--seconds inf: more than 0, and an end"),
        (("--checkpoint", "x", "--serve-options", "'"), 2, "--serve-options '"),
        (
            ("http://127.0.0.1:1", "--serve-options", "--max-batch 2"),
            2,
            "--serve-options: the server at http://127.0.0.1:1 is running",
        ),
        (("http://127.0.0.1:1", "--backend", "vllm"), 2, "--backend: the server at http://127.0.0.1:1 is running"),
        (("x", "--backend", "sglang"), 2, "--backend sglang: trirun or vllm"),
        (("x", "--vllm-options", "--enforce-eager"), 2, "--vllm-options needs --backend vllm"),
        (("http://127.0.0.1:1", "--check", "--temperature", "1"), 2, "--check needs greedy"),
        (("http://127.0.0.1:1",), 3, "no OpenAI-compatible server"),
        (("nonsense",), 3, "error: nonsense: no such directory\n"),
        (("http://127.0.0.1:1", "--prompt-words", "100000000"), 3, "words"),
        (("--checkpoint", "/nothing", "--requests", "1"), 3, "error: /nothing: no such directory\n"),
        (("/nothing", "--requests", "1"), 3, "error: /nothing: no such directory\n"),
        (("--checkpoint", "x", "--serve-options", "--bogus"), 2, "error: --serve-options --bogus: No such option"),
        (("--checkpoint", "x", "--serve-options", "--port y"), 2, "error: --serve-options --port y: Invalid value"),
    ],
)
def test_bad_calls(bench, arguments, code, words):
    got, _, err = bench(*arguments)
    assert got == code and words in err and err.count("error:") == 1


def test_a_server_that_does_not_start_has_said_why(checkpoint, capfd):
    with pytest.raises(SystemExit) as stop:
        ServerProcess(checkpoint, ["--max-batch", "0"])
    assert stop.value.code == 2
    assert capfd.readouterr().err == "error: --max-batch 0: at least 1\n"


def test_an_interrupt_while_its_server_starts_ends_the_server(checkpoint, monkeypatch):
    started = []

    def interrupted(process):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(ServerProcess, "_wait_until_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(checkpoint)
    assert started[0]._process.poll() is not None
