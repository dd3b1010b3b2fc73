"""Restart: the ranks of a run are started again after a failure, from its newest checkpoint.

    attempt 0 -> a rank dies -> the others are ended -> attempt 1, from the checkpoint

The launcher stays warm, so that a restart forks the ranks and imports nothing. Each attempt has its
own prefix in the store and its own listening socket. What a user has to mend (a loss that is not
finite, memory) is not restarted, nor is a failure that comes back at the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.spec.checkpoint import resumable_checkpoints
from hocket.spec.errors import CheckpointError, HocketError, RankFailure, ReplicaError
from hocket.spec.run import RunFolder, RunSpec
from hocket.spec.schedule import Schedule

if TYPE_CHECKING:
    from hocket.jobs.record import JobRecorder
    from hocket.launch import Launcher


AROUND = 8
"""Actions of a schedule's line that are shown before and after the one a rank was in."""
MANY = 32
"""Ranks whose lines are shown."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What makes two failures equal: the step after which, the rank, and how it ended."""

    step: int
    rank: int | None
    cause: str


class DeviceGone(Exception):
    """With `--elastic`: a rank died twice before its first step; `ranks` are left."""

    def __init__(self, text: str, ranks: int) -> None:
        super().__init__(text)
        self.ranks = ranks


def run_with_restarts(
    launcher: Launcher,
    entry: str,
    folder: RunFolder,
    spec: RunSpec,
    record: JobRecorder,
    *,
    payload: dict[str, Any],
    **limits: Any,
) -> None:
    """Run the ranks of a prepared run folder to the end of the run, over any number of failures.

    Args:
        entry, payload, limits: as of `Launcher.run`.
        spec: `options.max_restarts` bounds the restarts in a row without a new checkpoint between
            them.

    Raises:
        RankFailure: restarts are used up, or the same failure came back at the same step.
        DeviceGone: with `--elastic`, one that came back before any step.
        HocketError: what a rank raised that a restart does not mend.
    """
    from hocket.models.source import require_own_base

    most, used, attempt = spec.options.max_restarts, 0, len(record.failures)
    resume, last, saved = spec.options.resume, None, record.saved
    while True:
        try:
            launcher.run(
                entry,
                spec.layout.world_size,
                {**payload, "resume": resume},
                record,
                attempt=attempt,
                stoppable=True,
                **limits,
            )
            return
        except CheckpointError as error:
            # None is whole: the run begins again, if it was here that it began.
            if not attempt or not resume or spec.options.resume:
                raise
            failed, resume = time.monotonic(), False
            record.note(f"{error.message}; the run starts again from its first step")
        except (RankFailure, ReplicaError) as error:
            if isinstance(error, ReplicaError) and spec.options.on_divergence != "repair":
                raise
            failed = time.monotonic()
            error.message += schedule_lines(spec, folder, getattr(error, "beats", {}))
            _keep(folder, record, error)
            if launcher.stop_asked:
                newest = next(resumable_checkpoints(folder.checkpoints), None)
                if newest is None:
                    raise
                record.note(f"{_first_line(error)}; the run was asked to stop: {newest} is kept")
                record.stopped = True
                return
            if not hasattr(error, "rank") or not launcher.revive():
                raise
            if record.saved != saved:  # what fails now has not failed since it was passed
                used, saved, last = 0, record.saved, None
            fault = Fault(record.step, error.rank, str(getattr(error, "cause", "")))
            if most and fault == last:
                shrinks = spec.options.elastic and "fork server" not in error.message
                if shrinks and not record.stepped and spec.layout.world_size > 1:
                    record.failures.append(str(error))
                    raise DeviceGone(_first_line(error), spec.layout.world_size - 1) from error
                raise _again(error, fault) from None
            if used >= most:
                raise _used_up(error, used) from None
            last, used = fault, used + 1
            newest = next(resumable_checkpoints(folder.checkpoints), None)
            resume = newest is not None
            origin = f"checkpoint {newest.name}" if newest else "the first step"
            if spec.options.replicate_state:
                origin = f"the newest copy in memory, or {origin}"
            record.note(
                f"{_first_line(error)}, after step {fault.step}; restart {used} of {most}, "
                f"from {origin}"
            )
            record(
                {
                    "event": "restart", "rank": error.rank, "cause": _first_line(error),
                    "step": fault.step, "restarts": used,
                    "time": getattr(error, "time", time.time()),
                }
            )  # fmt: skip
            record.failures.append(str(error))
        require_own_base(folder, spec)
        attempt += 1
        record.restarting(failed)


def schedule_lines(spec: RunSpec, folder: RunFolder, beats: Mapping[int, Any]) -> str:
    """The schedule's line of each rank that was inside a step, its action in brackets."""
    rows = []
    with contextlib.suppress(OSError, ValueError, HocketError):
        schedule = Schedule.parse(folder.schedule_file.read_text())
        for rank, beat in sorted(beats.items())[:MANY]:
            line = schedule.ranks[spec.layout.coordinate(rank)["pp"]]
            if not 0 <= beat.action < len(line):
                continue
            first, last = max(0, beat.action - AROUND), beat.action + AROUND + 1
            cells = [str(action) for action in line[first:last]]
            cells[beat.action - first] = f"[{cells[beat.action - first]}]"
            before, after = "... " * (first > 0), " ..." * (last < len(line))
            rows.append(f"\n  rank {rank}: {before}{' '.join(cells)}{after}")
    return "\n\nwhere each rank was in the schedule:" + "".join(rows) if rows else ""


def _keep(folder: RunFolder, record: JobRecorder, error: HocketError) -> None:
    """Append a failure in full to failures.txt of the run folder."""
    when = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with contextlib.suppress(OSError), folder.failures_file.open("a") as file:
        file.write(f"{when}, after step {record.step}\n{error}\n\n")


def _first_line(error: HocketError) -> str:
    return error.message.split("\n", maxsplit=1)[0]


def _with_rank(new: RankFailure, error: HocketError) -> RankFailure:
    new.rank = getattr(error, "rank", None)  # type: ignore[attr-defined]
    return new


def _again(error: HocketError, fault: Fault) -> RankFailure:
    text = (
        f"the same failure came back after step {fault.step}, so the run is not restarted again\n"
        f"{error.message}"
    )
    return _with_rank(RankFailure(text, hint=error.hint), error)


def _used_up(error: HocketError, used: int) -> HocketError:
    if not used:
        return error
    text = (
        f"{used} restarts in a row reached no new checkpoint, so the run is not restarted again\n"
        f"{error.message}"
    )
    return _with_rank(RankFailure(text, hint=error.hint or f"--max-restarts {2 * used}"), error)
