"""Chat templates filled in without transformers: the same text, in the same sandbox."""

import json
import os
import subprocess
import sys

import pytest
from jinja2 import TemplateError

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
    ],
)
def test_what_transformers_refuses_is_refused(with_template, source):
    model = with_template(source)
    for tokenizer in (light_tokenizer(model), load_tokenizer(model)):
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize(
    "source",
    ["{% generation %}x{% endgeneration %}", "{% if %}", [{"name": "default", "template": "x"}]],
    ids=["a statement of its own", "no Jinja", "several templates"],
)
def test_other_templates_are_left_to_transformers(with_template, source):
    assert light_tokenizer(with_template(source)) is None


def test_where_messages_may_hold_more_transformers_fills_them_in(with_template):
    model = with_template(TEMPLATES["JSON and dictionaries"])
    assert light_tokenizer(model, rich=True) is None and light_tokenizer(model, chat=False).chat_template is None
    (model / "additional_chat_templates").mkdir()
    assert light_tokenizer(model) is None


LIGHT = """
import sys
from trirun_cli.commands.app import main
sys.argv = ["trirun", "chat", "--checkpoint", sys.argv[1], "--max-tokens", "3", "--device", "cpu"]
try:
    main()
finally:
    assert "jinja2" in sys.modules and not {"torch", "transformers"} & set(sys.modules)
"""


def test_chat_needs_neither_torch_nor_transformers(copy_of, packed):
    model = copy_of(packed)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, model], input="The sea\n", capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
