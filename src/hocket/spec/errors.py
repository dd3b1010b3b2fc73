"""Errors by guilt: what the user can mend is a HocketError; what we broke is an assert.

HocketError                 message with the numbers, and one hint that can be pasted
 +- OptionError             a flag, key or value that cannot be
 +- LayoutError             a layout that does not fit the world, the model or the batch
 +- ScheduleError           a schedule that would deadlock or forgets an action
 +- ModelError              a model that is unknown, unreadable or breaks when cut
 |   +- WeightsError        weight files whose names or shapes do not fit
 +- DataError               data that is unreadable, empty or too short
 +- RunFolderError          a run folder that already holds a run, or holds none
 +- CheckpointError         a checkpoint that is incomplete or of another layout
 |   +- SaveError           one that could not be written; the one before stays
 +- TrainingError           training that cannot go on: a loss that is not finite
 |   +- ReplicaError        data-parallel replicas whose values differ
 +- RankFailure             a rank died; carries its traceback
"""

from __future__ import annotations

import difflib
import os
import signal
from collections.abc import Iterable

STOPPED = 75
"""Exit code of training that a signal stopped (EX_TEMPFAIL): a batch system queues it again."""


def stopped_code(number: int) -> int:
    """Exit code of training that signal `number` ends while no rank takes steps.

    Under srun 1 for SIGTERM: `--kill-on-bad-exit` sends it to all tasks when one of them fails, and
    the largest code of the tasks is that of srun. With 75 the failed job would be queued again.
    """
    return STOPPED if number != signal.SIGTERM or not one_of_srun() else 1


def one_of_srun() -> bool:
    """Whether srun started this process with others, whose largest exit code is its own."""
    return os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


class HocketError(Exception):
    """Something the user can mend.

    `message` says what is wrong with the numbers in it; `hint`, if any, is one thing to paste.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[HocketError], message: str, hint: str | None) -> HocketError:
    return kind(message, hint=hint)


class OptionError(HocketError):
    """A flag, key or value that cannot be."""


class LayoutError(HocketError):
    """A layout that does not fit the world, the model or the batch."""


class ScheduleError(HocketError):
    """A schedule that would deadlock, forgets an action, or cannot be read."""


class ModelError(HocketError):
    """A model that is unknown, unreadable, or changes its result when cut."""


class WeightsError(ModelError):
    """Weight files whose names or shapes do not fit the model."""


class DataError(HocketError):
    """Data that is unreadable, empty or too short."""


class RunFolderError(HocketError):
    """A run folder that already holds a run, or holds none."""


class CheckpointError(HocketError):
    """A checkpoint that is incomplete, damaged, or of another layout."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written, on any rank; those before stay.

    Attributes:
        mine: whether this rank could not write.
    """

    exit_code = 1

    def __init__(self, message: str, *, mine: bool = True, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.mine = mine


class TrainingError(HocketError):
    """Training that cannot go on: a loss or gradient that is not finite."""

    exit_code = 1


class RankMemoryError(TrainingError):
    """A rank that would hold more tensor bytes than its device has, or `--memory-per-rank`
    allows."""


class ReplicaError(TrainingError):
    """Data-parallel replicas that must hold equal values, and do not."""


class RankFailure(HocketError):
    """A rank died. The message holds the first rank to fail and its own traceback."""

    exit_code = 1


CUTOFF = 0.7
"""Least similarity of a verb or flag that is suggested."""


ONE_OF_THEM = "use one of them"
"""The hint where no known name is near; the command line prints the help of the flag instead."""

MANY = 24
"""Names of which a message lists all."""


def nearest(name: str, choices: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The choice most like `name`, in whatever case, or None where nothing is near."""
    spelled = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), list(spelled), n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def unknown(kind: str, name: str, choices: Iterable[str]) -> tuple[str, str]:
    """Message and hint for an unknown name: `raise OptionError(m, hint=h)`."""
    options = sorted(choices)
    near = nearest(name, options)
    message, known = f"unknown {kind} {name!r}", ", ".join(options)
    if len(options) > MANY:  # a list that long is printed only where nothing is near
        return message, f"did you mean {near!r}?" if near else f"use one of {known}"
    return f"{message}; known: {known}", f"did you mean {near!r}?" if near else ONE_OF_THEM
