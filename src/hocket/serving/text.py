"""TextPieces: token ids to pieces of text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """One row's text, piece by piece.

    A character may be spread over several tokens, and a token may read differently at the start
    of a text than inside it: each piece is therefore the difference between the texts of the
    tokens so far with and without the new one, held back while it ends in half a character.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._from = 0
        self._told = 0
        self.text = ""

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still open."""
        self._ids.append(token)
        return self._next(final=False)

    def end(self) -> str:
        """What was held back."""
        return self._next(final=True)

    def _next(self, *, final: bool) -> str:
        # Decoded from a few tokens back, so that a long text does not cost its square.
        before = self._decode(self._ids[self._from : self._told])
        after = self._decode(self._ids[self._from :])
        if len(after) <= len(before) or (after.endswith(_HALF) and not final):
            return ""
        self._from, self._told = self._told, len(self._ids)
        piece = after[len(before) :]
        self.text += piece
        return piece
