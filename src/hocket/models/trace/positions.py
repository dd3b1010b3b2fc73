"""Recurrences that a family writes out position by position: traced at three short sequences.

One position after another runs the same operations, on a state of each row and on slices of whole
sequences, whose gradients are as large as the sequences. So every number of a shape, times the
tokens of a sequence, is a polynomial of second degree in them: three short sequences give the
figures of any longer one, exactly.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from hocket.models.trace.record import SHORTER
from hocket.spec.errors import ModelError
from hocket.spec.model_shape import BlockShape, ModelShape

SHORT = tuple(sorted(SHORTER)[:3])


def lengthened(shape_of: Callable[[int], ModelShape], sequence: int) -> ModelShape:
    """The shape at so many tokens of a sequence, of those at the short ones. Raises ModelError."""
    found = [shape_of(short) for short in SHORT]
    blocks = {
        kind: _block([one.blocks[kind] for one in found], sequence) for kind in found[0].blocks
    }
    return dataclasses.replace(found[0], blocks=blocks)


def _block(blocks: Sequence[BlockShape], sequence: int) -> BlockShape:
    saved = [_summed(one, blocks) for one in blocks]
    rest = {dataclasses.replace(one, unfused=(), memory_bound=(), saved=()) for one in blocks}
    sizes = {
        (len(one.unfused), len(one.memory_bound), *kept)
        for one, kept in zip(blocks, saved, strict=True)
    }
    if len(rest) > 1 or len(sizes) > 1:
        raise ModelError(f"{blocks[0].kind} computes something else in longer sequences")
    return dataclasses.replace(
        blocks[0],
        unfused=tuple(
            _row(rows, sequence) for rows in zip(*(one.unfused for one in blocks), strict=True)
        ),
        memory_bound=tuple(
            _row(rows, sequence) for rows in zip(*(one.memory_bound for one in blocks), strict=True)
        ),
        saved=tuple(_row([kept[key] for kept in saved], sequence) for key in saved[0]),
    )


def _summed(block: BlockShape, blocks: Sequence[BlockShape]) -> dict[Any, Any]:
    """Saved rows by what they are; those of which longer sequences have more, together."""
    counts = [collections.Counter(_what(row) for row in one.saved) for one in blocks]
    found: dict[Any, Any] = {}
    for row in block.saved:
        grows = len({count[_what(row)] for count in counts}) > 1
        key = _what(row) if grows else (*_what(row), row.name)
        known = found.get(key)
        found[key] = (
            dataclasses.replace(known, bytes=known.bytes + row.bytes) if known is not None else row
        )
    return found


def _what(row: Any) -> tuple[Any, ...]:
    return (row.name.partition("#")[0], row.split, row.view, row.square)


def _row(rows: Sequence[Any], sequence: int) -> Any:
    """One row at so many tokens, of the same row in three shorter sequences."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if len(set(values)) == 1:
            continue
        if not isinstance(values[0], (int, float)) or isinstance(values[0], bool):
            raise ModelError(f"{rows[0].name} is another operation in longer sequences")
        degree = 1 if isinstance(values[0], int) else 2  # kernels are counted, not a token's
        changed[field.name] = _at(values, sequence, degree)
    return dataclasses.replace(rows[0], **changed)


def _at(values: Sequence[float], sequence: int, degree: int) -> float:
    """The value at a length, by Lagrange's polynomial through those of the short sequences."""
    own = [Fraction(v) * (1 if degree == 1 else s) for v, s in zip(values, SHORT, strict=True)]
    total = Fraction(0)
    for at, (one, value) in enumerate(zip(SHORT, own, strict=True)):
        for other in (*SHORT[:at], *SHORT[at + 1 :]):
            value *= Fraction(sequence - other, one - other)
        total += value
    return int(total) if degree == 1 else float(total / sequence)
