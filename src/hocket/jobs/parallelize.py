"""The public `parallelize`: flags' names to a Layout, a Schedule and a plan, then the runtime.

A process calls it on its own, as one rank of a world that its caller started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from hocket.runtime.mesh import Mesh
    from hocket.runtime.parallel import Parallel
    from hocket.runtime.pipeline.stage import LossFunction
    from hocket.spec.layout import Layout
    from hocket.spec.plan import ParallelPlan
    from hocket.spec.schedule import Schedule


def parallelize(
    module: nn.Module,
    layout: Layout | str,
    plan: ParallelPlan | None = None,
    *,
    schedule: Schedule | str | None = None,
    loss_fn: LossFunction | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    bucket_mb: float | None = None,
    **fields: Any,
) -> Parallel:
    """Take this rank's part of `module`. Call it on every rank with equal arguments.

    The module keeps this rank's slices of its values and moves to the rank's device; then
    `forward_backward(microbatches)` runs one step and leaves the whole gradient in `.grad`.

    Args:
        module: any module. A Hugging Face causal language model brings its own plan.
        layout: how it is split: `"dp2.pp2.tp2"`.
        plan: how it may be split. None: as its family is, or data parallelism alone.
        schedule: a Schedule, or the name or file of one, as `--schedule`.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`. None: next-token
            cross-entropy of the output's `logits` [B, S, V] against `labels` [B, S].
        mesh: None: made over the default process group or, without one, of this process alone.
        seed: of the random numbers that dropout draws.
        bucket_mb: size of a gradient bucket in MB. None: by the device.
        **fields: other fields of the layout by their flags' names: `microbatches=4`, `cut="even"`.

    Raises:
        LayoutError: the layout does not fit the world or the module.
        ModelError: the module cannot be split as the layout asks.
        ScheduleError: a schedule that is unknown or does not run.
    """
    from hocket.runtime import parallelize as runtime
    from hocket.schedules import build
    from hocket.spec.layout import Layout
    from hocket.spec.schedule import Schedule

    order = schedule if isinstance(schedule, Schedule) else None
    if isinstance(schedule, str):
        fields["schedule"] = schedule
    layout = Layout.parse(str(layout), **fields)
    if order is None and layout.num_stages > 1:
        order = build(layout, layout.microbatches or 2 * layout.pp)
    cut = layout.tp * layout.num_stages > 1 or layout.zero == 3
    if plan is None and cut and _is_hugging_face(module):
        from hocket.models.plans import plan_for

        plan = plan_for(module, sequence=layout.sequence_parallel)
    return runtime.parallelize(
        module, layout, plan, mesh=mesh, schedule=order, loss_fn=loss_fn, seed=seed,
        bucket_mb=bucket_mb,
    )  # fmt: skip


def _is_hugging_face(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
