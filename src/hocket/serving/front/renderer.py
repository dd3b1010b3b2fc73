"""Renderer: a model's chat templates, in a process of their own.

A template is a program that comes with the model. However it is written, it ends when its time is
over or its memory used up: in the server's own process a loop inside one call of C, or a list that
doubles, would hold every other request up, or end them all.

    server                          renderer
    texts, words             ->     compiles
                             <-     ready, or why not
    messages, tools, ...     ->     renders, within its time and memory
                             <-     text, or why not
    hangs up                 ->     leaves

Frames are JSON behind their length, eight bytes. There are as many processes as render at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from hocket.models.chat_template import ChatTemplates, TemplateRefusal, has_tools, used
from hocket.spec.errors import HocketError, ModelError

START = 20.0
"""Seconds until a template is compiled, the start of the process included."""
MEMORY = 1 << 30
"""Bytes of addresses that a process may have."""
_SLICE = 0.1
"""Seconds after which a thread that waits hears that nobody waits for it any more."""


class Renderer:
    """`ChatTemplates` of the same arguments, elsewhere. Threads may share it.

    Args:
        texts, words: as `ChatTemplates`. seconds: that one chat may take.

    Raises:
        ModelError: as `ChatTemplates`; or it takes more than its time or memory to be compiled.
    """

    def __init__(
        self, texts: Mapping[str, str], words: Mapping[str, str], *, seconds: float
    ) -> None:
        self.texts = dict(texts)
        self._first = {"texts": self.texts, "words": dict(words), "seconds": seconds}
        self._seconds = seconds
        self._closed = False
        self._idle = [_Process(self._first)]
        try:
            self._idle[0].begun()
        except BaseException:
            self.close()
            raise

    def text(self, tools: bool) -> str:
        return self.texts[used(self.texts, tools)]

    @property
    def has_tools(self) -> bool:
        """Whether the template says anything of tools."""
        return has_tools(self.texts)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As `ChatTemplates.render`.

        Raises:
            TemplateRefusal: as there; or it took more than its time or memory.
        """
        asked = {"messages": list(messages), **options}
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self._first)
        whole = False
        try:
            process.begun()
            found = process.ask(asked, self._seconds)
            whole = True
        finally:
            # What was left in the middle would answer the next request with this one's chat.
            if whole and not self._closed:
                self._idle.append(process)
            else:
                process.end()
        if "text" not in found:
            raise TemplateRefusal(str(found["refused"]))
        return str(found["text"])

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """One process, which serves one chat at a time."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hocket.serving.front.renderer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback a chat would let anybody fill the disk
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the server's to hear: running requests may end
        )
        self._first: Mapping[str, Any] | None = first

    def begun(self) -> None:
        """Wait until its templates are compiled. Raises ModelError."""
        if self._first is None:
            return
        first, self._first = self._first, None
        try:
            found = self.ask(first, START)
        except TemplateRefusal as refusal:
            raise ModelError(refusal.message, hint="--chat-template-file FILE") from None
        if "refused" in found:
            raise ModelError(str(found["refused"]), hint=found.get("hint"))

    def ask(self, what: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer. Raises TemplateRefusal where it has none, or not in time."""
        end = time.monotonic() + seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.set_blocking(stdin.fileno(), False)
        left = memoryview(_frame(what))
        found = bytearray()
        with contextlib.suppress(BrokenPipeError):
            while left:
                if self._waits(end, seconds, writes=[stdin]):
                    left = left[os.write(stdin.fileno(), left) :]
        while len(found) < 8 or len(found) < 8 + int.from_bytes(found[:8], "big"):
            if self._waits(end, seconds, reads=[stdout]):
                part = os.read(stdout.fileno(), 1 << 20)
                if not part:
                    raise TemplateRefusal(
                        "the model's chat template ended its process: it takes more than "
                        f"{seconds:g} s, or more than {MEMORY >> 20} MB"
                    )
                found += part
        answer: dict[str, Any] = json.loads(found[8:])
        return answer

    def _waits(
        self, end: float, seconds: float, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> bool:
        """Whether a pipe is ready, after a slice of time. Raises TemplateRefusal at the end."""
        left = end - time.monotonic()
        if left <= 0:
            raise TemplateRefusal(f"the model's chat template took longer than {seconds:g} s")
        return any(select.select(reads, writes, (), min(left, _SLICE))[:2])

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


Templates = ChatTemplates | Renderer
"""What renders chats, here or elsewhere."""


def _frame(what: Mapping[str, Any]) -> bytes:
    data = json.dumps(what).encode()
    return len(data).to_bytes(8, "big") + data


# --- in the process ---------------------------------------------------------------------------


def main() -> None:
    """Compile, then render until the server hangs up."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    templates, seconds = None, START
    while len(head := stdin.read(8)) == 8:
        given = json.loads(stdin.read(int.from_bytes(head, "big")))
        # A server that was killed cannot end what loops; the kernel does, whatever C is doing.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        answer: dict[str, Any] = {}
        try:
            if templates is None:
                templates = ChatTemplates(given["texts"], given["words"])
                seconds = given["seconds"]
            else:
                answer["text"] = templates.render(given.pop("messages"), **given)
        except HocketError as error:
            answer = {"refused": error.message, "hint": error.hint}
        stdout.write(_frame(answer))
        stdout.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
