"""``trirun chat``: history, commands, what fits the context, and what is reused of it."""

import io
import json
import signal

import pytest

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def chatty(copy_of, packed):
    """The packed model with a chat template."""
    model = copy_of(packed)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return model


def rendered(messages):
    return "".join(f"[{m['role']}] {m['content']}\n" for m in messages) + "[assistant] "


def talk(trirun, model, text, *options, code=0):
    found, out, err = trirun("chat", "-c", model, "--json", "-n", 5, *options, stdin=io.StringIO(text))
    assert found == code, err
    return json.loads(out) if out else None, err


def test_a_conversation_from_a_pipe(trirun, chatty):
    document, err = talk(trirun, chatty, "Hello\n\nTell me more\n", "--stats", "--system", "Be kind")
    roles = [message["role"] for message in document["messages"]]
    assert document["schema"] == "trirun.chat/1" and roles == ["system", "user", "assistant", "user", "assistant"]
    first, second = document["turns"]
    assert first["reused_tokens"] == 0 and 0 < first["prompt_tokens"] < second["prompt_tokens"]
    # The first prompt and all of its answer but the last token are there already when the second one comes.
    assert second["reused_tokens"] == first["prompt_tokens"] + first["generated_tokens"] - 1
    assert f"({second['reused_tokens']} reused)" in err
    # The second answer is that to the whole conversation.
    whole = rendered(document["messages"][:-1])
    _, out, _ = trirun("generate", "-c", chatty, "--no-chat", "-p", whole, "-n", 5, "--json")
    assert json.loads(out)["text"] == document["messages"][-1]["content"]


def test_answers_are_printed_and_nothing_else(trirun, chatty):
    document, _ = talk(trirun, chatty, "Hello\nAgain\n")
    code, out, err = trirun("chat", "-c", chatty, "-n", 5, stdin=io.StringIO("Hello\nAgain\n"))
    answers = [message["content"] for message in document["messages"][1::2]]
    assert code == 0 and out == "".join(f"{answer}\n" for answer in answers) and "Ctrl-C stops an answer" in err


def test_commands(trirun, chatty):
    document, err = talk(trirun, chatty, "Hello\n/reset\n/nonsense\n/help\n/system Be brief\nOnce\n/exit\nNever said\n")
    assert [message["content"] for message in document["messages"][:2]] == ["Be brief", "Once"]
    assert len(document["messages"]) == 3 and len(document["turns"]) == 2
    assert "/nonsense is no command" in err and "forgets the conversation" in err


def test_the_oldest_turns_make_room(trirun, chatty):
    message = "word " * 30
    document, err = talk(trirun, chatty, f"{message}\n" * 5)
    assert "no longer fit" in err and len(document["turns"]) == 5
    assert 2 <= len(document["messages"]) < 10 and document["messages"][0]["role"] == "user"
    assert all(turn["prompt_tokens"] <= 128 - 5 for turn in document["turns"])


def test_a_message_too_long_is_refused_and_forgotten(trirun, chatty):
    document, err = talk(trirun, chatty, f"{'word ' * 300}\nHello\n", code=3)
    assert "the context is 128 (--ctx)" in err
    assert document["messages"][0]["content"] == "Hello" and len(document["messages"]) == 2


def test_models_without_a_template(trirun, packed):
    code, _, err = trirun("chat", "-c", packed, stdin=io.StringIO("Hello\n"))
    assert code == 3 and "no chat template" in err and "--plain" in err
    document, _ = talk(trirun, packed, "Hello\nMore\n", "--plain", "--system", "A talk.")
    said = [message["content"] for message in document["messages"]]
    whole = f"A talk.\n\nUser: {said[1]}\nAssistant:{said[2]}\nUser: {said[3]}\n"
    _, out, _ = trirun("generate", "-c", packed, "-p", f"{whole}Assistant:", "-n", 5, "--stop", "\nUser:", "--json")
    assert json.loads(out)["text"] == said[4]
    first, second = document["turns"]
    assert second["reused_tokens"] == first["prompt_tokens"] + first["generated_tokens"] - 1


def test_a_template_that_refuses(trirun, copy_of, packed):
    model = copy_of(packed)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    document, err = talk(trirun, model, "Hello\n", code=3)
    assert "roles must alternate" in err and document["messages"] == []


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_stops_the_answer_and_not_the_program(trirun, chatty, monkeypatch):
    from trirun_cli.backends.cpu import runner as cpu_runner
    from trirun_cli.engine.engine import Engine

    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 8)
    step, steps, said = Engine.step, [], iter(["Hello\n", KeyboardInterrupt(), "More\n", ""])

    def step_and_interrupt(self):
        steps.append(None)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def readline(self):
            line = next(said)
            if isinstance(line, BaseException):
                raise line
            return line

    monkeypatch.setattr(Engine, "step", step_and_interrupt)
    code, out, err = trirun("chat", "-c", chatty, "-n", 60, "--stats", "--json", stdin=Terminal())
    document = json.loads(out)
    assert code == 0 and [turn["finish_reason"] for turn in document["turns"]] == ["abort", "length"]
    assert 2 <= document["turns"][0]["generated_tokens"] < 60 and len(document["messages"]) == 4
    assert "/exit or Ctrl-D leaves" in err
    steps.clear()
    code, _, _ = trirun("chat", "-c", chatty, "-n", 60, stdin=io.StringIO("Hello\nMore\n"))
    assert code == 130 and len(steps) == 3
