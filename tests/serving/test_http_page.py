"""The chat page in a headless Chromium, against a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hocket.serving.http.auth import Keys
from tests.reporting.chromium import chromium  # noqa: F401
from tests.serving.http_fake import FakeReplica
from tests.serving.http_live import Live, live

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    hostile = list(
        b"<img src=x onerror=alert(1)><script>alert(2)</script>\n```py\ncode <b>\n```end"
    )
    replica = FakeReplica(delay=0.002, length=len(hostile), script=lambda request: hostile)
    with live(replica) as found:
        yield found


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:  # noqa: F811
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    found = context.new_page()
    found.problems = []
    found.on("pageerror", lambda error: found.problems.append(str(error)))
    found.on("dialog", lambda dialog: found.problems.append("a dialog"))
    found.on(
        "console",
        lambda m: found.problems.append(m.text) if m.type == "error" else None,
    )
    yield found
    context.close()


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_chat_is_streamed_and_what_the_model_writes_stays_text(page: Any, server: Live) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.wait_for_selector("#model:has-text('fake-model')", state="attached")
    ask(page, "say <b>something</b>")
    page.wait_for_selector("article.assistant .note")
    answer = page.locator("article.assistant div").first
    assert answer.locator("p").first.text_content() == (
        "<img src=x onerror=alert(1)><script>alert(2)</script>"
    )
    assert answer.locator("pre").text_content() == "code <b>"
    assert page.locator("article.user p").text_content() == "say <b>something</b>"
    assert "tokens" in page.locator("article.assistant .note").text_content()
    assert page.problems == []
    assert all(url.startswith(server.url) for url in asked), asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(page: Any, server: Live, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    page.click("summary")
    ask(page, "x" * 300)
    page.wait_for_selector("article.assistant .note")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # The field and the button are inside the window, and the talk is between header and footer.
    for name in ("#prompt", "#send"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= 700
    colours = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    dark = [sum(map(int, c[4:-1].split(","))) < 300 for c in colours]
    assert dark == ([True, False] if scheme == "light" else [False, True])


def test_stop_ends_the_request_at_the_replica(page: Any) -> None:
    with live(FakeReplica(delay=0.02, length=400, num_blocks=128)) as server:
        page.goto(server.url)
        ask(page, "go on for long")
        page.wait_for_selector("article.assistant p")
        page.click("#stop")
        page.wait_for_selector("text=Stopped.")
        assert server.idle()
        assert len(server.replica.cancelled) == 1
        page.wait_for_selector("#send")


def test_a_key_is_asked_for_and_used(page: Any) -> None:
    with live(keys=Keys([("me", KEY)])) as server:
        response = page.goto(server.url)
        assert response.status == 401
        page.wait_for_selector("text=This server needs a key")
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("#model:has-text('fake-model')", state="attached")
        ask(page, "hello")
        page.wait_for_selector("article.assistant .note")
        assert server.replica.seen[-1].user == "me"


def test_an_error_is_reported_in_the_talk(page: Any, server: Live) -> None:
    page.goto(server.url)
    ask(page, "x" * 2000)
    page.wait_for_selector("article.assistant .bad")
    assert "the context has 512" in page.locator("article.assistant .bad").text_content()
    before = time.monotonic()
    ask(page, "short")
    page.wait_for_selector("article.assistant >> nth=1 >> .note")
    assert time.monotonic() - before < 60


def test_without_a_key_a_message_leads_to_the_field_of_the_key_and_is_kept(page: Any) -> None:
    with live(keys=Keys([("me", KEY)])) as server:
        page.goto(server.url)
        page.wait_for_selector("text=This server needs a key")
        ask(page, "hello")
        page.wait_for_selector("article.assistant .bad")
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.input_value("#prompt") == "hello"


def test_a_server_that_is_gone_is_named_and_the_message_is_kept(page: Any) -> None:
    with live() as server:
        page.goto(server.url)
        page.wait_for_selector("#model:has-text('fake-model')", state="attached")
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.route("**/v1/**", lambda route: route.abort())
        ask(page, "are you there?")
        page.wait_for_selector("article.assistant .bad")
        shown = page.locator("article.assistant .bad").text_content()
        assert shown == "The server does not answer."
        assert page.input_value("#prompt") == "are you there?"


def test_a_new_chat_holds_nothing_of_one_that_was_being_answered(page: Any) -> None:
    with live(FakeReplica(delay=0.02, length=200, num_blocks=128)) as server:
        page.goto(server.url)
        ask(page, "the first")
        page.wait_for_selector("article.assistant p")
        page.click("#fresh")
        page.wait_for_selector("#send")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "the second")
        assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "the second"}]
        page.click("#stop")
        page.wait_for_selector("text=Stopped.")
