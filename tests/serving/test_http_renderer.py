"""Chat templates in a process beside the server: whatever they do ends, and the next is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.models.chat_template import ChatTemplates, TemplateRefusal
from hocket.serving.front.renderer import Renderer
from hocket.spec.errors import ModelError
from tests.serving.http_live import TEMPLATE, live

pytestmark = pytest.mark.timeout(60)

SET = "{% set ns = namespace(x=[1, 1], w=[1, 1], y=3, z='abcd') %}{% for i in range(40) %}"
HOSTILE = {
    "squares": SET + "{% set ns.y = ns.y * ns.y %}{% endfor %}{{ ns.y }}",
    "equal": SET
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.w = [ns.w, ns.w] %}{% endfor %}{{ ns.x == ns.w }}",
    "printed": SET + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "json": SET + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "doubled": SET + "{% set ns.z = ns.z ~ ns.z %}{% endfor %}{{ ns.z }}",
    "wide": "{{ messages[0].content | center(99999999999) }}",
    "surrogate": "{{ '\\ud800' }}",
}
CHOSEN = (
    "{% set c = messages[0].content %}"
    + "".join(f"{{% if c == '{name}' %}}{text}{{% endif %}}" for name, text in HOSTILE.items())
    + "{{ c }}"
)


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def hostile() -> Iterator[Renderer]:
    with Renderer({"default": CHOSEN}, {}, seconds=0.5) as found:
        yield found


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_template_does_ends(hostile: Renderer, name: str) -> None:
    """In one call of C, or by doubling: no interpreter would hear that its time is over."""
    began = time.monotonic()
    with pytest.raises(TemplateRefusal, match="the model's chat template"):
        hostile.render(chat(name), most=1 << 20)
    assert time.monotonic() - began < 10
    assert hostile.render(chat("next"), most=1 << 20) == "next"


@pytest.mark.parametrize(
    "text", ["{{ [1] | slice(99999999999) | list }}", "{{ 'a' | center(99999999999) }}{{"]
)
def test_what_is_computed_when_it_is_compiled_ends(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.serving.front.renderer.START", 1.5)
    with pytest.raises(ModelError) as raised:
        Renderer({"default": text}, {}, seconds=0.5)
    assert raised.value.hint == "--chat-template-file FILE"


def test_it_renders_as_templates_do() -> None:
    words = {"bos_token": "<s>"}
    texts = {"default": "{{ bos_token }}" + TEMPLATE, "tool_use": "T" + TEMPLATE}
    here = ChatTemplates(texts, words)
    tools = [{"type": "function", "function": {"name": "f", "description": "é <&>"}}]
    long = chat("long \U0001f600 " * 100_000)  # more than a pipe holds
    with Renderer(texts, words, seconds=5.0) as there:
        assert there.has_tools == here.has_tools
        for options in (
            {}, {"tools": tools}, {"switches": {"enable_thinking": True}}, {"continue_last": True}
        ):  # fmt: skip
            for one in (chat("hi"), long):
                assert there.render(one, most=1 << 24, **options) == here.render(
                    one, most=1 << 24, **options
                )
        with pytest.raises(TemplateRefusal, match="more than 10 characters"):
            there.render(long, most=10)


def test_threads_have_a_process_each_and_none_is_left() -> None:
    found: dict[int, str] = {}
    renderer = Renderer({"default": "{{ messages[0].content }}"}, {}, seconds=5.0)

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = renderer.render(chat(f"n{number}"), most=100)
            assert found[number] == f"n{number}"

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"n{n}" for n in range(3)}
    pids = [one._process.pid for one in renderer._idle]
    assert 1 <= len(pids) <= 3
    os.kill(pids[-1], signal.SIGKILL)  # the one that is taken next
    with pytest.raises(TemplateRefusal, match="ended its process"):
        renderer.render(chat("lost"), most=100)
    assert renderer.render(chat("next"), most=100) == "next"
    renderer.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_server_answers_others_meanwhile() -> None:
    asked = []
    with Renderer({"default": CHOSEN}, {}, seconds=2.0) as renderer, live() as server:
        server.service.templates = renderer

        def ask(content: str) -> None:
            path, body = "/v1/chat/completions", {"messages": chat(content), "max_tokens": 2}
            asked.append((content, server.post(path, body)[0], time.monotonic()))

        slow = threading.Thread(target=ask, args=("squares",))
        slow.start()
        time.sleep(0.3)
        ask("next")
        slow.join()
        assert [one[:2] for one in asked] == [("next", 200), ("squares", 400)]
