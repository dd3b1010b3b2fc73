"""Packed files: documents with flags for their tokens, in rows or one after the other.

    documents -> ids and learned flags, aside -> held out by number -> tokens.bin, tokens.flags.bin

A row of S tokens holds whole documents and is filled up with tokens that nothing is learned of:

    ids      a a a a a a b b b c c c c . .       learned    0 0 1 1 1 1 0 1 1 0 1 1 1 0 0
    begins   1 0 0 0 0 0 1 0 0 1 0 0 0 1 0

What fills a row up begins as a document does where rows are shared; where a row holds one document
it does not, and comes after all that it could be seen by. Never imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.spec.files import named
from hocket.training.documents import Document
from hocket.training.order import permuted
from hocket.training.packing import ACROSS, DOCUMENTS, rows_of
from hocket.training.token_files import choose_held_out

LEARNED, BEGINS, PADDING = 1, 2, 4
"""Bits of a flag: loss falls on the token; a document begins with it; it fills up a row."""

Dtype = np.dtype[Any]


def flags_file(tokens: Path) -> Path:
    """Where the flags of a token file lie."""
    return tokens.with_suffix(".flags.bin")


@dataclasses.dataclass(kw_only=True)
class DocumentCounts:
    """What became of the documents.

    Attributes:
        truncated_documents: cut at the length of a row. truncated_tokens: what was cut off them.
        unlearned_documents: left out, since nothing of them is learned (or is left to be).
        largest: the largest token id. masked: whether some token is not learned.
        pieces: of what is written, the number of the document that each is of.
    """

    truncated_documents: int = 0
    truncated_tokens: int = 0
    unlearned_documents: int = 0
    largest: int = 0
    masked: bool = False
    pieces: list[int] = dataclasses.field(default_factory=list)


def write_aside(
    ids: Path, flags: Path, documents: Iterable[Document], *, dtype: Dtype, row: int | None
) -> tuple[npt.NDArray[np.int64], DocumentCounts]:
    """Write documents one after the other; their lengths, and what became of them.

    Args:
        row: tokens that a document may have. A longer one with marks is cut off there, a longer
            plain text goes on as further documents. None: no bound.
    """
    lengths: list[int] = []
    counts = DocumentCounts()
    with named(ids), ids.open("wb") as tokens, flags.open("wb") as marks:
        for number, document in enumerate(documents):
            counts.largest = max(counts.largest, int(document.ids.max(initial=0)))
            for piece, learned in _fitted(document, row, counts):
                mark = learned.astype(np.uint8) * LEARNED
                mark[0] = BEGINS  # nothing comes before it that could predict it
                if not (mark & LEARNED).any():
                    counts.unlearned_documents += 1
                    continue
                tokens.write(piece.astype(dtype).tobytes())
                marks.write(mark.tobytes())
                lengths.append(piece.size)
                counts.pieces.append(number)
    return np.array(lengths, np.int64), counts


def _fitted(
    document: Document, row: int | None, counts: DocumentCounts
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    size = document.ids.size
    if document.learned is None:
        step = row or max(size, 1)
        for first in range(0, size, step):
            piece = document.ids[first : first + step]
            if piece.size > 1:  # a single token predicts nothing
                yield piece, np.ones(piece.size, bool)
        return
    counts.masked = True
    if size == 0:
        counts.unlearned_documents += 1
        return
    if row is not None and size > row:
        counts.truncated_documents += 1
        counts.truncated_tokens += size - row
        size = row
    yield document.ids[:size], document.learned[:size]


def held_out(
    lengths: npt.NDArray[np.int64], pieces: Sequence[int], share: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Which documents are held out: about a share of them, at least one if there are two. Where
    some are in pieces, all or none of a document's: about a share of the tokens; the last pieces,
    where the documents are too few for that.

    Args:
        lengths: of the pieces. pieces: the number of the document that each is of, ascending.
    """
    count = len(lengths)
    chosen = np.zeros(count, bool)
    if share <= 0 or count < 2:
        return chosen
    number = min(max(1, round(share * count)), count // 2)
    _, members = np.unique(pieces, return_inverse=True)
    if members[-1] == count - 1:
        chosen[permuted(np.arange(number), count, (seed, -1))] = True
        return chosen
    whole = np.bincount(members, weights=lengths).astype(np.int64)
    chosen = choose_held_out(whole, share, seed, seq_len=1)[members]
    if not chosen.any():
        chosen[-number:] = True
    return chosen


def arrange(
    target: Path,
    ids: Path,
    flags: Path,
    lengths: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.bool_],
    *,
    dtype: Dtype,
    packing: str,
    row: int,
    filler: int,
) -> dict[str, int]:
    """Write the chosen documents as one token file, with its file of flags.

    Returns:
        `tokens` (without what fills rows up), `rows` (0 where documents follow each other),
        `learned`.
    """
    tokens = _mapped(ids, dtype)
    marks = _mapped(flags, np.dtype(np.uint8))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    numbers = np.flatnonzero(chosen)
    learned = 0
    with named(target), target.open("wb") as to, flags_file(target).open("wb") as chosen_flags:
        if packing == ACROSS:
            for number in numbers:
                here = slice(starts[number], starts[number + 1])
                mark = marks[here] & LEARNED
                to.write(tokens[here].tobytes())
                chosen_flags.write(mark.tobytes())
                learned += int(mark.sum())
            rows: Sequence[Sequence[int]] = ()
        else:
            rows = rows_of(lengths[numbers], row, shared=packing == DOCUMENTS)
        for members in rows:
            line, mark, at = np.full(row, filler, dtype), np.zeros(row, np.uint8), 0
            for number in numbers[list(members)]:
                size = int(lengths[number])
                here = slice(starts[number], starts[number + 1])
                line[at : at + size] = tokens[here]
                mark[at : at + size] = marks[here]
                at += size
            mark[at:] = PADDING
            if at < row and packing == DOCUMENTS:
                mark[at] |= BEGINS
            to.write(line.tobytes())
            chosen_flags.write(mark.tobytes())
            learned += int((mark & LEARNED).sum())
    return {"tokens": int(lengths[numbers].sum()), "rows": len(rows), "learned": learned}


def _mapped(path: Path, dtype: Dtype) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
