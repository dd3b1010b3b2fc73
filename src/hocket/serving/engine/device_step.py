"""DeviceStep: what one step attends to, as indices on a device, made from a plan in one copy.

Rows of one token come first, as in the plan. Where tokens go is worked out on the host; the block
tables are on the device, one row for each slot, and a step tells only the blocks that are new.

    host      tokens, positions, places, wanted, slots, begins, lengths, new blocks
    device    tables [slots + 1, most blocks], of which a step picks the rows of its slots

A token below 0 is one that the host does not know yet: the last that was sampled for its slot.

Legend: T tokens of the step, R rows, N rows of logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.serving.engine.staging import Column, Staging, words_of
from hocket.serving.scheduling.step import ALL, LAST, StepPlan


@dataclasses.dataclass(slots=True)
class DeviceStep:
    """The indices of one step on the device.

    Attributes:
        tokens, positions: [T] int64.
        places: [T] int64, block * block_size + offset of each token in the cache.
        wanted: [N] int64, tokens whose logits are asked for. None: all of them.
        begins: [R + 1] int32, first token of each row, and T.
        lengths: [R] int32, tokens that each row's last token attends to.
        tables: [R, W] int32, contiguous; W covers the longest row.
        most: tokens of the row that has most. longest: upper bound of the lengths.
        slots: [R] int64, of each row; None where nothing asks for them.
        chunks: of the rows after those that decode: first token, tokens, and tokens that the last
            of them attends to.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    wanted: Tensor | None
    begins: Tensor
    lengths: Tensor
    tables: Tensor
    most: int
    longest: int
    slots: Tensor | None = None
    chunks: Sequence[tuple[int, int, int]] = ()


class HostStep:
    """The same on the host, as lists; `columns` is what is copied.

    Attributes:
        rows: R, without padding. decode: whether every row adds one token.
        num_decode: rows that add one token; they come first. chunks: as `DeviceStep` has them.
        width: blocks of the longest row.
    """

    def __init__(self, plan: StepPlan, blocks: list[list[int]], block_size: int) -> None:
        rows = plan.rows
        self.rows = len(rows)
        self.num_decode = sum(row.count == 1 for row in rows)
        self.decode = self.num_decode == len(rows)
        self.tokens = plan.tokens
        self.slots = [row.slot for row in rows]
        self.lengths = [row.start + row.count for row in rows]
        self.most = max((row.count for row in rows), default=1)
        self.longest = max(self.lengths, default=1)
        self.width = -(-self.longest // block_size)
        self.positions: list[int] = []
        self.places: list[int] = []
        self.wanted: list[int] = []
        self.begins = [0]
        first = 0
        for row in rows:
            held, begin = blocks[row.slot], row.start
            if row.count == 1:
                self.positions.append(begin)
                self.places.append(held[begin // block_size] * block_size + begin % block_size)
            else:
                end = begin + row.count
                self.positions += range(begin, end)
                while begin < end:  # a block at a time
                    last = min(end, (begin // block_size + 1) * block_size)
                    place = held[begin // block_size] * block_size + begin % block_size
                    self.places += range(place, place + last - begin)
                    begin = last
            if row.logits == LAST:
                self.wanted.append(first + row.count - 1)
            elif row.logits == ALL:
                self.wanted += range(first, first + row.count)
            first += row.count
            self.begins.append(first)
        assert first == len(plan.tokens), (first, len(plan.tokens))
        self.chunks = [
            (begin, row.count, length)
            for begin, row, length in zip(self.begins, rows, self.lengths, strict=False)
            if row.count > 1
        ]

    @classmethod
    def padding(cls, rows: int, spare_slot: int, spare_place: int) -> HostStep:
        """A decode step of nothing but padding."""
        step = cls(StepPlan(0, [], []), [], 1)
        step.decode = True
        step.pad(rows, spare_slot, spare_place)
        step.wanted = list(range(rows))
        return step

    @classmethod
    def idle(cls, spare_slot: int, spare_place: int) -> HostStep:
        """A row of padding of no request, for a step that other data ranks have rows in."""
        step = cls.padding(1, spare_slot, spare_place)
        step.rows, step.wanted = 1, []
        return step

    def pad(self, rows: int, spare_slot: int, spare_place: int) -> None:
        """Grow a decode step to `rows` rows, which write to a block that no sequence holds."""
        assert self.decode, "only rows of one token are padded"
        extra = rows - self.rows
        self.tokens = [*self.tokens, *[0] * extra]
        self.positions += [0] * extra
        self.places += [spare_place] * extra
        self.slots += [spare_slot] * extra
        self.lengths += [1] * extra
        self.begins += range(self.rows + 1, rows + 1)
        self.num_decode = rows


Changes = tuple["list[int]", "list[int]"]
"""Places of the flat table that get a new block, and these blocks."""

_NEW_BLOCKS = 1024
"""Blocks that a step may add to the tables without a second copy."""


@dataclasses.dataclass(slots=True)
class Columns:
    """What is copied of a step: [T], [T], [T], [R], [R + 1], [R] and [N]."""

    tokens: Tensor
    positions: Tensor
    places: Tensor
    slots: Tensor
    begins: Tensor
    lengths: Tensor
    wanted: Tensor


class DeviceTables:
    """The block tables of all slots: on the host, on the device, and how a step gets there.

    Args:
        max_num_seqs: slots. max_blocks: blocks of the longest sequence.
        max_tokens: of a step; with `max_num_seqs` what the staging buffer is made for.
        block_size: tokens of a block.
        spare_block: a block that no sequence holds; padding writes there.
        device: of the tables.

    Attributes:
        table: [max_num_seqs + 1, max_blocks] int32; the last row is of padding.
        last: [max_num_seqs + 1] int64, the token last sampled for each slot.
        staging: what steps are copied through.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        max_tokens: int,
        *,
        block_size: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        self.max_num_seqs, self.max_blocks, self.block_size = max_num_seqs, max_blocks, block_size
        self.spare_block = spare_block
        self.device = device
        self.table = torch.full(
            (max_num_seqs + 1, max_blocks), spare_block, dtype=torch.int32, device=device
        )
        self.last = torch.zeros(max_num_seqs + 1, dtype=torch.long, device=device)
        largest = max(max_tokens, max_num_seqs)
        self.staging = Staging(4 * largest + 2 * max_num_seqs + 2 * _NEW_BLOCKS + 16, device)
        self._more = Staging(0, device, grows=True)
        self._blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]

    @property
    def spare_place(self) -> int:
        """Where padding writes its keys and values."""
        return self.spare_block * self.block_size

    def apply(self, plan: StepPlan) -> Changes:
        """Take in what a plan says of its slots; what changes in the table."""
        for slot in plan.released:
            self._blocks[slot] = []
        for admission in plan.admitted:
            self._blocks[admission.slot] = []
        places: list[int] = []
        new: list[int] = []
        for row in plan.rows:
            if row.new_blocks:
                held = self._blocks[row.slot]
                begin = row.slot * self.max_blocks + len(held)
                places += range(begin, begin + len(row.new_blocks))
                new += row.new_blocks
                held += row.new_blocks
        return places, new

    def host(self, plan: StepPlan) -> HostStep:
        """A plan's indices on the host; `apply` came first."""
        return HostStep(plan, self._blocks, self.block_size)

    def send(self, step: HostStep, changes: Changes) -> DeviceStep:
        """A step's indices on the device, and its tables brought up to date, in one copy."""
        columns = self.copied(step, changes)
        unknown = min(step.tokens, default=0) < 0
        return self.step_of(columns, step, unknown=unknown)

    def copied(self, step: HostStep, changes: Changes) -> Columns:
        """The columns of a step on the device. Where they lie follows from its tokens and rows."""
        columns: list[Column] = [
            (step.tokens, torch.long),
            (step.positions, torch.long),
            (step.places, torch.long),
            (step.slots, torch.long),
            (step.begins, torch.int32),
            (step.lengths, torch.int32),
            (step.wanted, torch.long),
        ]
        updates: list[Column] = [(changes[0], torch.long), (changes[1], torch.int32)]
        if words_of(columns) + words_of(updates) <= self.staging.words:
            views = self.staging.send([*columns, *updates])
        else:  # prompts that begin with many blocks of the prefix cache
            views = [*self.staging.send(columns), *self._more.send(updates)]
        if changes[1]:
            self.table.view(-1).index_copy_(0, views[7], views[8])
        return Columns(*views[:7])

    def columns(self, rows: int) -> Columns:
        """Where a decode step of so many rows is copied to."""
        at, views = 0, []
        for size, dtype in (
            *((rows, torch.long),) * 4, (rows + 1, torch.int32), (rows, torch.int32),
            (rows, torch.long),
        ):  # fmt: skip
            views.append(self.staging.view(at, size, dtype))
            at += -(-size * dtype.itemsize // 8)
        return Columns(*views)

    def step_of(
        self, columns: Columns, step: HostStep, *, unknown: bool, width: int | None = None
    ) -> DeviceStep:
        """What is computed on the device of a step's columns: tokens and tables of its slots.

        Args:
            unknown: whether there may be tokens that only the device knows.
            width: blocks of a row's table. None: those of the longest row.
        """
        tokens, slots = columns.tokens, columns.slots
        if unknown:
            count = step.num_decode
            known = torch.where(
                tokens[:count] < 0, self.last.index_select(0, slots[:count]), tokens[:count]
            )
            tokens = known if tokens.shape[0] == count else torch.cat([known, tokens[count:]])
        longest = step.longest if width is None else width * self.block_size
        tables = self.table[:, : width or step.width].index_select(0, slots)
        return DeviceStep(
            tokens, columns.positions, columns.places, columns.wanted, columns.begins,
            columns.lengths, tables, step.most, longest, slots, step.chunks,
        )  # fmt: skip
