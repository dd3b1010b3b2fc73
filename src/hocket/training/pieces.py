"""Pieces: long texts cut at line ends, and short ones put together, for encoding on all cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

SAMPLE_CHARACTERS = 4_000_000
PIECE_CHARACTERS = 1 << 16
GROUP_CHARACTERS = 4_000_000


class Sample:
    """The first documents up to a number of characters, counted as they pass."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            for piece in pieces_of(text):
                yield piece
                self.characters += len(piece)
                if self.characters >= SAMPLE_CHARACTERS:
                    return


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces of about 64 thousand characters that end with a line."""
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        end = text.find("\n", start + PIECE_CHARACTERS)
        if not 0 <= end < start + 2 * PIECE_CHARACTERS:
            end = start + 2 * PIECE_CHARACTERS - 1
        yield text[start : end + 1]
        start = end + 1
    yield text[start:]


def piece_groups(pieces: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces in runs of some million characters."""
    together: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        together.append(piece)
        size += len(piece[1])
        if size >= GROUP_CHARACTERS:
            yield together
            together, size = [], 0
    if together:
        yield together
