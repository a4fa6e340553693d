"""Several scripted models in one server: which are loaded, who waits, and what fails alone."""

import asyncio

import pytest

from tests.server.pool.conftest import PATH, TEXTS, until
from trirun_cli.errors import InputError, OutOfMemoryError


def test_each_request_gets_its_model_with_one_loaded_at_once(house):
    async def scenario():
        async with house(max_loaded=1) as demo:
            names = list(TEXTS)

            async def client(number):
                for turn in range(3):
                    name = names[(number + turn) % 3]
                    assert await demo.text(name) == TEXTS[name]

            await asyncio.gather(*map(client, range(64)))
            assert demo.most == 1
            # Each load serves all who wait for it: far fewer loads than requests.
            assert len(demo.loads) <= 24

    asyncio.run(scenario())


def test_names_that_are_not_there_or_not_said(house, check_error):
    async def scenario():
        async with house() as demo:
            error = check_error(await demo.ask("lake"), 404, "model")
            assert error["code"] == "model_not_found" and "sea, hill, wood" in error["message"]
            answer = await demo.client.post(PATH, json={"prompt": "x"})
            assert "sea, hill, wood" in check_error(answer, 400, "model")["message"]
            assert demo.loads == ["sea"]

    asyncio.run(scenario())


def test_every_path_goes_by_the_model(house):
    async def scenario():
        async with house() as demo:
            chat = {"model": "hill", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
            answer = (await demo.client.post("/v1/chat/completions", json=chat)).json()
            assert answer["choices"][0]["message"]["content"] == TEXTS["hill"]
            answer = (await demo.client.post("/v1/messages", json=chat)).json()
            assert answer["content"][0]["text"] == TEXTS["hill"]
            asked = {"model": "hill", "input": "x", "max_output_tokens": 20}
            answer = (await demo.client.post("/v1/responses", json=asked)).json()
            assert answer["output"][0]["content"][0]["text"] == TEXTS["hill"]
            assert demo.loads == ["sea", "hill"]
            answer = (await demo.client.post("/tokenize", json={"model": "wood", "prompt": "x"})).json()
            assert answer["count"] == 1 and demo.loads == ["sea", "hill", "wood"]
            answer = await demo.client.post("/detokenize", json={"model": "sea", "tokens": answer["tokens"]})
            assert answer.json() == {"prompt": "x"}
            assert (await demo.client.get("/tokenizer_info")).status_code == 400
            assert (await demo.client.get("/tokenizer_info?model=sea")).status_code == 200
            count = await demo.client.post("/v1/messages/count_tokens", json=chat | {"model": "none"})
            assert count.status_code == 404 and count.json()["type"] == "error"

    asyncio.run(scenario())


def test_models_and_metrics_are_by_name(house):
    async def scenario():
        async with house(max_loaded=1) as demo:
            cards = (await demo.client.get("/v1/models")).json()["data"]
            shown = [(card["id"], card["loaded"], card["max_model_len"]) for card in cards]
            assert shown == [("sea", True, 64), ("hill", False, 48), ("wood", False, 48)]
            await demo.text("sea")
            before = _metric(await demo.client.get("/metrics"), "generation_tokens_total", "sea")
            await demo.text("hill")
            assert (await demo.states()) == {"sea": "unloaded", "hill": "loaded", "wood": "unloaded"}
            metrics = await demo.client.get("/metrics")
            assert _metric(metrics, "generation_tokens_total", "hill") > 0
            # What a model has counted outlasts its unloading.
            assert _metric(metrics, "generation_tokens_total", "sea") == before > 0

    asyncio.run(scenario())


def _metric(answer, name, model):
    start = f'{name}{{model_name="{model}"}} '
    return next(float(line.rpartition(" ")[2]) for line in answer.text.splitlines() if start in line)


def test_the_least_recently_used_idle_model_goes_and_no_busy_one(house):
    async def scenario():
        async with house(max_loaded=2) as demo:
            await demo.text("hill")
            demo.runners["sea"].go.clear()
            held = asyncio.create_task(demo.text("sea"))
            await until(lambda: demo.runners["sea"].bound)
            # "sea" is used less recently, and busy.
            await demo.text("hill")
            await demo.text("wood")
            assert await demo.states() == {"sea": "loaded", "hill": "unloaded", "wood": "loaded"}
            demo.runners["sea"].go.set()
            assert await held == TEXTS["sea"]

    asyncio.run(scenario())


def test_a_stream_keeps_its_model_and_a_busy_model_lets_others_have_a_turn(house):
    async def scenario():
        async with house(max_loaded=1) as demo:
            demo.runners["sea"].go.clear()
            held = asyncio.create_task(demo.ask("sea", stream=True))
            await until(lambda: demo.runners["sea"].bound)
            other = asyncio.create_task(demo.text("hill"))
            await asyncio.sleep(0.05)
            # A later request for the busy model does not keep the other from its turn.
            later = asyncio.create_task(demo.text("sea"))
            await asyncio.sleep(0.05)
            assert demo.loads == ["sea"]
            demo.runners["sea"].go.set()
            assert "[DONE]" in (await held).text
            assert await other == TEXTS["hill"] and await later == TEXTS["sea"]
            assert demo.loads == ["sea", "hill", "sea"]

    asyncio.run(scenario())


def test_a_failed_load_is_one_error_and_hurts_nobody_else(house, check_error):
    async def scenario():
        async with house(max_loaded=3) as demo:
            demo.failure["hill"] = InputError("hill/model.safetensors: no such file")
            demo.failure["wood"] = OutOfMemoryError("16 sequences do not fit the memory")
            for name, status in (("hill", 500), ("wood", 503)):
                for answer in await asyncio.gather(*(demo.ask(name) for _ in range(3))):
                    error = check_error(answer, status)
                    assert error["code"] == "model_load_failed"
                    assert repr(name) in error["message"] and str(demo.failure[name]) in error["message"]
            assert (await demo.states())["hill"] == "failed"
            assert await demo.text("sea") == TEXTS["sea"]
            demo.failure.clear()
            assert await demo.text("hill") == TEXTS["hill"]

    asyncio.run(scenario())


def test_out_of_memory_unloads_an_idle_model_and_tries_again(house):
    async def scenario():
        async with house() as demo:
            load = demo.load

            def tight(name, text):
                if demo.alive:
                    raise OutOfMemoryError("too little")
                return load(name, text)

            demo.load = tight
            assert await demo.text("hill") == TEXTS["hill"]
            assert await demo.states() == {"sea": "unloaded", "hill": "loaded", "wood": "unloaded"}

    asyncio.run(scenario())


def test_a_dead_engine_is_loaded_again(house, check_error):
    async def scenario():
        async with house() as demo:
            demo.runners["sea"].failure = RuntimeError("the device is gone")
            check_error(await demo.ask("sea"), 500)
            assert await demo.text("hill") == TEXTS["hill"]
            assert await demo.text("sea") == TEXTS["sea"]
            assert demo.loads == ["sea", "hill", "sea"]

    asyncio.run(scenario())


@pytest.mark.parametrize("texts", [TEXTS, {"sea": TEXTS["sea"]}])
def test_an_idle_model_is_unloaded_and_comes_back(house, texts):
    async def scenario():
        async with house(texts, idle_s=0.1) as demo:
            for _ in range(3):
                assert await demo.text("sea") == TEXTS["sea"]
                await until(lambda: not demo.alive)
                assert (await demo.client.get("/health")).status_code == 200
            assert len(demo.loads) >= 3

    asyncio.run(scenario())


def test_a_client_that_leaves_waits_no_longer(house):
    async def scenario():
        async with house(max_loaded=1) as demo:
            demo.gate.clear()
            scope = {
                "type": "http",
                "method": "POST",
                "path": PATH,
                "headers": [(b"content-type", b"application/json")],
            }
            scope |= {"query_string": b"", "raw_path": PATH.encode(), "root_path": "", "scheme": "http"}
            body = b'{"model": "hill", "prompt": "x"}'
            messages, sent = asyncio.Queue(), []
            messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

            async def send(message):
                sent.append(message)

            call = asyncio.create_task(demo.app(scope, messages.get, send))
            await until(lambda: demo.loads == ["sea", "hill"])
            messages.put_nowait({"type": "http.disconnect"})
            await asyncio.wait_for(call, 10)
            assert sent[0]["status"] == 499
            demo.gate.set()
            assert await demo.text("wood") == TEXTS["wood"]
            assert not any(entry.held for entry in demo.pool.entries)

    asyncio.run(scenario())


def test_too_many_who_wait_get_429(house, check_error):
    async def scenario():
        async with house(max_loaded=1, max_waiting=2) as demo:
            demo.gate.clear()
            waiting = [asyncio.create_task(demo.text("hill")) for _ in range(3)]
            await until(lambda: demo.loads == ["sea", "hill"])
            assert check_error(await demo.ask("hill"), 429)["code"] == "queue_full"
            demo.gate.set()
            assert await asyncio.gather(*waiting) == [TEXTS["hill"]] * 3

    asyncio.run(scenario())


def test_draining_during_a_load_tells_those_who_wait(house, check_error):
    async def scenario():
        async with house() as demo:
            demo.gate.clear()
            waiting = asyncio.create_task(demo.ask("hill"))
            await until(lambda: demo.loads == ["sea", "hill"])
            demo.pool.shut()
            assert check_error(await asyncio.wait_for(waiting, 5), 503)["code"] == "shutting_down"
            assert check_error(await demo.ask("sea"), 503)["code"] == "draining"
            demo.gate.set()
            await until(lambda: demo.alive == {"sea", "hill"})

    asyncio.run(scenario())
