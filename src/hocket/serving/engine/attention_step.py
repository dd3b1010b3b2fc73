"""What one step attends to, as indices: made once, read by every layer.

Rows of one token (decoding) come first and are attended together; each further row is a chunk of a
prompt and is attended by itself, so that no square over all tokens is ever made.

    tokens      a  b  c | d d d d d | e e e
    rows        decode  | chunk     | chunk

Legend: T tokens of the step, R decoding rows, N pairs of a decoding row and a block it attends to.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hocket.serving.engine.cache import BlockTables
from hocket.serving.scheduling.step import ALL, LAST, StepPlan


@dataclasses.dataclass(slots=True)
class Chunk:
    """Several new tokens of one sequence.

    Attributes:
        first: place of its first token among the step's tokens.
        count: its tokens.
        start: tokens of the sequence already in the cache.
        blocks: int64, all blocks of the sequence up to its last token.
    """

    first: int
    count: int
    start: int
    blocks: Tensor


@dataclasses.dataclass(slots=True)
class StepIndices:
    """The indices of one step, on CPU.

    Attributes:
        tokens, positions: [T] int64.
        places: [T] int64, block * block_size + offset of each token in the cache.
        num_decode: R.
        lengths: [R] int64, tokens that each decoding row attends to, its own included.
        tables: [R, most blocks] int64, block tables of the decoding rows.
        chunks: the other rows.
        wanted: int64, tokens whose logits are asked for.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    num_decode: int
    lengths: Tensor
    tables: Tensor
    chunks: list[Chunk]
    wanted: Tensor
    block_size: int

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


def indices(plan: StepPlan, tables: BlockTables, block_size: int) -> StepIndices:
    """The indices of a plan whose blocks `tables` knows already."""
    rows = plan.rows
    num_decode = next((i for i, row in enumerate(rows) if row.count != 1), len(rows))
    slots = torch.tensor([row.slot for row in rows[:num_decode]], dtype=torch.long)
    starts = torch.tensor([row.start for row in rows[:num_decode]], dtype=torch.long)
    longest = max((row.start for row in rows[:num_decode]), default=-1)
    most = longest // block_size + 1 if num_decode else 0
    decode_tables = tables.table[slots, :most]
    block = starts // block_size
    places = [decode_tables.gather(1, block.unsqueeze(1)).squeeze(1) * block_size
              + (starts - block * block_size)]  # fmt: skip
    positions = [starts]
    chunks: list[Chunk] = []
    wanted: list[int] = []
    first = 0
    for index, row in enumerate(rows):
        if index >= num_decode:
            where = torch.arange(row.start, row.start + row.count)
            held = tables.table[row.slot, : (row.start + row.count - 1) // block_size + 1]
            positions.append(where)
            places.append(held[where // block_size] * block_size + where % block_size)
            chunks.append(Chunk(first, row.count, row.start, held))
        if row.logits == LAST:
            wanted.append(first + row.count - 1)
        elif row.logits == ALL:
            wanted += range(first, first + row.count)
        first += row.count
    assert first == len(plan.tokens), (first, len(plan.tokens))
    return StepIndices(
        tokens=torch.tensor(plan.tokens, dtype=torch.long),
        positions=torch.cat(positions),
        places=torch.cat(places),
        num_decode=num_decode,
        lengths=starts + 1,
        tables=decode_tables,
        chunks=chunks,
        wanted=torch.tensor(wanted, dtype=torch.long),
        block_size=block_size,
    )
