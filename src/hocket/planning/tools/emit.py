"""Emit: a layout as the flags or the configuration of other software, or why it has none.

Nothing is printed that the software rejects or changes: a layout that it cannot run is an error
that names what is missing.
"""

from __future__ import annotations

import dataclasses

from hocket.planning.forecast import LayoutForecast
from hocket.planning.layouts import row
from hocket.planning.problem import Problem
from hocket.planning.tools.deepspeed import DEEPSPEED
from hocket.planning.tools.huggingface import ACCELERATE, AUTOMODEL
from hocket.planning.tools.job import Tool, ToolJob
from hocket.planning.tools.limits import ToolLimits
from hocket.planning.tools.megatron import MEGATRON, MEGATRON_BRIDGE
from hocket.planning.tools.torchtitan import TORCHTITAN, TORCHTITAN_OLD
from hocket.spec.errors import LayoutError, OptionError, unknown

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        MEGATRON, MEGATRON_BRIDGE, TORCHTITAN, TORCHTITAN_OLD, DEEPSPEED, ACCELERATE, AUTOMODEL,
    )
}  # fmt: skip
"""Training software whose flags can be printed, by the name that `--emit` takes."""


def tool(name: str) -> Tool:
    """A tool by its name. Raises OptionError for an unknown one, with the nearest."""
    if name in SERVERS:
        raise OptionError(
            f"--emit {name}: {name} serves, and this plans a training step",
            hint="--serve",
        )
    if name not in TOOLS:
        message, hint = unknown("tool", name, TOOLS)
        raise OptionError(f"--emit: {message}", hint=hint)
    return TOOLS[name]


SERVERS = ("vllm", "sglang")
"""Servers, whose flags `hocket plan --serve` prints."""


def job(problem: Problem, found: LayoutForecast) -> ToolJob:
    """A forecast as tools' flags are written from it, its pipeline split resolved."""
    divided = dataclasses.replace(problem, division=found.layout.pipeline_split)
    layout = dataclasses.replace(found.layout, pipeline_split=divided.cut(found.layout))
    return ToolJob(
        facts=problem.facts, layout=layout, microbatch=found.microbatch, context=found.context
    )


def tool_reasons(limits: ToolLimits, problem: Problem, found: LayoutForecast) -> list[str]:
    """Why software cannot run a layout; empty where it can."""
    asked = job(problem, found)
    only = row(asked.layout, problem.shape, problem.seq_len, problem.global_batch)
    return list(limits.reasons(asked.layout, only, problem.facts, found.context))


def reject_unsupported(limits: ToolLimits, problem: Problem, found: LayoutForecast) -> None:
    """Raises LayoutError where software cannot run a layout, with every reason."""
    why = tool_reasons(limits, problem, found)
    if why:
        raise LayoutError(
            f"{limits.software} cannot run {found.layout}: {'; '.join(why)}",
            hint="leave --layout out: layouts that it can run are then ranked",
        )


def emit(name: str, problem: Problem, found: LayoutForecast) -> str:
    """A layout as the flags or configuration of the tool `name`, one of `TOOLS`.

    Raises:
        OptionError: an unknown tool, or one that serves.
        LayoutError: the tool cannot run the layout; each reason by name.
    """
    chosen = tool(name)
    reject_unsupported(chosen.limits, problem, found)
    return chosen.write(job(problem, found))
