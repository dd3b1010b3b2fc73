"""Kinds of faults that `hocket chaos` injects, and where each may happen, as data."""

from __future__ import annotations

import dataclasses

EVERYWHERE = ("build", "step", "input", "forward", "collective", "save", "evaluate", "export")


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        name: as `--kinds` has it. what: happens. brought: by the rank on itself, a kind of
            `training.faults`; empty: by the process that injects.
        phases: in which of a rank's phases.
        detected_by: what is to find it.
        equal: what the end of the run is equal to, bit for bit.
        ranks: the fewest that it needs.
        replicas: it needs data-parallel replicas of the weights.
    """

    name: str
    what: str
    brought: str
    phases: tuple[str, ...]
    detected_by: str
    equal: str = "the undisturbed run"
    ranks: int = 1
    replicas: bool = False


ALL = (
    FaultKind("kill", "SIGKILL of a rank", "kill", EVERYWHERE, "end of the process"),
    FaultKind("stop", "SIGSTOP of a rank", "stop", EVERYWHERE, "state of the process"),
    FaultKind("stuck", "a call in C that does not return", "stuck", ("forward", "collective"),
         "heartbeat"),
    FaultKind("exception", "an exception in a rank", "raise", EVERYWHERE, "exception"),
    FaultKind("cut", "all TCP connections of a rank shut down", "cut", ("forward", "collective"),
         "exception of a peer", ranks=2),
    FaultKind("full", "the disk of the checkpoints fills up in a save", "fill", ("save",),
         "error of the save"),
    FaultKind("torn", "a file of the newest checkpoint cut short, and SIGKILL", "torn", ("step",),
         "checksum of the checkpoint"),
    FaultKind("checkpoint", "a bit of the newest checkpoint flipped, and SIGKILL", "damage",
         ("step",),
         "checksum of the checkpoint"),
    FaultKind("weights", "a bit of the weights of one replica flipped in memory", "flip", ("step",),
         "comparison of replicas", ranks=2, replicas=True),
    FaultKind("tokens", "a bit of the tokens on disk flipped while the job is down", "", ("step",),
         "checksum of the tokens"),
    FaultKind("file", "a bit of any file of the run flipped while the job is down", "", ("step",),
         "rejection"),
    FaultKind("nan", "a gradient that is not a number", "nan", ("step",), "gradient norm",
         equal="the run that skips this step"),
    FaultKind("slow", "a rank that sleeps before every action", "slow", ("forward",),
         "comparison of ranks", ranks=2),
    FaultKind("term", "SIGTERM to the job, which is submitted again", "", ("step",), "signal"),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in ALL}
