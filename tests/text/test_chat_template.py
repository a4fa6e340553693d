"""Chat templates filled in without transformers: the same text, in the same sandbox."""

import json
import os
import subprocess
import sys

import pytest
from jinja2 import TemplateError

from trirun_cli.errors import InputError
from trirun_cli.text.detokenizer import load_tokenizer, quick_tokenizer
from trirun_cli.text.tokenizer import LightTokenizer, light_tokenizer

TEMPLATES = {
    "blocks and their whitespace": """
    {%- for message in messages %}
        {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
    {% endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "special tokens, tools, dates": """{{ bos_token }}{% if tools is not none %}tools{% endif %}
    {%- if date is not defined %}{% set date = strftime_now('%Y') %}{% endif %}{{ date }}
    {%- for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}
    {{- unk_token is defined }} {{ pad_token }} {{ sep_token is defined }} {{ documents is none }}""",
    "namespaces and loop controls": """{% set ns = namespace(last=-1, self='x') %}{% for m in messages %}
    {% if m.role == 'assistant' %}{% continue %}{% endif %}{% set ns.last = loop.index0 %}{% endfor %}{{ ns.last }}
    {{ ns.self }}{% for m in messages[::-1] %}{% if loop.index > 2 %}{% break %}{% endif %}
    {{- m.content }}{% endfor %}""",
    "JSON and dictionaries": """{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}
    {{- dict(a=1, b='é<>') | tojson }}
    {%- for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}""",
    "transformers' own statement": """{% set x = 1 %}{% for m in messages %}{% generation %}
    {%- set x = 2 %}{{ m.content }}{{ x }}
    {% endgeneration %}{{ x }}{% endfor %}""",
}
MESSAGES = [
    {"role": "system", "content": "  Be <kind> & 'brief'. "},
    {"role": "user", "content": "naïve 日本語 🙂"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And\nnow?"},
]


@pytest.fixture
def with_template(copy_of, plain_model):
    """``with_template(source)`` → the model with it in tokenizer_config.json, or in its own file."""

    def write(source, *, file=False):
        model = copy_of(plain_model)
        if file:
            (model / "chat_template.jinja").write_text(source, encoding="utf-8")
        else:
            config = json.loads((model / "tokenizer_config.json").read_text())
            (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
        return model

    return write


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("file", [False, True], ids=["config", "file"])
def test_text_is_transformers_own(with_template, source, file):
    model = with_template(source, file=file)
    light, full = quick_tokenizer(model), load_tokenizer(model)
    assert isinstance(light, LightTokenizer) and light.chat_template == full.chat_template
    for messages in (MESSAGES, MESSAGES[:1], MESSAGES[1:2]):
        for prompt in (False, True):
            options = {"add_generation_prompt": prompt, "tokenize": False}
            assert light.apply_chat_template(messages, **options) == full.apply_chat_template(messages, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ nothing.here }}",
        "{% if %}",
        "{% frobnicate %}",
    ],
)
def test_what_transformers_refuses_is_refused(with_template, source):
    model = with_template(source)
    for tokenizer in (light_tokenizer(model), load_tokenizer(model)):
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(MESSAGES, tokenize=False)


def test_several_templates_are_left_to_transformers(with_template):
    model = with_template([{"name": "default", "template": "x"}])
    assert light_tokenizer(model) is None
    (model / "chat_template.jinja").write_text("{{ 1 }}")
    assert (
        light_tokenizer(model).chat_template == "{{ 1 }}" and light_tokenizer(model, chat=False).chat_template is None
    )
    (model / "additional_chat_templates").mkdir()
    assert light_tokenizer(model) is None


RICH = """{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}{{ mood }}
{%- for m in messages %}[{{ m.role }}]{{ (m.content or '') | trim if trims else m.content }}
{%- if m.reasoning_content %}({{ m.reasoning_content }}{{ m.thinking }}){% endif %}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ bos_token }}"""
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]
RICH_MESSAGES = [
    {"role": "user", "content": "And there?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS, "reasoning": "Look."},
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "It rains, ", "thinking": "Say it."},
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": CALLS, "documents": [{"title": "a", "text": "b"}], "mood": "kind", "bos_token": "other"},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"continue_final_message": True, "trims": True},
    ],
    ids=str,
)
def test_tools_calls_and_reasoning_are_filled_in_as_transformers_does(with_template, options):
    model = with_template(RICH)
    light, full = light_tokenizer(model), load_tokenizer(model)
    text = light.apply_chat_template(RICH_MESSAGES, tokenize=False, **options)
    assert text == full.apply_chat_template(RICH_MESSAGES, tokenize=False, **options)


@pytest.mark.parametrize(
    ("source", "last"),
    [("no message", "x"), (RICH, None), ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "small")],
)
def test_what_cannot_be_continued_is_refused_as_transformers_does(with_template, source, last):
    model = with_template(source)
    for tokenizer in (light_tokenizer(model), load_tokenizer(model)):
        with pytest.raises(ValueError):
            messages = [{"role": "assistant", "content": last}]
            tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize("given", [False, True], ids=["the model's", "another"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}\n{% if %}", r"TemplateSyntaxError in line 2"),
        ("{{ messages | frobnicate }}", "No filter named 'frobnicate'"),
        ("{{ messages[0].content.parts.first }}", "has no attribute 'parts'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_broken_template_is_refused_with_its_file(with_template, tmp_path, given, source, words):
    pytest.importorskip("fastapi", reason="needs trirun[serve]")
    from trirun_cli.server.model import serving_tokenizer

    model = with_template("{{ messages[0].content }}" if given else source, file=True)
    arguments = (source, tmp_path / "mine.jinja") if given else ()
    with pytest.raises(InputError, match=words) as refused:
        serving_tokenizer(model, *arguments)
    assert str(tmp_path / "mine.jinja" if given else model / "chat_template.jinja") in str(refused.value)


def test_a_template_that_refuses_a_message_in_its_own_words_is_not_broken(with_template):
    pytest.importorskip("fastapi", reason="needs trirun[serve]")
    from trirun_cli.server.model import serving_tokenizer

    source = "{{ raise_exception('a system message must come first') }}"
    assert serving_tokenizer(with_template(source)).chat_template == source


def test_a_broken_template_can_be_replaced(with_template):
    pytest.importorskip("fastapi", reason="needs trirun[serve]")
    from trirun_cli.server.model import serving_tokenizer

    assert serving_tokenizer(with_template("{% if %}"), "{{ 1 }}").chat_template == "{{ 1 }}"


LIGHT = """
import sys
from trirun_cli.commands.app import main
sys.argv = ["trirun", *sys.argv[1:]]
try:
    main()
finally:
    assert "jinja2" in sys.modules and not {"torch", "transformers"} & set(sys.modules)
"""


def run_script(script, *arguments, stdin=""):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments), "--device", "cpu"]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=60)


def test_chat_needs_neither_torch_nor_transformers(copy_of, packed):
    model = copy_of(packed)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = run_script(LIGHT, "chat", "--checkpoint", model, "--max-tokens", "3", stdin="The sea\n")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


SERVE = """
import signal, sys
import trirun_cli.server.http.run as run
from trirun_cli.commands.app import main
# Ends the server as soon as it takes requests.
own = run.serve
def serve(*args, ready, **options):
    def then():
        ready()
        signal.raise_signal(signal.SIGTERM)
    own(*args, ready=then, **options)
run.serve = serve
sys.argv = ["trirun", *sys.argv[1:]]
try:
    main()
finally:
    assert "jinja2" in sys.modules
    print("torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.parametrize("given", [False, True], ids=["the model's template", "--chat-template"])
def test_a_server_with_a_chat_template_needs_neither_torch_nor_transformers(copy_of, packed, tmp_path, given):
    pytest.importorskip("fastapi", reason="needs trirun[serve]")
    model, template = copy_of(packed), tmp_path / "template.jinja"
    file = template if given else model / "chat_template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}")
    options = ("--chat-template", template) if given else ()
    done = run_script(SERVE, "serve", "-c", model, "--port", "0", *options)
    assert done.returncode == 0 and done.stdout == "False False\n", done.stderr
