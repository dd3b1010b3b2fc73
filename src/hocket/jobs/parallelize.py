"""The public `parallelize`: flags' names to a Layout, a Schedule and a plan, then the runtime.

A process calls it on its own, as one rank of a world that its caller started.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from hocket.jobs.python_form import errors_in_python

if TYPE_CHECKING:
    from torch import nn

    from hocket.runtime.mesh import Mesh
    from hocket.runtime.pipeline.stage import LossFunction
    from hocket.spec.layout import Layout
    from hocket.spec.plan import ParallelPlan
    from hocket.spec.schedule import Schedule
    from hocket.training.parallel_model import ParallelModel


@errors_in_python()
def parallelize(
    module: nn.Module,
    layout: Layout | str,
    plan: ParallelPlan | None = None,
    *,
    schedule: Schedule | str | None = None,
    loss_fn: LossFunction | None = None,
    labels_shifted: bool = False,
    mesh: Mesh | None = None,
    seed: int = 0,
    bucket_mb: float | None = None,
    context_parallel: str = "auto",
    expert_dispatch: str = "auto",
    **fields: Any,
) -> ParallelModel:
    """Take this rank's part of `module`. Call it on every rank with equal arguments.

    The module keeps this rank's shards of its values and moves to the rank's device; then
    `forward_backward(microbatches)` runs one step and leaves the whole gradient in `.grad`.

    A Hugging Face causal language model is checked first, as `hocket train` does: a tiny proxy
    model of its configuration is split in the same way and compared with itself whole, and its own
    loss with the one that is trained. The verdict is cached in the user's cache folder.

    Args:
        module: any module. A Hugging Face causal language model brings its own plan.
        layout: how it is split: `"dp2.pp2.tp2"`.
        plan: how it may be split. None: as its family is, or data parallelism alone. With a plan of
            the caller's nothing is checked.
        schedule: a Schedule, or the name or file of one, as `--schedule`.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`, of whole logits
            [B, S, V] in every layout. The step's loss is divided by the tokens that it counts.
            None: next-token cross-entropy of the output's `logits` against `labels` [B, S].
        labels_shifted: `labels[:, i]` is the token after `input_ids[:, i]`. False: labels as
            transformers takes them, at the positions of their tokens (`labels=input_ids`, -100
            where there is no target); they are shifted inside, as the model's own forward does.
        mesh: None: made over the default process group or, without one, of this process alone.
        seed: of the random numbers that dropout draws.
        bucket_mb: size of a gradient bucket in MB. None: by the device.
        context_parallel: attention over cp ranks, as `--context-parallel`.
        expert_dispatch: tokens to experts on other ranks, as `--expert-dispatch`; nodes are as
            LOCAL_WORLD_SIZE says.
        **fields: other fields of the layout by their flags' names: `microbatches=4`,
            `pipeline_split="even"`.

    Raises:
        LayoutError: the layout does not fit the world or the module.
        ModelError: the module cannot be split as the layout asks, or would compute something else.
        ScheduleError: a schedule that is unknown or does not run.
    """
    from hocket.runtime import parallelize as runtime
    from hocket.runtime.mesh import require_world_size
    from hocket.schedules import build_schedule
    from hocket.spec.errors import ModelError
    from hocket.spec.expert_dispatch import local_ranks, settle_dispatch
    from hocket.spec.layout import Layout
    from hocket.spec.plan import ParallelPlan
    from hocket.spec.schedule import Schedule
    from hocket.training.parallel_model import ParallelModel, WholeModule

    _require_fresh(module)
    if hasattr(module, "peft_config") and not _is_hugging_face(module):  # what peft's adapters wrap
        raise ModelError(
            f"{type(module).__name__} wraps the model that its adapters are in, which is split",
            hint="parallelize(model.get_base_model(), ...)",
        )
    order = schedule if isinstance(schedule, Schedule) else None
    if isinstance(schedule, str):
        fields["schedule"] = schedule
    layout = Layout.parse(str(layout), **fields)
    if mesh is None:
        require_world_size(layout)
    if order is None and layout.num_stages > 1:
        order = build_schedule(layout, layout.microbatches or 2 * layout.pp)
    hugging_face = _is_causal_model(module)
    if loss_fn is None and not hugging_face and _is_hugging_face(module):
        raise ModelError(
            f"{type(module).__name__} is not a causal language model, and the loss that is trained "
            "is that of the next token",
            hint="parallelize(..., loss_fn=lambda output, batch: (sum of losses, their number))",
        )
    if layout.cp > 1 and (not hugging_face or (loss_fn is not None and not labels_shifted)):
        raise _no_context(layout, hugging_face)
    shifts = True
    if hugging_face and plan is None:
        from hocket.models.own_loss import forward_shifts_labels
        from hocket.models.plans import plan_for
        from hocket.models.plans.changed import has_own_loss, require_own_layers, require_unchanged
        from hocket.models.plans.router import router_loss
        from hocket.ranks.proxy.inside import require_equal_inside

        verdict = require_equal_inside(module, layout, loss=loss_fn is None)
        shifts = verdict.shifts is not False
        if loss_fn is None and has_own_loss(module):
            shifts = forward_shifts_labels(module)
        degrees = layout.tp * layout.cp * layout.num_stages * layout.ep
        if degrees > 1 or layout.zero == 3 or layout.recompute != "none":
            plan = plan_for(module, sequence=layout.sequence_parallel)
            if layout.tp > 1 or layout.num_stages > 1:
                require_own_layers(module, plan)
            if layout.tp > 1 and plan.tensor is not None:
                require_unchanged(module, plan, sequence=layout.sequence_parallel)
        else:
            plan = ParallelPlan(router=router_loss(module))
        if loss_fn is not None:
            plan = dataclasses.replace(plan, router=None)
    elif hugging_face and plan is not None and plan.router is None and loss_fn is None:
        from hocket.models.plans.router import router_loss

        plan = dataclasses.replace(plan, router=router_loss(module))
    if hugging_face:
        from hocket.models.experts import loop_in_fp64
        from hocket.training.build import group_experts

        group_experts()
        loop_in_fp64(module, module.dtype)  # type: ignore[arg-type]
    if layout.cp > 1:
        from hocket.training.build import over_context_ranks

        over_context_ranks(module)
    dispatch = settle_dispatch(expert_dispatch, layout, local_ranks(os.environ))
    whole = WholeModule.of(module)
    parallel = runtime.parallelize(
        module, layout, plan, mesh=mesh, schedule=order, loss_fn=loss_fn, seed=seed,
        bucket_mb=bucket_mb, labels_shifted=labels_shifted or not shifts, kind=ParallelModel,
        context_parallel=context_parallel,
        expert_dispatch=dispatch,
    )  # fmt: skip
    assert isinstance(parallel, ParallelModel)
    parallel.whole = whole
    module._hocket_layout = str(layout)  # type: ignore[assignment]
    parallel.generator = _generate if hugging_face else None
    return parallel


def _require_fresh(module: nn.Module) -> None:
    """Raises ModelError for a module that is parallelized already, or has no values."""
    from hocket.spec.errors import ModelError

    if not hasattr(module, "named_parameters"):
        raise ModelError(
            f"a module is needed, not a {type(module).__name__}",
            hint="model = AutoModelForCausalLM.from_pretrained(FOLDER)",
        )
    before = getattr(module, "_hocket_layout", None)
    if before is not None:
        raise ModelError(
            f"this module is parallelized already, as {before}, and has this rank's values alone",
            hint="model = AutoModelForCausalLM.from_pretrained(FOLDER)",
        )
    empty = next((name for name, value in module.named_parameters() if value.is_meta), None)
    if empty is not None:
        raise ModelError(
            f"the module has no values: {empty} is on the meta device",
            hint="model = AutoModelForCausalLM.from_pretrained(FOLDER)",
        )


def _no_context(layout: Layout, hugging_face: bool) -> Exception:
    """What is raised where cp is asked for and parts of sequences cannot be computed."""
    from hocket.spec.errors import ModelError
    from hocket.spec.legality import narrowed

    if hugging_face:
        return ModelError(
            f"cp is {layout.cp}: a loss function is given a rank's tokens, of which the last one's "
            "label is on another rank",
            hint="labels of the next token, and parallelize(..., labels_shifted=True)",
        )
    return ModelError(
        f"cp is {layout.cp}: the attention of a module that is not a Hugging Face model cannot "
        "reach the keys of other ranks",
        hint=narrowed(layout, cp=1).flag_with(),
    )


@errors_in_python()
def _generate(
    parallel: ParallelModel, prompts: list[list[int]], *, max_new_tokens: int, **sampling: Any
) -> list[list[int]]:
    from hocket.models.dimensions import dimensions
    from hocket.serving.padded import Engine
    from hocket.serving.request import SamplingParams, check_prompts
    from hocket.serving.row_trial import trial_rows

    config = parallel.whole.config
    if prompts:
        size = dimensions(config.to_dict())
        params = SamplingParams(max_new_tokens=max_new_tokens)
        check_prompts(prompts, params, size.vocab_size, size.max_positions)
    if "stop" not in sampling:
        ends = getattr(config, "eos_token_id", None)
        every = ends if isinstance(ends, list) else [ends]
        sampling["stop"] = tuple(token for token in every if token is not None)
    engine = Engine(
        parallel.stages,
        parallel.mesh,
        config,
        stage_ranks=None if parallel.schedule is None else parallel.schedule.stage_ranks,
        replicas=True,
        rows=trial_rows(config, parallel.stages[0].dtype),
    )
    return engine.generate(prompts, SamplingParams(max_new_tokens=max_new_tokens, **sampling))


def _is_causal_model(module: nn.Module) -> bool:
    """Whether it is, or is derived from, a causal language model of transformers, or code that a
    checkpoint brings names it one."""
    from hocket.models.registry import causal_classes

    ends = ["ForCausalLM", "LMHeadModel"]
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        ends.append("ForConditionalGeneration")  # text and images to text
    known = {*causal_classes().values()}
    names = [kind.__name__ for kind in type(module).__mro__]
    causal = any(name in known or name.endswith(tuple(ends)) for name in names)
    return causal and _is_hugging_face(module)


def _is_hugging_face(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
