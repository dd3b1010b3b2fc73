"""Schedule: when everything runs.

A schedule is one list of actions per pipeline rank. An action prints as stage, letter, microbatch,
in PyTorch's spelling, and parses back: `2F0` is stage 2, forward, microbatch 0. SEND_F of stage s
goes to stage s + 1 and RECV_F of stage s comes from stage s - 1; SEND_B of s goes to s - 1 and
RECV_B of s comes from s + 1.

    F            forward                       SEND_F RECV_F   activations between stages
    B            backward (input and weight)   SEND_B RECV_B   their gradients
    I W          its two halves                UNSHARD RESHARD parameters gathered, freed
    OVERLAP_F_B  both at once                  REDUCE_GRAD     gradients summed over data ranks
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from hocket.spec.errors import ScheduleError, unknown

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"
OVERLAP_F_B = "OVERLAP_F_B"

COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
SENDS = (SEND_F, SEND_B)
RECEIVES = (RECV_F, RECV_B)
WITHOUT_MICROBATCH = (UNSHARD, RESHARD, REDUCE_GRAD)
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *WITHOUT_MICROBATCH, OVERLAP_F_B)

_ACTION = re.compile(r"(\d{1,18})((?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|[FBIW])(\d{0,18})")
_OVERLAP = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
_FORMAT = "# hocket schedule 1"


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that one rank does: `stage`, `kind` (one of KINDS) and `microbatch`.

    OVERLAP_F_B holds its two halves in `parts` (a forward, then a backward).
    """

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, Action] | None = None

    def __str__(self) -> str:
        if self.parts is not None:
            return f"({self.parts[0]};{self.parts[1]}){OVERLAP_F_B}"
        return f"{self.stage}{self.kind}" + (
            "" if self.microbatch is None else str(self.microbatch)
        )

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`. Raises ScheduleError where the text is no action."""
        text = text.strip()
        overlap = _OVERLAP.fullmatch(text)
        if overlap:
            forward, backward = cls.parse(overlap[1]), cls.parse(overlap[2])
            return cls(forward.stage, OVERLAP_F_B, forward.microbatch, (forward, backward))
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text[:60]!r} is not an action",
                hint="stage, letter, microbatch: 2F0, 2SEND_F0, 2RECV_B1, 2B0, 2REDUCE_GRAD",
            )
        stage, kind, microbatch = match.groups()
        if (microbatch == "") != (kind in WITHOUT_MICROBATCH):
            need = "takes no" if kind in WITHOUT_MICROBATCH else "needs a"
            raise ScheduleError(f"{text!r}: {kind} {need} microbatch number")
        return cls(int(stage), kind, int(microbatch) if microbatch else None)

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive."""
        assert self.kind in (*SENDS, *RECEIVES), self
        return self.stage + (1 if self.kind in (SEND_F, RECV_B) else -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One list of actions per pipeline rank.

    Attributes:
        name: what it is called.
        num_microbatches: microbatches of one step on one data rank.
        stage_ranks: stage to the pipeline rank (index on the pp axis) that holds it.
        ranks: per pipeline rank, its actions in order.
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages held by one pipeline rank, ascending."""
        return tuple(s for s, r in enumerate(self.stage_ranks) if r == rank)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(pipeline rank, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action

    def __str__(self) -> str:
        """The text form: a header, then one line of comma-separated actions per rank."""
        header = [
            _FORMAT,
            f"# name: {self.name}",
            f"# microbatches: {self.num_microbatches}",
            "# stage ranks: " + " ".join(map(str, self.stage_ranks)),
        ]
        return "\n".join(header + [",".join(map(str, line)) for line in self.ranks]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of `str`.

        Raises:
            ScheduleError: no header, or a line that holds something that is no action.
        """
        lines = text.splitlines()
        if not lines or lines[0].strip() != _FORMAT:
            raise ScheduleError(f"a schedule file begins with the line {_FORMAT!r}")
        fields: dict[str, str] = {}
        rows: list[tuple[Action, ...]] = []
        for number, line in enumerate(lines[1:], start=2):
            line = line.strip()
            if line.startswith("#"):
                key, _, value = line[1:].partition(":")
                fields[key.strip()] = value.strip()
            elif line:
                try:
                    rows.append(tuple(Action.parse(a) for a in line.split(",") if a.strip()))
                except ScheduleError as error:
                    raise ScheduleError(
                        f"line {number}: {error.message}", hint=error.hint
                    ) from None
        needed = ("name", "microbatches", "stage ranks")
        for key in fields:
            if key not in needed:
                message, hint = unknown("header field", key, needed)
                raise ScheduleError(message, hint=hint)
        missing = [key for key in needed if key not in fields]
        if missing:
            raise ScheduleError(f"the schedule's header lacks {', '.join(missing)}")
        try:
            stage_ranks = tuple(int(n) for n in fields["stage ranks"].split())
            microbatches = int(fields["microbatches"])
        except ValueError as error:
            raise ScheduleError(f"the schedule's header holds a bad number: {error}") from None
        if any(not 0 <= r < len(rows) for r in stage_ranks):
            raise ScheduleError(
                f"the header places stages on ranks {stage_ranks}, the file has {len(rows)} ranks"
            )
        return cls(
            name=fields["name"],
            num_microbatches=microbatches,
            stage_ranks=stage_ranks,
            ranks=tuple(rows),
        )


def schedule_text(ranks: Sequence[Sequence[Action]], mark: Collection[tuple[int, int]] = ()) -> str:
    """The whole schedule, rank by step, with the cells in `mark` (rank, step) between arrows."""
    cells = [[str(a) for a in line] for line in ranks]
    for rank, step in mark:
        if step < len(cells[rank]):
            cells[rank][step] = f">>{cells[rank][step]}<<"
    depth = max((len(line) for line in cells), default=0)
    widths = [
        max([len(line[i]) for line in cells if i < len(line)] + [len(str(i))]) for i in range(depth)
    ]
    head = "step    " + " ".join(str(i).ljust(w) for i, w in enumerate(widths))
    rows = [
        f"rank {r:<3}" + " ".join(c.ljust(w) for c, w in zip(line, widths, strict=False))
        for r, line in enumerate(cells)
    ]
    return "\n".join(line.rstrip() for line in [head, *rows])
