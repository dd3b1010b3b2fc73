"""Token files: documents written one after the other, and some of them held out again."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hocket.spec.files import named
from hocket.training.order import permuted
from hocket.training.tokenizer import Tokenizer

Dtype = np.dtype[Any]
Ids = npt.NDArray[Any]
T = TypeVar("T")

BATCH_CHARACTERS = 4_000_000


def write_tokens(
    path: Path,
    sources: Sequence[Iterable[str]],
    tokenizer: Tokenizer,
    dtype: Dtype,
    quotas: Sequence[int] = (),
) -> tuple[npt.NDArray[np.int64], int]:
    """Write the documents of all sources one after the other; their lengths and the largest id.

    Args:
        quotas: tokens after which no further document of each source is read; where a source has
            fewer, the others give more, in their order. Empty: all are read to their ends.
    """
    lengths: list[int] = []
    largest = 0 if tokenizer.eos_id is None else tokenizer.eos_id
    read = [encoded_documents(texts, tokenizer) for texts in sources]
    with named(path), path.open("wb") as file:

        def write(documents: Iterator[Ids], most: float) -> int:
            nonlocal largest
            written = 0
            while written < most and (ids := next(documents, None)) is not None:
                if ids.size == 0:
                    continue
                largest = max(largest, int(ids.max()))
                file.write(ids.astype(dtype).tobytes())
                lengths.append(ids.size)
                written += lengths[-1]
            return written

        if not quotas:
            for documents in read:
                write(documents, math.inf)
        else:
            total = sum(map(write, read, quotas))
            for documents in read:
                total += write(documents, sum(quotas) - total)
    return np.array(lengths, np.int64), largest


def encoded_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    """The ids of each document, with the end token; none of one without a token."""
    end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.uint32)
    for together in character_batches(texts, len, BATCH_CHARACTERS):
        for ids in tokenizer.encode_batch(together):
            yield np.concatenate([ids, end]) if ids.size else ids


def character_batches(
    items: Iterable[T], size_of: Callable[[T], int], characters: int
) -> Iterator[list[T]]:
    """Items in groups of at least so many characters, so that encoding fills all cores."""
    together: list[T] = []
    size = 0
    for item in items:
        together.append(item)
        size += size_of(item)
        if size >= characters:
            yield together
            together, size = [], 0
    if together:
        yield together


def choose_held_out(
    lengths: npt.NDArray[np.int64], share: float, seed: int, seq_len: int
) -> npt.NDArray[np.bool_]:
    """Which documents are held out: none where that would not come near the share."""
    chosen = np.zeros(len(lengths), bool)
    target = max(share * lengths.sum(), seq_len + 1)
    if share <= 0:
        return chosen
    held = 0
    for index in permuted(np.arange(len(lengths)), len(lengths), (seed, -1)):
        if held >= target:
            break
        if held + lengths[index] <= 1.5 * target:
            chosen[index] = True
            held += int(lengths[index])
    if held < target / 2 or held < seq_len + 1:
        chosen[:] = False
    return chosen


def split_tokens(
    train: Path,
    valid: Path,
    lengths: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.bool_],
    *,
    dtype: Dtype,
    share: float,
    seq_len: int,
) -> dict[str, int]:
    """Move the chosen documents, or the end of the text, from one file to the other; counts."""
    total = int(lengths.sum())
    tokens = np.memmap(train, dtype=dtype, mode="r+")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with named(valid), valid.open("wb") as file:
        if chosen.any():
            for index in np.flatnonzero(chosen):
                file.write(tokens[starts[index] : starts[index + 1]].tobytes())
            kept = 0
            for index in np.flatnonzero(~chosen):
                length = int(lengths[index])
                if kept != starts[index]:
                    tokens[kept : kept + length] = tokens[starts[index] : starts[index] + length]
                kept += length
            train_documents, valid_documents = int((~chosen).sum()), int(chosen.sum())
        else:
            tail = max(round(share * total), seq_len + 1) if share > 0 else 0
            if 2 * tail > total:
                tail = 0
            kept = total - tail
            file.write(tokens[kept:].tobytes())
            train_documents = int((starts[:-1] < kept).sum())
            valid_documents = int((starts[1:] > kept).sum())
    tokens.flush()
    del tokens
    os.truncate(train, kept * dtype.itemsize)
    return {
        "train_tokens": kept,
        "valid_tokens": total - kept,
        "train_documents": train_documents,
        "valid_documents": valid_documents,
    }
