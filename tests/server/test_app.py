"""Routes beside the completions, what the server says of itself, and failures that stay where they are."""

import asyncio
import json

import pytest

PATH = "/v1/completions"


def test_routes_that_are_not_there(site, check_error):
    async def scenario():
        async with site() as demo:
            check_error(await demo.client.get("/v1/nothing"), 404)
            check_error(await demo.client.get(PATH), 405)
            check_error(await demo.client.post("/v1/models"), 405)
            error = check_error(await demo.client.post(PATH, json={"prompt": "x", "model": "gpt-5"}), 404, "model")
            assert error["code"] == "model_not_found"
            check_error(await demo.client.get("/v1/models/other"), 404, "model")

    asyncio.run(scenario())


def test_models(site):
    async def scenario():
        async with site() as demo:
            listed = (await demo.client.get("/v1/models")).json()
            assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["demo", "alias"]
            assert listed["data"][1]["root"] == "demo" and listed["data"][0]["max_model_len"] == 64
            assert (await demo.client.get("/v1/models/alias")).json()["id"] == "alias"
            assert "version" in (await demo.client.get("/version")).json()

    asyncio.run(scenario())


def test_tokenize_and_back(site, check_error, tokenizer):
    async def scenario():
        async with site() as demo:
            _, there = await demo.post("/tokenize", {"prompt": "naïve 日本"})
            assert there["tokens"] == tokenizer("naïve 日本")["input_ids"] and there["count"] == len(there["tokens"])
            _, back = await demo.post("/detokenize", {"tokens": there["tokens"]})
            assert back == {"prompt": "naïve 日本"}
            check_error(await demo.client.post("/detokenize", json={"tokens": [10**9]}), 400, "tokens")

    asyncio.run(scenario())


def test_a_text_longer_than_the_context_is_tokenized(site, tokenizer):
    async def scenario():
        async with site() as demo:
            text = "The sea was calm. " * 500
            status, answer = await demo.post("/tokenize", {"prompt": text})
            assert status == 200 and answer["count"] == len(tokenizer(text)["input_ids"]) > answer["max_model_len"]

    asyncio.run(scenario())


def test_a_conversation_is_tokenized_as_the_model_reads_it(site, check_error, tokenizer):
    messages = [{"role": "user", "content": "Hello"}]

    async def scenario():
        async with site() as demo:
            await demo.post("/v1/chat/completions", {"messages": messages})
            _, answer = await demo.post("/tokenize", {"messages": messages})
            assert tuple(answer["tokens"]) == demo.runner.bound[0].prompt
            _, answer = await demo.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
            assert tokenizer.decode(answer["tokens"]) == "[user]Hello\n"
            check_error(
                await demo.client.post("/tokenize", json={"prompt": "x", "messages": messages}), 400, "messages"
            )
            check_error(await demo.client.post("/tokenize", json={}), 400, "prompt")
            check_error(await demo.client.post("/tokenize", json={"messages": []}), 400, "prompt")
            both = {"messages": messages, "add_generation_prompt": True, "continue_final_message": True}
            check_error(await demo.client.post("/tokenize", json=both), 400, "continue_final_message")

    asyncio.run(scenario())


def test_tokenizer_info(site):
    async def scenario():
        async with site(template="{{ 1 }}") as demo:
            info = (await demo.client.get("/tokenizer_info")).json()
            assert info["eos_token"] == info["bos_token"] == "<|endoftext|>" and info["unk_token"] is None
            assert info["chat_template"] == "{{ 1 }}" and info["model_max_length"] == 64

    asyncio.run(scenario())


def test_the_docs_name_every_endpoint_and_field_and_no_other_host(site):
    async def scenario():
        async with site() as demo:
            page = await demo.client.get("/docs")
            assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
            document = (await demo.client.get("/openapi.json")).json()
            for path in document["paths"]:
                assert path in page.text
            for schema in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody"):
                for field in document["components"]["schemas"][schema]["properties"]:
                    assert f"<code>{field}</code>" in page.text
            assert "<code>service_tier</code>" in page.text and "array of integer" in page.text
            assert "//" not in page.text and "<script" not in page.text and "@import" not in page.text
            assert (await demo.client.get("/redoc")).status_code == 404

    asyncio.run(scenario())


def test_the_openapi_document_tells_how_requests_are_refused(site):
    async def scenario():
        async with site() as demo:
            document = (await demo.client.get("/openapi.json")).json()
            for path, methods in document["paths"].items():
                kind = "AnthropicErrorDocument" if path.startswith("/v1/messages") else "ErrorDocument"
                for operation in methods.values():
                    told = operation["responses"]
                    assert set(told) == {"200", "4XX", "5XX"}
                    (refused,) = told["4XX"]["content"].values()
                    assert refused["schema"]["$ref"] == f"#/components/schemas/{kind}"
            assert "text/event-stream" in document["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]
            assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", r'{"prompt": "a\ud800"}', "prompt"),
        (PATH, r'{"prompt": ["x", "\ud800"]}', "prompt[1]"),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "\udc00"}]}', "messages"),
        ("/v1/chat/completions", r'{"messages": [{"role": "\udc00", "content": "x"}]}', "messages"),
    ],
)
def test_half_a_character_is_no_text(site, check_error, path, body, param):
    async def scenario():
        async with site() as demo:
            answer = await demo.client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert check_error(answer, 400, param)["message"] == f"{param}: is not valid Unicode"
        # A template that quotes it.
        async with site(template="{{ raise_exception('no ' ~ messages[0].role) }}") as demo:
            answer = await demo.client.post(path, content=body, headers={"Content-Type": "application/json"})
            check_error(answer, 400, param)

    asyncio.run(scenario())


def test_loading_draining_and_dead(site, check_error, tokenizer):
    from trirun_cli.server.app import create_app
    from trirun_cli.server.pool.entry import Source
    from trirun_cli.server.pool.pool import Pool

    async def scenario():
        import httpx

        app = create_app(Pool([Source(["demo"], lambda: None)]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert check_error(await client.get("/health"), 503)["code"] == "loading"
            answer = await client.post(PATH, json={"prompt": "x"})
            assert check_error(answer, 503)["code"] == "loading" and int(answer.headers["retry-after"]) > 0
            check_error(await client.get("/v1/models"), 503)
            assert (await client.get("/metrics")).status_code == 200
        async with site() as demo:
            assert (await demo.client.get("/health")).json() == {"status": "ok"}
            demo.pool.draining = True
            assert check_error(await demo.client.get("/health"), 503)["code"] == "draining"
            check_error(await demo.client.post(PATH, json={"prompt": "x"}), 503)

    asyncio.run(scenario())


def test_a_failed_engine_answers_500_and_is_unhealthy(site, check_error):
    async def scenario():
        async with site() as demo:
            demo.runner.go.clear()
            plain = asyncio.create_task(demo.client.post(PATH, json={"prompt": "x"}))
            streamed = asyncio.create_task(demo.client.post(PATH, json={"prompt": "y", "stream": True}))
            await asyncio.sleep(0.1)
            demo.runner.failure = RuntimeError("the device is gone")
            demo.runner.go.set()
            assert "the device is gone" in check_error(await plain, 500)["message"]
            text = (await streamed).text
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert json.loads(events[-2])["error"]["type"] == "server_error" and events[-1] == "[DONE]"
            assert check_error(await demo.client.get("/health"), 503)["code"] == "dead"
            assert check_error(await demo.client.post(PATH, json={"prompt": "x"}), 500)["code"] == "engine_dead"

    asyncio.run(scenario())


def test_a_full_queue_is_429_and_all_or_nothing(site, check_error):
    async def scenario():
        async with site(slots=1, max_waiting=2) as demo:
            demo.runner.go.clear()
            held = [asyncio.create_task(demo.post(PATH, {"prompt": "x"})) for _ in range(2)]
            await asyncio.sleep(0.1)
            # Two of three choices would find no place, so none is taken.
            full = await demo.client.post(PATH, json={"prompt": "x", "n": 3})
            assert check_error(full, 429)["type"] == "rate_limit_error" and int(full.headers["retry-after"]) > 0
            never = await demo.client.post(PATH, json={"prompt": "x", "n": 4})
            assert "never takes more than 3" in check_error(never, 400, "n")["message"]
            demo.runner.go.set()
            assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
            await demo.idle()
            assert len(demo.runner.bound) == 2
            status, _ = await demo.post(PATH, {"prompt": "x", "n": 3})
            assert status == 200

    asyncio.run(scenario())


def test_metrics(site):
    async def scenario():
        async with site() as demo:
            await demo.post(PATH, {"prompt": "The sea", "n": 2})
            await demo.stream(PATH, {"prompt": "The sea", "max_tokens": 2})
            text = (await demo.client.get("/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            label = '{model_name="demo"}'
            assert float(values[f"vllm:num_requests_running{label}"]) == 0
            assert float(values[f"vllm:kv_cache_usage_perc{label}"]) == 0
            prompt = len(demo.runner.bound[0].prompt)
            assert float(values[f"vllm:prompt_tokens_total{label}"]) == 3 * prompt
            assert float(values[f"vllm:generation_tokens_total{label}"]) >= 2
            assert float(values[f"vllm:time_to_first_token_seconds_count{label}"]) == 3
            assert float(values[f"vllm:e2e_request_latency_seconds_count{label}"]) == 3
            assert float(values['vllm:request_success_total{finished_reason="length",model_name="demo"}']) == 1
            config = 'max_model_len="64",max_num_seqs="4",max_num_seqs_reason="as asked",model_name="demo"'
            assert f"trirun:config_info{{{config}}} 1.0" in text
            assert "vllm:inter_token_latency_seconds_bucket" in text and "vllm:num_requests_waiting" in text

    asyncio.run(scenario())


def test_an_answer_that_a_stop_string_ends_has_its_usage_and_queue_time(site):
    async def scenario():
        async with site(" the sea was calm and on and on it went", slots=1) as demo:
            body = {"prompt": "The ship lay still", "max_tokens": 9, "stop": "was"}
            for _ in range(2):
                _, answer = await demo.post(PATH, body)
                await demo.idle()
            assert answer["choices"][0]["finish_reason"] == "stop"
            # The last token of a prompt is always run.
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == answer["usage"]["prompt_tokens"] - 1 > 0
            text = (await demo.client.get("/metrics")).text
            assert 'vllm:request_queue_time_seconds_count{model_name="demo"} 2.0' in text

    asyncio.run(scenario())


def test_a_defect_is_a_500_and_hurts_nobody_else(site, check_error, monkeypatch, caplog):
    async def scenario():
        async with site() as demo:
            monkeypatch.setattr(demo.service, "complete", None)
            answer = await demo.client.post(PATH, json={"prompt": "x"}, headers={"X-Request-Id": "r1"})
            assert check_error(answer, 500)["code"] == "internal_error" and answer.headers["x-request-id"] == "r1"
            assert (await demo.client.get("/health")).status_code == 200

    asyncio.run(scenario())
    assert "request r1 failed" in caplog.text
