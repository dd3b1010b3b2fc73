"""GpuCheck: one row of the table of checks, and what its function returns.

A check is data: what it does, what it needs, when it passes, how long it may take, and how it is
rehearsed on a machine without a GPU. Its function takes a `Place` (where it runs) and the row's
arguments, and returns a `CheckOutcome`, raises `Cannot` with a reason, or raises anything else,
which is a failure.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from hocket.spec.doctor import GROUPS, Value

CPU, FAKE = FORMS = ("cpu", "fake")
"""Forms of a rehearsal: the same function at small sizes on the CPU, with the same comparisons;
or on fake CUDA tensors, which have shapes, dtypes and devices but no values."""

GPU = "gpu"


class Cannot(Exception):
    """The check cannot be executed here; the message is the reason that its line gives."""


@dataclasses.dataclass(frozen=True)
class CheckOutcome:
    """What a check found.

    Attributes:
        ok: whether the criterion is met.
        values: figures, by name.
        reason: why it is not met.
        predicted: predictions of the same figures, by the same names.
    """

    ok: bool
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    reason: str = ""
    predicted: Mapping[str, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuCheck:
    """One check.

    Attributes:
        id: its name, after `--only`.
        group: one of `spec.doctor.GROUPS`.
        what: what it does, one sentence.
        criterion: when it passes, with numbers.
        function: `module:function`, called with a `Place` and `arguments`.
        seconds: expected on one current GPU; the card's time is planned with it.
        timeout: seconds after which its process is ended, on a GPU.
        gpus: how many it needs; 0: none (the host alone).
        driver: it asks the driver alone: a torch that is built for CUDA is not needed.
        forks: it is about forked processes that use CUDA: executed in a forked process alone, which
            does not ask the device before.
        capability: compute capability that it needs.
        packages: modules that must be installed.
        memory: bytes of device memory that it needs.
        fake: function of the rehearsal on fake tensors; empty: `function` itself.
        rehearsals: forms in which it is rehearsed, of `FORMS`.
        unrehearsed: why it cannot be rehearsed; empty where it is.
        slow: its rehearsal takes more than about 2 s: CI takes a rotating part of these.
    """

    id: str
    group: str
    what: str
    criterion: str
    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 3.0
    timeout: float = 60.0
    gpus: int = 1
    driver: bool = False
    forks: bool = False
    capability: tuple[int, int] = (7, 0)
    packages: tuple[str, ...] = ()
    memory: float = 0.0
    fake: str = ""
    rehearsals: tuple[str, ...] = (CPU,)
    unrehearsed: str = ""
    slow: bool = False

    def __post_init__(self) -> None:
        assert self.group in GROUPS, self.group
        assert set(self.rehearsals) <= set(FORMS), self.rehearsals
        assert bool(self.rehearsals) != bool(self.unrehearsed) or not self.gpus, self.id

    @property
    def command(self) -> str:
        """Repeats this check alone."""
        return f"hocket doctor --gpu --only {self.id}"

    def resolve(self, form: str = GPU) -> Callable[..., CheckOutcome]:
        """The function of a form, imported."""
        module, _, name = ((form == FAKE and self.fake) or self.function).partition(":")
        found: Callable[..., CheckOutcome] = getattr(importlib.import_module(module), name)
        return found


def row_of(module: str, *, prefix: str = "", **common: Any) -> Callable[..., GpuCheck]:
    """A maker of the rows of one module: `row(name, what, function, criterion, **fields)`.

    Args:
        module: dotted name of the module that holds the functions.
        prefix: of every id.
        common: fields of all rows, which a row's own `fields` replace.
    """

    def row(name: str, what: str, function: str, criterion: str = "", **fields: Any) -> GpuCheck:
        return GpuCheck(**{
            "id": prefix + name, "what": what, "function": f"{module}:{function}",
            "criterion": criterion, **common, **fields,
        })  # fmt: skip

    return row
