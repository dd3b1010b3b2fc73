"""The check: a schedule that would hang, or forgets something, is refused before a rank starts.

Four questions, each answered with the whole board and the failing cell marked:

1. Does every action stand on the rank that holds its stage, and is it one that can be?
2. Is everything done once: F, then B (or I and W) of every stage and microbatch, with every
   message sent once and received once?
3. Do both ends of a pair of ranks keep the same order? (Messages carry no names: swapped receives
   of equal size would exchange their data in silence.)
4. Does it complete where every action blocks and a send completes only together with its receive?
   Then it completes on NCCL, which runs what a communicator is given in order and promises no
   buffering, and on every backend that buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from hocket.schedules.lower import halves, remove_communication
from hocket.spec.errors import ScheduleError
from hocket.spec.layout import Layout
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    SENDS,
    UNSHARD,
    WEIGHT,
    Action,
    Schedule,
    schedule_text,
)

Cell = tuple[int, int]
"""(pipeline rank, step)."""

_OTHER_END = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}


def validate_schedule(
    schedule: Schedule,
    *,
    layout: Layout | None = None,
    num_microbatches: int | None = None,
    compute_only: bool = False,
) -> None:
    """Refuse a schedule that cannot run.

    Args:
        schedule: what to check.
        layout: that it must fit: pipeline ranks, stages, and the reduction over data ranks.
        num_microbatches: that it must have.
        compute_only: it is not lowered yet; ask nothing about messages.

    Raises:
        ScheduleError: with the board, the failing cell between arrows.
    """
    check = _Check(schedule, compute_only)
    check.fit(layout, num_microbatches)
    check.places()
    check.counts()
    if not compute_only:
        if layout is not None and layout.dp * layout.cp > 1:
            check.reductions()
        check.pairs()
    check.play()


def _missing_hint(action: Action) -> str:
    return f"add {action} to the line of its rank"


class _Check:
    """One schedule under examination."""

    def __init__(self, schedule: Schedule, compute_only: bool) -> None:
        self.schedule = schedule
        self.compute_only = compute_only
        self.place = schedule.stage_ranks
        self.cells: dict[Action, Cell] = {}

    def refuse(
        self,
        message: str,
        cell: Cell | None = None,
        hint: str | None = None,
        mark: Collection[Cell] = (),
    ) -> None:
        where = "" if cell is None else f"rank {cell[0]}, step {cell[1]}: "
        raise ScheduleError(
            f"schedule {self.schedule.name!r}: {where}{message}\n"
            + schedule_text(self.schedule.ranks, mark=mark or ([] if cell is None else [cell])),
            hint=hint,
        )

    def actions(self) -> Iterator[tuple[Cell, Action]]:
        """(cell, action), the halves of OVERLAP_F_B apart."""
        for rank, line in enumerate(self.schedule.ranks):
            for step, action in enumerate(line):
                for half in halves(action):
                    yield (rank, step), half

    # --- does it fit? ----------------------------------------------------------------------

    def fit(self, layout: Layout | None, num_microbatches: int | None) -> None:
        schedule = self.schedule
        if schedule.num_microbatches < 1:
            self.refuse(f"{schedule.num_microbatches} microbatches; a step has at least 1")
        if not schedule.stage_ranks:
            self.refuse("no stage at all")
        for rank in range(schedule.num_ranks):
            if rank not in self.place:
                self.refuse(f"rank {rank} holds no stage (stage ranks {self.place})")
        if num_microbatches is not None and num_microbatches != schedule.num_microbatches:
            raise ScheduleError(
                f"schedule {schedule.name!r} is for {schedule.num_microbatches} microbatches, "
                f"the step has {num_microbatches}",
                hint=f"microbatches={schedule.num_microbatches}",
            )
        if layout is None:
            return
        if schedule.num_ranks != layout.pp:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.num_ranks} pipeline ranks, "
                f"the layout {layout} has pp {layout.pp}",
                hint=f"pp{schedule.num_ranks}",
            )
        if schedule.num_stages != layout.num_stages:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.num_stages} stages, the layout "
                f"{layout} has {layout.num_stages} (pp {layout.pp} x {layout.virtual_stages})",
                hint=f"virtual_stages={-(-schedule.num_stages // layout.pp)}",
            )

    # --- 1: each action where it can be ------------------------------------------------------

    def places(self) -> None:
        schedule, last = self.schedule, self.schedule.num_stages - 1
        for cell, action in self.actions():
            if action.stage > last:
                self.refuse(f"{action}: there are only the stages 0 to {last}", cell)
            if self.place[action.stage] != cell[0]:
                self.refuse(f"{action}: rank {self.place[action.stage]} holds that stage", cell)
            if action.microbatch is not None and action.microbatch >= schedule.num_microbatches:
                self.refuse(
                    f"{action}: the step has only the microbatches 0 to "
                    f"{schedule.num_microbatches - 1}",
                    cell,
                )
            if action.kind in (UNSHARD, RESHARD):
                self.refuse(f"{action}: sharded parameters are gathered within F and B", cell)
            if action.kind in (*SENDS, *RECEIVES):
                self.message(cell, action)
            if action in self.cells:
                rank, step = self.cells[action]
                self.refuse(f"{action} is done twice, first by rank {rank} at step {step}", cell)
            self.cells[action] = cell

    def message(self, cell: Cell, action: Action) -> None:
        """Refuse a message to nobody, to oneself, or in a schedule that has none yet."""
        if self.compute_only:
            self.refuse(f"{action} in a schedule of compute actions alone", cell)
        peer = action.peer_stage
        if not 0 <= peer < self.schedule.num_stages:
            self.refuse(f"{action}: there is no stage {peer} at the other end", cell)
        if self.place[peer] == cell[0]:
            self.refuse(f"{action}: stage {peer} is on the same rank, no send is needed", cell)

    # --- 2: each action once -----------------------------------------------------------------

    def counts(self) -> None:
        last = self.schedule.num_stages - 1
        for stage in range(last + 1):
            for m in range(self.schedule.num_microbatches):
                self.need(Action(stage, FORWARD, m))
                whole = self.cells.get(Action(stage, BACKWARD, m))
                parts = [Action(stage, kind, m) for kind in (INPUT, WEIGHT)]
                for part in parts:
                    if whole is not None and part in self.cells:
                        self.refuse(
                            f"{part} repeats a half of {stage}{BACKWARD}{m}", self.cells[part]
                        )
                if whole is None and not any(part in self.cells for part in parts):
                    self.need(Action(stage, BACKWARD, m))
                if whole is None:
                    for part in parts:
                        self.need(part)
                if self.compute_only:
                    continue
                if stage < last and self.place[stage] != self.place[stage + 1]:
                    self.need(Action(stage, SEND_F, m))
                    self.need(Action(stage + 1, RECV_F, m))
                    self.need(Action(stage + 1, SEND_B, m))
                    self.need(Action(stage, RECV_B, m))

    def need(self, action: Action) -> None:
        if action in self.cells:
            return
        rank = self.place[action.stage]
        if action.kind in SENDS:
            end = _other_end(action)
            if end in self.cells:
                self.refuse(
                    f"{end} receives without a matching send: rank {rank} has no {action}",
                    self.cells[end],
                    _missing_hint(action),
                )
        self.refuse(f"rank {rank} forgets {action}", hint=_missing_hint(action))

    def reductions(self) -> None:
        for stage in range(self.schedule.num_stages):
            self.need(Action(stage, REDUCE_GRAD))

    # --- 3: both ends of a pair in the same order ----------------------------------------------

    def pairs(self) -> None:
        sent: dict[Cell, list[Action]] = defaultdict(list)
        received: dict[Cell, list[Action]] = defaultdict(list)
        for (rank, _), action in self.actions():
            if action.kind in SENDS:
                end = _other_end(action)
                sent[rank, self.place[end.stage]].append(end)
            elif action.kind in RECEIVES:
                received[self.place[action.peer_stage], rank].append(action)
        for pair, arriving in sent.items():
            for comes, taken in zip(arriving, received[pair], strict=True):
                if comes != taken:
                    self.refuse(
                        f"{taken} is received next from rank {pair[0]}, which sends "
                        f"{_other_end(comes)} first: the data would be exchanged",
                        self.cells[taken],
                        f"receive {comes} before {taken}",
                    )

    # --- 4: does it complete? ------------------------------------------------------------------

    def play(self) -> None:
        """Simulate lines in which every action blocks; a message is one event of both its ends."""
        lines = self.schedule.ranks
        steps = [0] * len(lines)
        done: set[Action] = set()
        moved = True
        while moved:
            moved = False
            for rank, line in enumerate(lines):
                while steps[rank] < len(line) and self.perform(rank, steps, done):
                    moved = True
        stuck = [r for r, line in enumerate(lines) if steps[r] < len(line)]
        if stuck:
            self.stuck(stuck, steps, done)

    def perform(self, rank: int, steps: list[int], done: set[Action]) -> bool:
        """Do the next action of a rank, a message together with its other end; whether it can."""
        action = self.schedule.ranks[rank][steps[rank]]
        if self.waits(action, done):
            return False
        if action.kind in (*SENDS, *RECEIVES):
            end = _other_end(action)
            peer = self.rank_of(end)
            line, step = self.schedule.ranks[peer], steps[peer]
            if step == len(line) or line[step] != end or self.waits(end, done):
                return False
            steps[peer] += 1
            done.add(end)
        steps[rank] += 1
        done.update(halves(action))
        return True

    def stuck(self, stuck: list[int], steps: list[int], done: set[Action]) -> None:
        """Refuse lines that stop at `steps`: name what a rank misses, or a cycle of ranks."""
        heads = {rank: self.schedule.ranks[rank][steps[rank]] for rank in stuck}
        for rank, action in heads.items():
            missing = [need for need in self.waits(action, done) if self.rank_of(need) == rank]
            if missing:
                self.refuse(
                    f"runs before what it needs; rank {rank}: {action} waits for {missing[0]}",
                    (rank, steps[rank]),
                )
        waits_for = {}
        for rank, action in heads.items():
            missing = self.waits(action, done)
            waits_for[rank] = missing[0] if missing else _other_end(action)
        # Every stopped rank waits for an action of another one: follow them to the cycle.
        seen: list[int] = []
        rank = stuck[0]
        while rank not in seen:
            seen.append(rank)
            rank = self.rank_of(waits_for[rank])
        cycle = sorted(seen[seen.index(rank) :])
        reasons = (f"rank {r}: {heads[r]} waits for {waits_for[r]}" for r in cycle)
        self.refuse(
            "it deadlocks; " + "; ".join(reasons),
            hint=None if self.compute_only else self.other_order(),
            mark=[(r, steps[r]) for r in cycle],
        )

    def other_order(self) -> str | None:
        """A hint where the same compute actions complete with their messages in another order."""
        try:
            validate_schedule(remove_communication(self.schedule), compute_only=True)
        except ScheduleError:
            return None
        return (
            "remove every SEND_F, RECV_F, SEND_B and RECV_B: hocket adds them in an order that "
            "completes"
        )

    def rank_of(self, action: Action) -> int:
        return self.place[action.stage]

    def waits(self, action: Action, done: set[Action]) -> list[Action]:
        """What `action` needs that is not done yet."""
        return [n for half in halves(action) for n in self.needs(half) if n not in done]

    def needs(self, action: Action) -> Iterator[Action]:
        stage, m, last = action.stage, action.microbatch, self.schedule.num_stages - 1
        if action.kind == FORWARD and stage > 0:
            yield self.before(stage, stage - 1, RECV_F, FORWARD, m)
        elif action.kind in (BACKWARD, INPUT):
            yield Action(stage, FORWARD, m)
            if stage < last:
                yield self.before(stage, stage + 1, RECV_B, BACKWARD, m)
        elif action.kind == WEIGHT:
            yield Action(stage, INPUT, m)
        elif action.kind == SEND_F:
            yield Action(stage, FORWARD, m)
        elif action.kind == SEND_B:
            yield self.gradient(stage, m)
        elif action.kind == REDUCE_GRAD:
            for n in range(self.schedule.num_microbatches):
                half = Action(stage, WEIGHT, n)
                yield half if half in self.cells else Action(stage, BACKWARD, n)

    def before(self, stage: int, peer: int, receive: str, compute: str, m: int | None) -> Action:
        """What brings the data of stage `peer` to `stage`: a receive, or the compute itself."""
        if self.place[stage] == self.place[peer] or self.compute_only:
            return Action(peer, compute, m) if compute == FORWARD else self.gradient(peer, m)
        return Action(stage, receive, m)

    def gradient(self, stage: int, m: int | None) -> Action:
        """The action that yields the gradient of a stage's input."""
        half = Action(stage, INPUT, m)
        return half if half in self.cells else Action(stage, BACKWARD, m)


def _other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive."""
    return Action(message.peer_stage, _OTHER_END[message.kind], message.microbatch)
