"""A chat template is a program of whoever made the model: it neither runs for ever nor fills the memory."""

import time

import pytest

pytest.importorskip("jinja2")

import jinja2

from trirun_cli.text.chat_template import LightTemplate, TemplateTimeout

HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = {
    "a loop": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a loop within a macro": (
        "{% macro f(r) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}{% endmacro %}{{ f(range(99999)) }}"
    ),
    "calls of calls": "{% macro f(n) %}{{ f(n-1) if n }}{{ f(n-1) if n }}{% endmacro %}{{ f(60) }}",
    "a text that grows": (
        "{% set n = namespace(t='x' * 1000000) %}{% for i in range(99999) %}{% set n.t = n.t + 'y' %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_runs_for_ever_is_stopped(source):
    began = time.thread_time()
    with pytest.raises(TemplateTimeout, match=r"takes more than 0\.1 s"):
        LightTemplate(source, {})(HELLO, seconds=0.1)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    "source", ["{{ 'x' * n }}", "{{ n * 'x' }}", "{{ [1] * n }}", "{{ 2 ** n }}", "{{ lipsum(n) }}"]
)
def test_a_template_makes_nothing_huge(source):
    with pytest.raises(jinja2.TemplateError):
        LightTemplate(source, {})(HELLO, n=2_000_000_000, seconds=0.1)


def test_what_templates_do_is_not_in_the_way():
    source = "{% for i in range(3) %}{{ loop.index * 2 }}{{ '=' * 3 }}{{ 2 ** i }};{% endfor %}"
    assert LightTemplate(source, {})(HELLO, seconds=1) == "2===1;4===2;6===4;"


def test_the_time_is_the_callers_not_the_messages():
    """A variable of the conversation does not set the limit, and no limit is none."""
    source = "{% for i in range(3) %}{{ i }}{% endfor %}"
    assert LightTemplate(source, {})(HELLO, deadline_=(0, 0)) == "012"
    with pytest.raises(TemplateTimeout):
        LightTemplate(source, {})(HELLO, seconds=-1, deadline_=None)
