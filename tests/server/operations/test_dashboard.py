"""Metrics have vLLM's names, and the dashboard asks for nothing that is not exported."""

import asyncio
import json
import re
import time
from importlib import resources

import trirun_cli.server.operations

BOARD = json.loads((resources.files(trirun_cli.server.operations) / "grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
VARIABLES = [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
# Of vLLM's documentation, what means the same here.
OF_VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
}


def samples(site):
    async def scenario():
        async with site() as demo:
            await demo.post("/v1/completions", {"prompt": "x"})
            watching = asyncio.ensure_future(demo.pool.metrics.watch_loop())
            await asyncio.sleep(0.05)
            watching.cancel()
            demo.pool.metrics.of("demo").configured(4, 64, "as asked")
            return (await demo.client.get("/metrics")).text

    lines = asyncio.run(scenario()).splitlines()
    return {line.partition("{")[0].partition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_every_metric_of_the_dashboard_is_exported(site):
    asked = {name for query in QUERIES + VARIABLES for name in re.findall(r"\b(?:vllm:|trirun:|process_)\w+", query)}
    assert len(asked) > 15 and not asked - samples(site)


def test_metrics_of_vllm_have_its_names(site):
    assert not {f"vllm:{name}" for name in OF_VLLM} - samples(site)


def test_panels_do_not_overlap_and_have_titles_of_their_own():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    titles = [panel["title"] for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) and len(set(titles)) == len(titles)


def test_the_event_loops_delay_is_seen(site):
    async def scenario():
        async with site() as demo:
            watching = asyncio.ensure_future(demo.pool.metrics.watch_loop())
            await asyncio.sleep(0.02)
            time.sleep(0.1)
            await asyncio.sleep(0.02)
            watching.cancel()
            return demo.pool.metrics.registry.get_sample_value("trirun:event_loop_delay_max_seconds")

    # The block may begin anywhere between two looks.
    assert asyncio.run(scenario()) >= 0.085


def test_what_the_loop_works_is_told_from_what_it_waits(site):
    async def scenario(block):
        async with site() as demo:
            watching = asyncio.ensure_future(demo.pool.metrics.watch_loop())
            await asyncio.sleep(0.02)
            block()
            await asyncio.sleep(0.02)
            watching.cancel()
            return demo.pool.metrics.registry.get_sample_value("trirun:event_loop_busy_max_seconds")

    def work():
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    assert asyncio.run(scenario(lambda: time.sleep(0.1))) < 0.05
    assert asyncio.run(scenario(work)) >= 0.085
