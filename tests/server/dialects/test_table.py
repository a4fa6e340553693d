"""The tables of the server's guide (trirun_cli/server/README.md), walked: every line is sent to the server."""

import asyncio
import json
import re
from pathlib import Path

import pytest

import trirun_cli.server
from trirun_cli.server.bodies.openai import ChatBody, CompletionBody
from trirun_cli.server.bodies.other_fields import OTHER_FIELDS
from trirun_cli.server.dialects.other_paths import OTHER_PATHS
from trirun_cli.text.tool_calls import parser_for

GUIDE = Path(trirun_cli.server.__file__).with_name("README.md").read_text(encoding="utf-8")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {COMPLETIONS: {"prompt": "Hello"}, CHAT: {"messages": [{"role": "user", "content": "Hello"}]}}
TEMPLATE = (
    "{% if tools %}({{ tools | length }} tools){% endif %}{{ reasoning_effort or '' }}{{ enable_thinking or '' }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def rows(section):
    text = GUIDE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.split(" | ") for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)[1:]]


FIELDS = {name.strip("`"): {COMPLETIONS: here, CHAT: there} for name, here, there in rows("Fields")}
PATHS = {path.strip("`"): here for path, here in rows("Endpoints")}


class Seen:
    """What a request has become: the engine's first request, its prompt's text, and the answer."""

    def __init__(self, demo, tokenizer, text):
        self.request, self.raw = demo.runner.bound[0], text
        self.params, self.prompt = self.request.params, tokenizer.decode(list(self.request.prompt))
        self.answer = json.loads(text) if text.startswith("{") else None

    @property
    def choice(self):
        return self.answer["choices"][0]

    @property
    def text(self):
        return self.choice["text"] if "text" in self.choice else self.choice["message"]["content"]


def param(name, value):
    return {name: value}, lambda seen: getattr(seen.params, name) == value


def bound(**body):
    return body, lambda seen: seen.request.constraint is not None


# Of every field that is acted on: what is sent, and what must come of it.
EFFECTS = {
    "model": ({"model": "alias"}, lambda seen: seen.answer["model"] == "alias"),
    "n": ({"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "stream": ({"stream": True}, lambda seen: seen.raw.startswith("data: ") and seen.raw.endswith("[DONE]\n\n")),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda seen: '"total_tokens"' in seen.raw,
    ),
    **{name: param(name, 0.5) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "top_k": param("top_k", 3),
    "repetition_penalty": param("repetition_penalty", 1.5),
    "seed": param("seed", 7),
    "max_tokens": param("max_tokens", 3),
    "max_completion_tokens": ({"max_completion_tokens": 3}, lambda seen: seen.params.max_tokens == 3),
    "min_tokens": param("min_tokens", 2),
    "stop": ({"stop": "sea"}, lambda seen: seen.text.endswith("the ")),
    "include_stop_str_in_output": (
        {"stop": "sea", "include_stop_str_in_output": True},
        lambda seen: seen.text.endswith("the sea"),
    ),
    "stop_token_ids": ({"stop_token_ids": [5]}, lambda seen: seen.request.stop_ids == {0, 5}),
    "ignore_eos": (
        {"ignore_eos": True, "max_tokens": 20},
        lambda seen: seen.answer["usage"]["completion_tokens"] == 20,
    ),
    "logit_bias": ({"logit_bias": {"5": 1}}, lambda seen: seen.params.logit_bias == {5: 1}),
    ("logprobs", COMPLETIONS): ({"logprobs": 1}, lambda seen: seen.choice["logprobs"]["token_logprobs"]),
    ("logprobs", CHAT): ({"logprobs": True}, lambda seen: seen.choice["logprobs"]["content"]),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda seen: len(seen.choice["logprobs"]["content"][0]["top_logprobs"]) == 2,
    ),
    "return_token_ids": ({"return_token_ids": True}, lambda seen: seen.choice["token_ids"]),
    ("return_tokens_as_token_ids", COMPLETIONS): (
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        lambda seen: seen.choice["logprobs"]["tokens"][0].startswith("token_id:"),
    ),
    ("return_tokens_as_token_ids", CHAT): (
        {"logprobs": True, "return_tokens_as_token_ids": True},
        lambda seen: seen.choice["logprobs"]["content"][0]["token"].startswith("token_id:"),
    ),
    # The stop token is no text either way; tests of the fields have one that is.
    "skip_special_tokens": ({"skip_special_tokens": False}, lambda seen: seen.text == "the sea was calm"),
    "prompt_logprobs": (
        {"prompt_logprobs": 1},
        lambda seen: (seen.answer | seen.choice)["prompt_logprobs"][0] is None,
    ),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 1}, lambda seen: len(seen.request.prompt) == 1),
    "allowed_token_ids": bound(allowed_token_ids=[5, 6]),
    "bad_words": bound(bad_words=["sea"]),
    "include_reasoning": ({"include_reasoning": False}, lambda seen: "reasoning" not in seen.raw),
    "response_format": bound(response_format={"type": "json_object"}),
    "structured_outputs": bound(structured_outputs={"choice": ["a"]}),
    "guided_json": bound(guided_json={"type": "object"}),
    "guided_regex": bound(guided_regex="a+"),
    "guided_choice": bound(guided_choice=["a"]),
    "guided_grammar": bound(guided_grammar='root ::= "a"'),
    "echo": ({"echo": True}, lambda seen: seen.text.startswith("Hello")),
    "add_special_tokens": ({"add_special_tokens": False}, lambda seen: seen.prompt == "Hello"),
    "tools": ({"tools": [TOOL]}, lambda seen: seen.prompt.startswith("(1 tools)")),
    "tool_choice": bound(tools=[TOOL], tool_choice="required"),
    "parallel_tool_calls": (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        lambda seen: seen.request.constraint is not None,
    ),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda seen: seen.prompt.startswith("low")),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"enable_thinking": "think"}},
        lambda seen: seen.prompt.startswith("think"),
    ),
    "add_generation_prompt": ({"add_generation_prompt": False}, lambda seen: seen.prompt == "[user]Hello"),
    "continue_final_message": (
        {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True},
        lambda seen: seen.prompt == "[assistant]So",
    ),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_does_what_its_line_says(site, tokenizer, check_error, name, path):
    stands = FIELDS[name][path]

    async def scenario():
        async with site(template=TEMPLATE, context=200) as demo:
            if stands == "yes":
                body, effect = EFFECTS[(name, path) if (name, path) in EFFECTS else name]
                answer = await demo.client.post(path, json=BODIES[path] | body)
                assert answer.status_code == 200, answer.text
                assert effect(Seen(demo, tokenizer, answer.text)), answer.text
                return
            answer = await demo.client.post(path, json=BODIES[path] | {name: 2 if name == "best_of" else "else"})
            if stands == "refused":
                assert check_error(answer, 400, name)["code"] == "unsupported_parameter"
            else:
                assert answer.status_code == 200, answer.text
                assert Seen(demo, tokenizer, answer.text).text == "the sea was calm"

    if stands != "–":
        assert stands in ("yes", "refused", "no effect")
        asyncio.run(scenario())


def test_the_table_has_every_field_that_the_server_knows():
    known = {*CompletionBody.model_fields, *ChatBody.model_fields, *OTHER_FIELDS} - {"prompt", "messages"}
    assert known == set(FIELDS)


REQUESTS = {
    **BODIES,
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"max_tokens": 4, **BODIES[CHAT]},
    "/v1/messages/count_tokens": BODIES[CHAT],
    "/tokenize": BODIES[CHAT] | {"tools": [TOOL]},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "Hello"},
}


@pytest.mark.parametrize("path", PATHS)
def test_an_endpoint_is_there_or_says_why_not(site, path):
    async def scenario():
        async with site(template=TEMPLATE, context=200) as demo:
            body = REQUESTS.get(path)
            answer = await (demo.client.get(path) if body is None else demo.client.post(path, json=body))
        if PATHS[path] == "yes":
            assert answer.status_code == 200 and answer.content
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "unsupported_endpoint")
            assert OTHER_PATHS[path] in error["message"]

    assert PATHS[path] in ("yes", "refused")
    asyncio.run(scenario())


def test_the_table_has_every_endpoint(site):
    own = {route.path for route in site().app.routes if getattr(route, "include_in_schema", False)}
    assert {path for path in own if "{" not in path} | OTHER_PATHS.keys() == PATHS.keys()


ARGUMENTS = '{"city": "Bonn"}'
FORMS = {
    "Qwen, Hermes": f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>',
    "Llama 3, JSON": f'{{"name": "f", "parameters": {ARGUMENTS}}}',
    "Llama 3.2 and 4, Python": '[f(city="Bonn")]',
    "Mistral, a list": f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]',
    "Mistral, names and arguments": f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}",
    "GPT-OSS, channels": f"<|channel|>commentary to=functions.f<|message|>{ARGUMENTS}",
}


@pytest.mark.parametrize("row", rows("Tools"), ids=lambda row: row[0])
def test_a_form_of_calls_is_read_or_stays_text(row):
    form, template, stands = row
    parser = parser_for(template.strip("`").replace("\\", "") + " tools")
    content, calls = parser.feed(FORMS[form])
    more, rest = parser.flush()
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls + rest]
    if stands == "yes":
        assert (content + more, found) == ("", [("f", {"city": "Bonn"})])
    else:
        assert (stands, content + more, found) == ("no", FORMS[form], [])
