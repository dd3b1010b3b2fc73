"""StepPlan: what all ranks of a replica compute in one step; StepResult: what was sampled in it.

Row r of a plan adds positions start .. start+count-1 of one sequence to the cache; their tokens
stand one row after the other in `StepPlan.tokens`:

    rows      [slot 3, start 70, count 1]  [slot 0, start 12, count 1]  [slot 5, start 64, count 4]
    tokens     a                            b                            c  d  e  f

`BatchRow.logits` says which positions need logits, and so what the last stage's N rows of logits
are, in row order: none, the last one, or all of them. Workers keep, for each slot, a block table
(rows append to it) and what was given of the request when it was admitted. `released` comes before
`admitted`: a slot may be given to another request within one plan. A row of an admitted slot
begins with an empty block table; its `new_blocks` then also hold what the prefix cache lent.

    plan frame    "hkSP" version | number, rows, blocks, tokens, released, admitted, snapshots,
                  widest, decoding
                  int32 columns  slot* start* count* logits* blocks-of-row* next_token*
                  int32          new blocks | tokens | released | row, load, save, cut of snapshots
                  admissions
    result frame  "hkSR" version | number, tokens, logprobs, rows with prompt logprobs, failures,
                  int32s, float64s; then these
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

from hocket.serving.request import TokenLogprobs
from hocket.serving.scheduling.admission import Admission, decode_admission, encode_admission
from hocket.serving.scheduling.frames import VERSION, Buffer, Reader, packed_numbers

NONE: Final = 0
LAST: Final = 1
ALL: Final = 2

UNKNOWN: Final = -1
"""A token that the plan before samples."""

_PLAN = struct.Struct("<4sIQ8I")
_RESULT = struct.Struct("<4sIQ6I")
_PLAN_MAGIC = b"hkSP"
_RESULT_MAGIC = b"hkSR"


@dataclasses.dataclass(slots=True)
class BatchRow:
    """One sequence's part of a plan.

    Attributes:
        slot: the worker's row, 0 .. max_num_seqs-1.
        start: tokens of the sequence already in the cache.
        count: tokens that this plan adds.
        logits: NONE, LAST or ALL.
        new_blocks: appended to the slot's block table before the step.
        next_token: with ALL, the token that follows the last position, whose log-probability is
            wanted; -1 where none follows: then the last position is sampled instead.
    """

    slot: int
    start: int
    count: int
    logits: int
    new_blocks: Sequence[int] = ()
    next_token: int = -1

    @property
    def samples(self) -> bool:
        """Whether the last position's logits choose the sequence's next token."""
        return self.logits == LAST or (self.logits == ALL and self.next_token < 0)

    @property
    def num_logits(self) -> int:
        """Positions whose logits are made."""
        return self.count if self.logits == ALL else self.logits


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of what recurrent layers keep of a row's sequence.

    Attributes:
        row: of the plan.
        load: the snapshot that the row begins with, before the step; -1: none.
        save: the snapshot that is written once `cut` of the row's tokens are computed; -1: none.
    """

    row: int
    load: int = -1
    save: int = -1
    cut: int = 0


@dataclasses.dataclass(slots=True)
class StepPlan:
    """One step of a replica.

    Attributes:
        number: of the plan; consecutive, from 0.
        rows: those with one token first, then chunks of prompts; one row per slot at most. None:
            an idle plan, whose one token stands for what other data ranks compute.
        tokens: the rows' new token ids, one row after the other; -1 in a row of one token: the
            one that the plan before it samples for its slot, which only the device knows yet.
        admitted: requests that got a slot, given before their first row.
        released: slots freed since the plan before; to be done before `admitted`.
        snapshots: of recurrent states, where the model has any.
        widest: tokens of the data rank that has most of them in this step; 0: of this one alone.
        decoding: whether every row of every other data rank adds one token.
    """

    number: int
    rows: list[BatchRow]
    tokens: list[int]
    admitted: list[Admission] = dataclasses.field(default_factory=list)
    released: list[int] = dataclasses.field(default_factory=list)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    widest: int = 0
    decoding: bool = True

    @property
    def num_logits(self) -> int:
        """Rows of logits that the last stage makes."""
        return sum(row.num_logits for row in self.rows)

    def encode(self) -> bytes:
        """The plan's frame."""
        rows = self.rows
        ints: list[int] = [row.slot for row in rows]
        ints += [row.start for row in rows]
        ints += [row.count for row in rows]
        ints += [row.logits for row in rows]
        ints += [len(row.new_blocks) for row in rows]
        ints += [row.next_token for row in rows]
        before = len(ints)
        for row in rows:
            if row.new_blocks:
                ints += row.new_blocks
        blocks = len(ints) - before
        ints += self.tokens
        ints += self.released
        for one in self.snapshots:
            ints += (one.row, one.load, one.save, one.cut)
        head = _PLAN.pack(
            _PLAN_MAGIC, VERSION, self.number, len(rows), blocks, len(self.tokens),
            len(self.released), len(self.admitted), len(self.snapshots),
            self.widest, self.decoding,
        )  # fmt: skip
        parts = [head, packed_numbers(ints), *map(encode_admission, self.admitted)]
        return b"".join(parts)

    @classmethod
    def decode(cls, buffer: Buffer) -> StepPlan:
        """The inverse of `encode`.

        Raises:
            FrameError: anything but what `encode` made.
        """
        reader = Reader(buffer, "step plan", _PLAN, _PLAN_MAGIC)
        number, rows, blocks, tokens, released, admitted, copied, widest, decoding = reader.head
        reader.check(decoding < 2, f"decoding is {decoding}")
        reader.check(
            not widest or widest >= tokens, f"it holds {tokens} tokens, the widest {widest}"
        )
        ints = reader.ints(6 * rows + blocks + tokens + released + 4 * copied)
        copies = ints[len(ints) - 4 * copied :]
        del ints[len(ints) - 4 * copied :]
        snapshots = list(map(Snapshot, copies[::4], copies[1::4], copies[2::4], copies[3::4]))
        for one in snapshots:
            known = 0 <= one.row < rows and min(one.load, one.save) >= -1
            reader.check(known and one.cut >= 0, "a snapshot is of no row")
        slots, starts, counts = ints[:rows], ints[rows : 2 * rows], ints[2 * rows : 3 * rows]
        logits, lengths = ints[3 * rows : 4 * rows], ints[4 * rows : 5 * rows]
        nexts = ints[5 * rows : 6 * rows]
        at = 6 * rows
        if rows:
            reader.check(min(slots) >= 0, "a slot is negative")
            reader.check(len(set(slots)) == rows, "a slot has two rows")
            reader.check(min(starts) >= 0, "a start is negative")
            reader.check(min(counts) >= 1, "a row adds no token")
            reader.check(min(lengths) >= 0, "a row takes a negative number of blocks")
            reader.check(min(logits) >= 0 and max(logits) <= ALL, "a row's logits are of no kind")
        idle = rows == 0 and tokens == 1
        reader.check(
            idle or sum(counts) == tokens, f"its rows add {sum(counts)} tokens, it holds {tokens}"
        )
        reader.check(
            sum(lengths) == blocks, f"its rows take {sum(lengths)} blocks, it holds {blocks}"
        )
        token_ids = ints[at + blocks : at + blocks + tokens]
        others = ints[at : at + blocks] + ints[at + blocks + tokens :]
        reader.check(min(others, default=0) >= 0, "an id is negative")
        if tokens and min(token_ids) < 0:
            decoding = next((i for i, count in enumerate(counts) if count > 1), rows)
            reader.check(min(token_ids) >= UNKNOWN, "a token is negative")
            reader.check(min(token_ids[decoding:], default=0) >= 0, "a prompt's token is not known")
        given: list[list[int] | tuple[()]] = []
        for length in lengths:
            given.append(ints[at : at + length] if length else ())
            at += length
        freed = ints[at + tokens :]
        admissions = [decode_admission(reader) for _ in range(admitted)]
        reader.end()
        made = list(map(BatchRow, slots, starts, counts, logits, given, nexts))
        decode = bool(decoding)
        return cls(number, made, token_ids, admissions, freed, snapshots, widest, decode)


@dataclasses.dataclass(slots=True)
class StepResult:
    """What the last stage found.

    Attributes:
        number: the plan's.
        tokens: the token of each row that samples, in row order.
        logprobs: place in `tokens` to the log-probabilities, for rows that asked for them.
        prompt_logprobs: row of the plan with logits ALL to the log-probabilities of the tokens
            after each of its positions; one fewer than `count` where the last is sampled.
        failed: place in `tokens` to the reason why no token could be chosen there; the token is
            then not looked at, and the request ends with an error.
    """

    number: int
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """The result's frame."""
        ints: list[int] = list(self.tokens)
        floats: list[float] = []
        ints += self.logprobs
        ints += self.prompt_logprobs
        ints += [len(entries) for entries in self.prompt_logprobs.values()]
        for one in self.logprobs.values():
            _put(one, ints, floats)
        for entries in self.prompt_logprobs.values():
            for one in entries:
                _put(one, ints, floats)
        texts = []
        for place, text in self.failed.items():
            texts.append(text.encode("utf-8", "replace"))
            ints += (place, len(texts[-1]))
        head = _RESULT.pack(
            _RESULT_MAGIC, VERSION, self.number, len(self.tokens), len(self.logprobs),
            len(self.prompt_logprobs), len(self.failed), len(ints), len(floats),
        )  # fmt: skip
        return b"".join([head, packed_numbers(ints), packed_numbers(floats), *texts])

    @classmethod
    def decode(cls, buffer: Buffer) -> StepResult:
        """The inverse of `encode`.

        Raises:
            FrameError: anything but what `encode` made.
        """
        reader = Reader(buffer, "step result", _RESULT, _RESULT_MAGIC)
        number, num_tokens, num_logprobs, num_rows, num_failed, held, floated = reader.head
        ints = reader.ints(held)
        floats = reader.floats(floated)
        numbers = num_tokens + num_logprobs + 2 * num_rows + 2 * num_failed
        reader.check(numbers <= held, f"it names {numbers} numbers and holds {held}")
        at = num_tokens
        places, at = ints[at : at + num_logprobs], at + num_logprobs
        rows, at = ints[at : at + num_rows], at + num_rows
        lengths, at = ints[at : at + num_rows], at + num_rows
        reader.check(not lengths or min(lengths) >= 0, "a row has a negative number of positions")
        logprobs = _Logprobs(reader, ints[at : held - 2 * num_failed], floats)
        given = {place: logprobs.take() for place in places}
        prompt = {
            row: [logprobs.take() for _ in range(length)]
            for row, length in zip(rows, lengths, strict=True)
        }
        logprobs.end()
        reader.check(len(given) == num_logprobs and len(prompt) == num_rows, "a row is named twice")
        failures = ints[held - 2 * num_failed :]
        failed = {}
        for place, length in zip(failures[::2], failures[1::2], strict=True):
            reader.check(length >= 0, "a reason has a negative length")
            failed[place] = reader.text(length)
        reader.end()
        for place in (*places, *failed):
            reader.check(0 <= place < num_tokens, f"place {place} is not among {num_tokens} tokens")
        return cls(number, ints[:num_tokens], given, prompt, failed)


def _put(one: TokenLogprobs, ints: list[int], floats: list[float]) -> None:
    ints += (one.token, len(one.top))
    floats.append(float(one.logprob))
    for token, logprob in one.top:
        ints.append(token)
        floats.append(float(logprob))


class _Logprobs:
    """Columns of log-probabilities, read entry by entry."""

    def __init__(self, reader: Reader, ints: list[int], floats: list[float]) -> None:
        self._reader, self._ints, self._floats = reader, ints, floats
        self._int = self._float = 0

    def take(self) -> TokenLogprobs:
        at, given = self._int, self._float
        self._reader.check(at + 2 <= len(self._ints), "log-probabilities are missing")
        token, count = self._ints[at : at + 2]
        self._int, self._float = at + 2 + count, given + 1 + count
        self._reader.check(
            count >= 0 and self._int <= len(self._ints) and self._float <= len(self._floats),
            "log-probabilities are missing",
        )
        tokens = self._ints[at + 2 : self._int]
        top = tuple(zip(tokens, self._floats[given + 1 : self._float], strict=True))
        return TokenLogprobs(token, self._floats[given], top)

    def end(self) -> None:
        whole = self._int == len(self._ints) and self._float == len(self._floats)
        self._reader.check(whole, "more log-probabilities are stored than named")
