"""TextPieces and StopStrings: token ids to pieces of text as they come, and where to end it.

A piece never holds half a character, and nothing of a stop string is sent before it is clear that
it is none. Both cost what the text is long, whatever it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hocket.spec.errors import OptionError

HALF = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no text (yet)."""

_MOST_OPEN = 3
"""Bytes of a character that lacks its last one."""
_KEPT = 6
"""Tokens kept as context when a window slides."""
_WINDOW = 16
"""Tokens at which a window slides."""
_FORCED = 64
"""Tokens at which it slides even though its context reads differently by itself."""


class TextPieces:
    """One row's text, piece by piece.

    A character may be spread over several tokens, and a token may read differently at the start
    of a text than inside it. So a window of the newest tokens is decoded as a whole, and sent is
    what follows the part that was sent before, without a character that is still open.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = ""
        self._rewritten = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was sent."""
        return "".join(self._pieces)

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still open."""
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        if len(tokens) > 1:
            whole = self._decode([*self._window, *tokens])
            if HALF in whole[len(self._sent) :] or not whole.startswith(self._sent):
                # Which of several tokens left a character open shows one by one.
                return "".join([self.add(token) for token in tokens])
        self._window += tokens
        whole = self._decode(self._window)
        end = len(whole)
        while end and len(whole) - end < _MOST_OPEN and whole[end - 1] == HALF:
            end -= 1
        if not whole.startswith(self._sent):
            # Decoders that judge a run of bytes as a whole take back characters while a later
            # one is open; what stays so is no text at all, and goes on from where it was.
            self._rewritten += len(tokens)
            if self._rewritten <= 2 * _MOST_OPEN:
                return ""
        self._rewritten = 0
        piece = whole[len(self._sent) : end]
        if piece:
            self._sent = whole[:end]
            self._pieces.append(piece)
        if len(self._window) >= _WINDOW:
            self._slide(whole)
        return piece

    def end(self) -> str:
        """What was held back."""
        piece = self._decode(self._window)[len(self._sent) :]
        self._window, self._sent = [], ""
        if piece:
            self._pieces.append(piece)
        return piece

    def _slide(self, whole: str) -> None:
        """Forget tokens whose text no later one can change."""
        context = self._decode(self._window[-_KEPT:])
        open_ = max(0, len(whole) - len(self._sent))
        fits = bool(context) and whole.endswith(context) and len(context) > open_
        if fits or not whole or len(self._window) >= _FORCED:
            self._window = self._window[-_KEPT:]
            self._sent = context[: max(0, len(context) - open_)]


class StopStrings:
    """Ends a text at the first of some strings, which is not sent.

    The strings are one automaton (Aho and Corasick 1975) whose state is the longest end of the
    text that begins one of them: each character costs the same, however many strings there are,
    and what must be held back is as long as the state is deep. Of strings that end at the same
    character the longest counts.

    Args:
        strings: not empty ones.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for string in strings:
            node = 0
            for character in string:
                child = self._next[node].get(character)
                if child is None:
                    child = len(self._next)
                    self._next[node][character] = child
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._match.append(None)
                node = child
            self._match[node] = string
        self._fallback = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._fallback[child] = self._step(self._fallback[node], character)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                waiting.append(child)
        self._first = frozenset(self._next[0])
        self._node = 0
        self._held = ""

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(character, 0)

    def feed(self, piece: str) -> tuple[str, str | None]:
        """(what may be sent now, the stop string that was found)."""
        if not self._node and self._first.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        for at, character in enumerate(piece, len(self._held) + 1):
            self._node = self._step(self._node, character)
            found = self._match[self._node]
            if found is not None:
                self._node, self._held = 0, ""
                return text[: at - len(found)], found
        free = len(text) - self._depth[self._node]
        self._held = text[free:]
        return text[:free], None

    def end(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._node, self._held = self._held, 0, ""
        return held


def check_stop(strings: Sequence[str], most: int, most_characters: int) -> tuple[str, ...]:
    """Stop strings that are few and short enough to be looked for.

    Raises:
        OptionError: too many, too long, or an empty one.
    """
    if len(strings) > most:
        raise OptionError(f"stop has {len(strings)} strings; most: {most}")
    total = sum(map(len, strings))
    if total > most_characters:
        raise OptionError(f"stop has {total} characters; most: {most_characters}")
    if not all(strings):
        raise OptionError("a stop string is empty: every text would end before its first token")
    return tuple(dict.fromkeys(strings))
