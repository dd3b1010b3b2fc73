"""Job: one layout of a training step, and the software whose flags are written for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hocket.planning.tools.limits import Facts, ToolLimits
from hocket.spec.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolJob:
    """What a tool's flags are written from.

    Attributes:
        facts: of model, step and device.
        layout: with its microbatches, and with layers per stage in `pipeline_split`.
        microbatch: sequences of one.
        context: how keys and values travel over cp: `ring` or `ulysses`; empty without cp.
    """

    facts: Facts
    layout: Layout
    microbatch: int
    context: str = ""

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers of each stage, in the model's order."""
        assert isinstance(self.layout.pipeline_split, tuple), self.layout.pipeline_split
        return self.layout.pipeline_split

    @property
    def even(self) -> bool:
        """Whether all stages hold as many layers."""
        return len(set(self.cut)) == 1

    @property
    def microbatches(self) -> int:
        """Microbatches of a data rank and step."""
        return self.layout.microbatches or 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool at one version.

    Attributes:
        name: as `--emit` takes it.
        limits: what it can run.
        write: its flags or configuration, from a job that `limits` allow.
    """

    name: str
    limits: ToolLimits
    write: Callable[[ToolJob], str]


def flags_text(flags: dict[str, Any], notes: Sequence[str]) -> str:
    """Comments, then one flag a line, as a shell reads it.

    True is a flag without a value; None and False are left out.
    """
    words = [
        name if value is True else f"{name} {value}"
        for name, value in flags.items()
        if value is not None and value is not False
    ]
    return "\n".join([*(f"# {note}" for note in notes), " \\\n  ".join(words)]) + "\n"
