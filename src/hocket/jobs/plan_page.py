"""`hocket plan --html`: a plan of GPUs as one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.spec.errors import OptionError
from hocket.spec.files import write_text

if TYPE_CHECKING:
    from hocket.planning.forecast import LayoutForecast
    from hocket.planning.plan import TrainingPlan


def write_plan_page(found: TrainingPlan, path: str) -> Path:
    """Write the page; its path.

    Raises:
        OptionError: a plan of CPU cores, or a path that cannot be written.
    """
    from hocket.catalogue.hardware import price_text
    from hocket.jobs.plan import HEADERS, OWN_CONSTANTS, cells, train_command
    from hocket.planning.plan import timeline_of
    from hocket.planning.problem import OWN
    from hocket.reporting.plan_page import PlanPage, PlanRow, plan_html

    problem = found.problem
    if problem is None:
        raise OptionError(
            f"{found.cluster} is CPU cores; --html draws plans of GPUs",
            hint="--cluster 8xH100-SXM, or leave --html out",
        )

    def row(one: LayoutForecast) -> PlanRow:
        cost = one.dollars_per_billion_tokens
        numbers = (
            one.step_seconds.median, one.tokens_per_second_per_gpu.median, one.mfu.median,
            float(one.memory_high), one.bubble, one.exposed, None if cost is None else cost.median,
        )  # fmt: skip
        return PlanRow(
            name=str(one.layout),
            cells=tuple(zip(cells(one), numbers, strict=True)),
            memory=one.memory_by_kind,
            high=one.memory_high,
            runs=one.runs_here,
            reason="; ".join(one.unsupported),
        )

    rows = tuple(map(row, (*found.layouts, *found.unsupported_layouts)))
    text = plan_html(
        PlanPage(
            title=f"{found.model} on {found.cluster}",
            asked=f"{found.precision}, sequences of {found.seq_len:,}, global batch "
            f"{found.global_batch:,}: {found.num_legal:,} legal layouts, {found.num_fitting:,} fit",
            headings=HEADERS,
            rows=rows,
            command="hocket " + shlex.join(train_command(found)),
            notes=(*found.notes, *((OWN_CONSTANTS,) if problem.stack == OWN else ())),
            capacity=problem.usable,
            pipeline=timeline_of(problem, found.best.layout),
            changes=found.explanation,
            footer=f"$: {price_text(problem.cluster.node.gpu)}."
            + " * hocket does not run it today." * any(one.reason for one in rows),
        )
    )
    target = Path(path)
    try:
        write_text(target, text)
    except OSError as error:
        raise OptionError(
            f"--html {path} cannot be written: {error.strerror}", hint="--html plan.html"
        ) from None
    return target
