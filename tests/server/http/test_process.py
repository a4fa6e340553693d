"""``trirun serve`` as a process: real sockets, real clients, clients that disconnect, and the ways it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

openai = pytest.importorskip("openai", reason="needs trirun[dev]")

STORY = "The old house stood alone upon the hill, and"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def generated(checkpoint):
    """What ``trirun generate`` continues the story with, greedily: 24 tokens."""
    command = [sys.executable, "-m", "trirun_cli", "generate", "-c", checkpoint, "-p", STORY, "-n", "24", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["text"]


def name_of(client):
    return client.models.list().data[0].id


def test_openais_client_gets_what_generate_writes(client, generated):
    options = {"model": name_of(client), "prompt": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)
    assert whole.choices[0].text == generated and whole.usage.completion_tokens == 24
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == generated
    assert chunks[-1].usage.completion_tokens == 24


def test_openais_client_understands_every_error(client):
    name = name_of(client)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=name, prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=name, prompt="x" * 10_000_000)
    assert large.value.status_code == 413


def test_many_at_once_each_as_if_alone(server, client):
    name = name_of(client)
    prompts = [f"{STORY} number {i}" for i in range(10)]

    def ask(prompt):
        stream = client.completions.create(model=name, prompt=prompt, max_tokens=20, temperature=0, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    alone = [ask(prompt) for prompt in prompts]
    together = [None] * len(prompts)
    threads = [
        threading.Thread(target=lambda i=i: together.__setitem__(i, ask(prompts[i]))) for i in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and len(set(alone)) > 1


def test_a_seed_repeats(client):
    options = {"model": name_of(client), "prompt": STORY, "max_tokens": 12, "temperature": 1.5}
    first, again, other = (client.completions.create(**options, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other
    pair = client.completions.create(**options, seed=1, n=2).choices
    assert pair[0].text == first and pair[1].text == other


def test_lm_eval_gets_the_likelihoods_of_trirun_eval(server, checkpoint):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from trirun_cli.integrations.lm_eval import TrirunLM

    pairs = [
        (STORY, " the wind was cold."),
        ("It was", " a dark night; naïve 日本 followed."),
        ("", "The sea was calm."),
        ("one two three four", " five"),
    ]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    remote = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=os.path.basename(checkpoint),
        tokenizer=str(checkpoint),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        batch_size=4,
    )
    own = TrirunLM(str(checkpoint))
    got, want = remote.loglikelihood(requests), own.loglikelihood(requests)
    for (likelihood, greedy), (wanted, wanted_greedy) in zip(got, want, strict=True):
        assert likelihood == pytest.approx(wanted, abs=2e-4) and greedy == wanted_greedy
    text = "The sea was calm, and the ship lay still. " * 40
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    assert remote.loglikelihood_rolling(rolling)[0] == pytest.approx(own.loglikelihood_rolling(rolling)[0], rel=1e-4)


def test_lm_evals_remote_tokenizer(server, checkpoint):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.utils import check_remote_tokenizer_support

    url = f"{server.url}/v1/completions"
    assert check_remote_tokenizer_support(url)
    options = {"base_url": url, "model": os.path.basename(checkpoint), "tokenized_requests": True, "batch_size": 4}
    remote = LocalCompletionsAPI(tokenizer_backend="remote", **options)
    local = LocalCompletionsAPI(tokenizer_backend="huggingface", tokenizer=str(checkpoint), **options)
    assert remote.eot_token_id == local.eot_token_id and remote.prefix_token_id == local.prefix_token_id
    text = "The sea was calm, naïve 日本. " * 200
    assert remote.tok_encode(text) == local.tok_encode(text) and len(remote.tok_encode(text)) > 1024
    assert remote.tokenizer.decode(remote.tok_encode(text)) == text
    requests = [Instance("loglikelihood", {}, (STORY, " the wind was cold."), 0)]
    assert remote.loglikelihood(requests) == local.loglikelihood(requests)


@pytest.mark.slow
def test_a_key_a_name_and_a_chat_template(start_server, tmp_path):
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (tmp_path / "key.txt").write_text("s3cret\n")
    files = ("--chat-template", tmp_path / "template.jinja", "--api-key-file", tmp_path / "key.txt")
    server = start_server(*files, "--served-model-name", "story")
    assert server.facts["models"] == ["story"]
    url = f"{server.url}/v1"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    client = openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0, timeout=60)
    options = {"model": "story", "messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options).choices[0]
    streamed = list(client.chat.completions.create(**options, stream=True))
    assert whole.message.role == "assistant" and whole.finish_reason == "length" and whole.message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.message.content
    code, err = server.stop()
    assert code == 0 and "s3cret" not in err


# A client that reads one event and is killed while the rest is coming: seconds of work, even where a token is quick.
VICTIM = """
import http.client, os, signal, sys, json
connection = http.client.HTTPConnection(sys.argv[1])
body = {"prompt": "The old house", "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": sys.argv[2] == "stream"}
connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
print("sent", flush=True)
if body["stream"]:
    connection.getresponse().read1(10)
    os.kill(os.getpid(), signal.SIGKILL)
connection.getresponse()
"""


@pytest.mark.parametrize("mode", ["stream", "whole"])
def test_a_disconnect_cancels_the_request(server, client, mode):
    ended = server.metric("request_success_total")
    address = server.url.removeprefix("http://")
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, address, mode], stdout=subprocess.PIPE)
    assert victim.stdout.readline() == b"sent\n"
    if mode == "whole":
        while not server.metric("num_requests_running"):
            assert victim.poll() is None
        victim.kill()
    assert victim.wait(20) == -signal.SIGKILL
    victim.stdout.close()
    assert server.idle()
    assert server.metric("request_success_total") == ended + 8
    aborted = [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if '"abort"' in line]
    assert aborted and float(aborted[0].rsplit(" ", 1)[1]) >= 1


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /%00%ff/../v1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken_http_ends_one_connection_only(server, sent):
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    # The server may hang up before all of it is sent.
    with socket.create_connection((host, int(port)), timeout=5) as connection, contextlib.suppress(OSError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            answer += piece
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer[:20]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_term_lets_running_answers_end(start_server):
    server = start_server("--drain", "20", "--ctx", "256", "--threads", "1")
    assert server.facts["context"] == 256 and "1 thread" in server.facts["engine"]
    body = {"prompt": STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    code, err = server.process.wait(30), server.process.stderr.read()
    assert code == 0 and "Traceback" not in err
    # Nobody said how many at once: what was chosen is said, and why.
    assert server.facts["slots"] == 64 and server.facts["slots_reason"].startswith("the most by default; the cache has")
    assert "64 requests at once (the most by default; the cache has room for" in err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_draining_server_says_so(start_server):
    server = start_server("--drain", "2")
    body = {"prompt": "x", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True, "n": 16}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        # A router sees that it should send to another replica: the socket is open, and the server says why.
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            pass
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    for reply in (health, refused):
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "draining"
    assert server.process.wait(30) == 0


@pytest.mark.slow
def test_answers_that_outlast_the_draining_are_ended_properly(start_server):
    server = start_server("--drain", "0")
    body = {"prompt": "x", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True, "n": 16}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    code, err = server.process.wait(30), server.process.stderr.read()
    assert code == 0 and "Traceback" not in err


@pytest.mark.slow
def test_a_second_interrupt_tells_every_client_and_ends_at_once(start_server):
    server = start_server("--drain", "60")
    body = {"prompt": "x", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "n": 16}
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    host, port = server.url.removeprefix("http://").split(":")
    whole = []
    asking = threading.Thread(
        target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=30))
    )
    with (
        socket.create_connection((host, int(port)), timeout=10) as slow,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30) as answer,
    ):
        slow.sendall(half)
        lines = answer.iter_lines()
        next(lines)
        asking.start()
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 17:
            assert asking.is_alive()
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        rest = [line for line in lines if line]
        assert b" 503 " in slow.recv(65536)[:20]
    asking.join()
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "shutting_down"
    code, err = server.process.wait(30), server.process.stderr.read()
    assert code == 130 and "Traceback" not in err and "ERROR" not in err
