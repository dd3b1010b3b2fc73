"""Which rank failed first, and what to tell of it.

When one rank dies the others lose their connections and fail in turn. Theirs are symptoms:
the cause is the earliest failure that is not one, and only its traceback is shown.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.launch import symptoms
from hocket.launch.heartbeat import Beat
from hocket.spec import errors

# A stack that ends in one of these waits for other ranks: the one they wait for does not.
_WAITING = (
    "torch/distributed/",
    "hocket/runtime/shm/",
    "hocket/runtime/collectives.py",
)


_COMMUNICATING = ("/torch/", "hocket/runtime/")
"""Code that a rank which waits for others is in, innermost."""

_IN_C = re.compile(r"\.wait\(|store(\(\))?\.get\(|\b_c10d_functional\.")
"""A line of code that waits for other ranks in C++, without a frame of its own: for a work of
Gloo, for a key of the store, for a collective in a file that Inductor made of a graph."""

_OPERATOR = "/torch/_ops.py"
"""Torch's call of an operator: the line of its caller has the operator's name."""

NO_STACK = "  gave no whole stack"
"""How the text of a rank begins whose stack is not known."""

SHOWN = 6
"""Innermost calls that are shown of a rank that waits."""
MANY = 32
"""Ranks whose heartbeats are shown."""

Positions = dict[int, dict[str, tuple[list[int], int]] | None]
"""Rank to axis to its ranks and the number of collectives enqueued; None: it gave no answer."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One rank's end before its time.

    Attributes:
        rank, pid, time: who and when (by the monotonic clock, one for all ranks).
        report: what the rank itself said of its exception; None where it could not.
        code: exit code, negative for a signal; None while it still lives.
        tail: last lines of its output, with the stack of a crash after them.
    """

    rank: int
    pid: int | None
    time: float
    report: dict[str, Any] | None
    code: int | None = None
    tail: tuple[str, ...] = ()

    @property
    def symptom(self) -> bool:
        """It only says that another rank is gone: so did its exception, or NCCL's watchdog, which
        ended it."""
        if self.report is None:
            return self.code == -signal.SIGABRT and symptoms.of_nccl(self.tail)
        return bool(self.report["lost_peer"])


def first(failures: Sequence[Failure]) -> Failure:
    """The cause: the earliest that is no symptom, or else the earliest."""
    return min(failures, key=lambda f: (f.symptom, f.time))


def to_error(failures: Sequence[Failure], world_size: int, stacks: str = "") -> errors.HocketError:
    """The exception to raise in the parent.

    A HocketError of the rank comes back as itself; everything else as RankFailure, with the
    rank's own traceback. `stacks` tells of ranks that live on and may be what the others miss.
    """
    cause = first(failures)
    who = f"rank {cause.rank} of {world_size}"
    others = sorted(f.rank for f in failures if f is not cause)
    after = ""
    if others:
        label = "rank" if len(others) == 1 else "ranks"
        after = f"\n({label} {', '.join(map(str, others))} failed after it; not shown)"
    report = cause.report
    if report is None:
        error: errors.HocketError = errors.RankFailure(
            f"{who} (process {cause.pid}) {end_of(cause.code)}" + _tail(cause) + after + stacks,
            hint=HINTS.get(cause.code),
        )
    elif report["hocket"] not in (None, "RankFailure"):
        kind: type[errors.HocketError] = getattr(errors, report["hocket"])
        error = kind(report["message"], hint=report["hint"])
        error.add_note(f"raised on {who}\n{report['traceback']}")
    else:
        text = f"{who} failed: {report['type']}: {report['message']}\n\n{report['traceback']}"
        error = errors.RankFailure(text + after + stacks)
    error.rank = cause.rank  # type: ignore[attr-defined]
    error.time = time.time()  # type: ignore[attr-defined]
    error.cause = _cause(cause)  # type: ignore[attr-defined]
    return error


def _cause(failure: Failure) -> str:
    """How a rank failed, in a form that is equal for equal failures."""
    if failure.report is None:
        return end_of(failure.code)
    return f"{failure.report['type']}: {failure.report['message']}"


HINTS: dict[int | None, str] = {
    -signal.SIGKILL: "out of memory, unless a user killed it: a smaller batch, or more tp or pp",
    -signal.SIGBUS: "shared memory may be full: see df /dev/shm, or take --backend gloo",
}


def end_of(code: int | None) -> str:
    """How a process ended, by its exit code (negative: by a signal), as a predicate."""
    if code is None:
        return "ended"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"left with exit code {code} in the middle of the run"


def _tail(failure: Failure) -> str:
    if not failure.tail:
        return ""
    return "\nits last words:\n" + "\n".join(f"  {line}" for line in failure.tail)


def silence(
    seconds: float,
    stacks: dict[int, str],
    begun: bool,
    positions: Positions | None = None,
    *,
    beats: Mapping[int, Beat] | None = None,
    stopped: Sequence[int] = (),
) -> errors.RankFailure:
    """No rank has progressed for `seconds`: the stacks, those first that wait for no other rank.

    `beats`: every rank's heartbeat. `stopped`: ranks whose process is stopped, which are at fault.
    """
    when = "" if begun else " since the start"
    text = f"no rank gave a sign of life for {seconds:.0f} s{when}; the run was ended"
    late = behind(positions or {})
    found = list(stopped) or _suspects(stacks, late)
    if stopped:
        label = "rank" if len(stopped) == 1 else "ranks"
        verb = "is" if len(stopped) == 1 else "are"
        text = f"{label} {', '.join(map(str, stopped))} {verb} stopped (SIGSTOP); no rank gave a "
        text += f"sign of life for {seconds:.0f} s, and the run was ended"
    elif len(stacks) > 1 and 0 < len(found) < len(stacks):
        label = "rank" if len(found) == 1 else "ranks"
        text += f"; {label} {', '.join(map(str, found))} may hold up the others"
    error = errors.RankFailure(
        text + show_beats(beats or {}) + show_stacks(stacks, late, found),
        hint="if a step may take this long, a larger --timeout",
    )
    error.rank = found[0] if found else None  # type: ignore[attr-defined]
    error.time = time.time()  # type: ignore[attr-defined]
    error.cause = "silence"  # type: ignore[attr-defined]
    error.beats = dict(beats or {})  # type: ignore[attr-defined]
    return error


def behind(positions: Positions) -> dict[int, str]:
    """The ranks that have enqueued fewer collectives of an axis than another of its ranks, and
    how far each is behind.

    Under NCCL a rank enqueues and goes on, so that its stack does not tell what it waits for:
    victims have enqueued all that they could, the rank at fault has not. A rank that gave no
    answer while others did (stopped, or in code that holds the interpreter) is behind them.
    """
    found: dict[int, str] = {}
    waits_for: dict[int, set[int]] = {}
    for rank, position in sorted(positions.items()):
        for axis, (ranks, count) in (position or {}).items():
            others = {r: positions.get(r) or {} for r in ranks}
            counts = {r: each[axis][1] for r, each in others.items() if axis in each}
            ahead = max(counts, key=lambda r: (counts[r], -r), default=rank)
            if counts.get(ahead, count) > count:
                more = f"rank {ahead} has {counts[ahead]}"
                found.setdefault(rank, f"has enqueued {count} collectives of axis {axis}, {more}")
            waits_for.setdefault(rank, set()).update(r for r in counts if counts[r] < count)
    # One that is ahead of another late rank on some axis waits for it, and is a victim.
    causes = {rank: how for rank, how in found.items() if not waits_for[rank] & set(found)}
    silent = [rank for rank, position in positions.items() if position is None]
    if silent and any(positions.values()):  # how far they are is not known: who waits for them?
        return dict.fromkeys(silent, "did not answer")
    return causes or found


def show_beats(beats: Mapping[int, Beat]) -> str:
    """A line a rank: where its heartbeat was last."""
    if not any(beat.ticks for beat in beats.values()):
        return ""
    shown = sorted(beats.items())[:MANY]
    more = f"\n  and {len(beats) - MANY} more" if len(beats) > MANY else ""
    return "".join(f"\n  rank {rank}: {beat}" for rank, beat in shown) + more


def show_stacks(
    stacks: dict[int, str], late: dict[int, str], suspects: list[int] | None = None
) -> str:
    """Stacks in full of the ranks that hold up the others, the innermost calls of those that
    wait."""
    if suspects is None:
        suspects = _suspects(stacks, late)
    full = suspects or list(stacks)[:1]
    parts = [f"\n\nrank {r}{_role(r, suspects, late)}:\n{stacks[r].rstrip()}" for r in full[:4]]
    rest = [r for r in stacks if r not in full[:4]]
    parts += [f"\nrank {r}: {_top(stacks[r])}" for r in rest]
    return "".join(parts)


def _suspects(stacks: dict[int, str], late: dict[int, str]) -> list[int]:
    """The ranks that the others seem to wait for, by their stacks and by who is `behind`.

    A rank whose stack is not known is one only where all the others wait.
    """
    unknown = [r for r, text in stacks.items() if text.startswith(NO_STACK)]
    busy = [r for r, text in stacks.items() if r not in unknown and not waits(text)]
    found = busy or unknown or list(stacks)
    return [r for r in found if r in late] or busy or unknown


def _role(rank: int, suspects: list[int], late: dict[int, str]) -> str:
    if rank not in suspects:
        return ""
    how = f"; it {late[rank]}" if rank in late else ""
    return f" (the others may be waiting for it{how})"


def waits(stack: str) -> bool:
    """Whether the main thread of this stack waits for other ranks."""
    frames = _main_thread(stack)
    if not frames:
        return False
    caller = next((frame for frame in frames if _OPERATOR not in frame), frames[0])
    if _IN_C.search(_source(caller)):
        return True
    if not any(place in frames[0] for place in _COMMUNICATING):
        return False  # other code runs, inside a collective perhaps
    return any(place in frame for frame in frames[:5] for place in _WAITING)


def _source(frame: str) -> str:
    """The line of code that a frame is at; empty where its file is not here."""
    found = re.search(r'File "(.+)", line (\d+)', frame)
    return linecache.getline(found[1], int(found[2])) if found else ""


def is_whole(stack: str) -> bool:
    """Whether a rank has written all of its stack: the outermost frame of the main thread is last,
    or a line of dots where there are more."""
    *_, last, rest = ["", "", *stack.split("\n")]
    return not rest and (last == "  ..." or bool(_CARRYING.search(last)))


def trim(stack: str) -> str:
    """A stack without the frames that merely carried the rank to its entry."""
    return "\n".join(line for line in stack.splitlines() if not _CARRYING.search(line))


_CARRYING = re.compile(r"/hocket/launch/(rank|server)\.py\"|<frozen runpy>")


def _main_thread(stack: str) -> list[str]:
    # faulthandler prints the main thread last, each thread's newest frame first.
    block = stack.rstrip().rsplit("(most recent call first):", 1)[-1]
    return [line for line in block.splitlines() if line.strip().startswith("File ")]


def _top(stack: str) -> str:
    frames = [frame.strip() for frame in _main_thread(stack)[:SHOWN]]
    return "\n    ".join(frames) if frames else stack.strip()
