"""The page to chat with as a person uses it, in a Chromium: by keys, on a phone, with texts that mean harm."""

import itertools
import json
import time

ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
SHIFT_ENTER = "\ue008\ue007"
ANSWER = (
    "Use `ls`:\n\n```sh\nls <b>all</b>\n```\n\n"
    "## In **short**\n2. one <i>way</i>\n3. `another`\n  - or **none**\nSo a*b*c and 2 ** 3 stay.\n"
    "Then <script>window.bad = 1</script><img src=x onerror='window.bad = 1'>."
)
STORED = "JSON.parse(localStorage.getItem('trirun.talks'))"
IDLE = "document.querySelector('#send').textContent === 'Send' && document.querySelectorAll('article.assistant').length"


def test_a_conversation(serve, browser):
    url, _ = serve(ANSWER, context=2048)
    window = browser(url)
    assert window.js("document.activeElement.id") == "text"
    window.type("first line" + SHIFT_ENTER)
    window.type("<img src=x onerror='window.bad = 1'>" + ENTER)
    window.until(IDLE)
    # The texts are shown as they are; the fence is a block of code.
    assert window.js("document.querySelector('article.user p').textContent").startswith("first line\n<img")
    assert window.js("document.querySelector('article.assistant pre code').textContent") == "ls <b>all</b>"
    assert window.js("document.querySelector('article.assistant p code').textContent") == "ls"
    assert window.js("document.querySelectorAll('article img, article script, article b, article i').length") == 0
    found = window.js("[...document.querySelectorAll('article.assistant > :is(h3, ol, ul, p)')].map(b => b.innerText)")
    assert found == [
        "Use ls:", "In short", "one <i>way</i>\nanother", "or none",
        "So a*b*c and 2 ** 3 stay.\nThen <script>window.bad = 1</script><img src=x onerror='window.bad = 1'>.",
    ]  # fmt: skip
    assert window.js("document.querySelector('article.assistant ol li').value") == 2
    strong = window.js("[...document.querySelectorAll('article.assistant strong')].map(b => b.textContent)")
    assert strong == ["short", "none"]
    assert window.js("window.bad ?? 0") == 0
    assert "tokens/s" in window.js("document.querySelector('article.assistant footer').textContent")
    assert window.js("document.querySelector('[role=status]').textContent") == ANSWER
    window.click("article.assistant footer button")
    window.until(IDLE)
    assert window.js("document.querySelectorAll('article').length") == 2
    # Editing takes the message back into the field.
    window.click("article.user footer button")
    assert window.js("document.querySelector('#text').value").startswith("first line")
    assert window.js("document.querySelectorAll('article').length") == 0 and not window.errors()


def test_conversations_are_kept_renamed_exported_and_deleted(serve, browser, tmp_path):
    url, _ = serve("fine", context=512)
    window = browser(url)
    for text in ("one", "two"):
        window.click("#new")
        window.type(text + ENTER)
        window.until(IDLE)
    window.call("url", url=url)
    titles = "[...document.querySelectorAll('#conversations button:first-child')].map(b => b.textContent)"
    assert window.js(titles)[:2] == ["two", "one"]
    window.click("[aria-label='Rename one']")
    window.call("alert/text", text="renamed")
    window.call("alert/accept")
    assert window.js(titles)[:2] == ["two", "renamed"] and window.js(STORED)[1]["title"] == "renamed"
    window.click("#export")
    file, end = tmp_path / "conversation.json", time.monotonic() + 20
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert [message["content"] for message in json.loads(file.read_text())["messages"]] == ["two", "fine"]
    window.click("[aria-label='Delete two']")
    assert window.js(titles)[0] == "renamed" and window.js(STORED)[0]["title"] == "renamed"


def test_escape_stops_an_answer_and_keeps_it(serve, browser, tokenizer):
    (word,) = tokenizer(" a")["input_ids"]
    url, runner = serve(lambda request: itertools.repeat(word, 3900), context=4096)
    window = browser(url)
    window.until("document.body.innerText.includes('4096 tokens')")
    window.type("go on" + ENTER)
    window.until("document.querySelector('article.assistant p')?.textContent.length > 20")
    assert window.js("document.querySelector('#send').textContent") == "Stop"
    window.press(ESCAPE)
    window.until(IDLE)
    assert 20 < window.js("document.querySelector('article.assistant p').textContent.length") < 7000
    assert not window.js("document.querySelector('.error')") and len(runner.bound) == 1


def test_settings_reach_the_server_and_the_model_is_chosen(serve, browser):
    url, runner = serve("fine", context=512)
    window = browser(url)
    window.until("!document.querySelector('#models').hidden")
    assert window.js("[...document.querySelectorAll('#models option')].map(o => o.value)") == ["demo", "alias"]
    window.click("#models option[value=alias]")
    window.click("#settings")
    window.until("/[1-9][0-9]* MiB/.test(document.querySelector('#memory').textContent)")
    for name, value in (
        ("system", "be brief"),
        ("temperature", "0.5"),
        ("top_k", "7"),
        ("top_p", "0.9"),
        ("seed", "3"),
    ):
        window.click(f"#options [name={name}]")
        window.type(value)
    window.press(ESCAPE)
    window.js("document.querySelector('#text').focus()")
    window.type("hello" + ENTER)
    window.until(IDLE)
    (request,) = runner.bound
    params = request.params
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 7, 0.9, 3)
    window.call("url", url=url)
    window.until("document.querySelector('#models').value === 'alias'")


def test_it_asks_for_the_key(serve, browser):
    url, _ = serve("fine", context=512, api_key="secret")
    window = browser(url)
    for key in ("wrong", "secret"):
        window.until("document.querySelector('#options').open && document.activeElement.name === 'key'")
        window.js("document.activeElement.value = ''")
        window.type(key + ENTER)
        time.sleep(0.2)
    window.until("document.querySelector('#model').textContent.startsWith('demo')")
    assert not window.js("document.querySelector('#options').open")
    assert "secret" not in window.js("JSON.stringify(localStorage)")


def test_a_phone_scrolls_in_one_direction_and_its_list_opens(serve, browser):
    url, _ = serve("w" * 300 + "\n```\n" + "x = 1; " * 60 + "\n```\n", context=2048)
    window = browser(url, 360, 740)
    window.type("go" + ENTER)
    window.until(IDLE)
    assert window.js("innerWidth") == 360
    assert window.js("document.documentElement.scrollWidth") == 360
    assert window.js("document.querySelector('#messages').scrollWidth <= 360")
    assert not window.js("document.querySelector('#list').checkVisibility()")
    window.click("#menu")
    assert window.js("document.querySelector('#list').checkVisibility()")
    assert window.js("document.querySelector('#menu').ariaExpanded") == "true"
    window.press(ESCAPE)
    assert not window.js("document.querySelector('#list').checkVisibility()")


def test_tab_goes_in_the_order_of_reading_and_all_controls_have_names(serve, browser):
    url, _ = serve("fine", context=512)
    window = browser(url)
    window.until("!document.querySelector('#models').hidden")
    window.js("document.querySelector('#models').focus()")
    seen = ["models"]
    while "send" not in seen and len(seen) < 30:
        window.press(TAB)
        seen.append(window.js("document.activeElement.id"))
    ids = [name for name in seen if name]
    assert ids == ["models", "theme", "settings", "new", "export", "messages", "text", "send"]
    unnamed = "[...document.querySelectorAll('button, input, textarea, select')].filter(e => "
    assert window.js(unnamed + "!(e.ariaLabel || e.textContent.trim() || e.labels?.length))") == []
    before = window.js("getComputedStyle(document.body).backgroundColor")
    window.click("#theme")
    assert window.js("getComputedStyle(document.body).backgroundColor") != before
