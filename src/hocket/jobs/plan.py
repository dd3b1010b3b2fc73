"""The job behind `hocket plan`: the planner answers, and the answer as text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.jobs.planner_problem import (
    batch_note,
    model_shape,
    model_type_of,
    planned_global_batch,
    positions_of,
    prediction_note,
    training_problem,
)
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.precision import default_grad_dtype
from hocket.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from hocket.planning.forecast import LayoutForecast, Range
    from hocket.planning.goodput import Goodput
    from hocket.planning.plan import TrainingPlan


def plan_training(
    model: str | os.PathLike[str],
    *,
    cluster: str,
    seq_len: int,
    global_batch: int | None = None,
    objective: str = "time",
    top: int = 10,
    layout: str | Layout | None = None,
    pin: Sequence[str] | Mapping[str, Any] = (),
    all: bool = False,
    explain: bool = False,
    precision: str | None = None,
    grad_dtype: str | None = None,
    stack: str | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize_base: str | None = None,
    optimizer: str | None = None,
    emit: str | None = None,
    price_list: str | None = None,
    save_seconds: float | None = None,
    restart_seconds: float | None = None,
    failures: float | None = None,
    repair_hours: float | None = None,
    expert_imbalance: float | None = None,
    mtp_layers: int | None = None,
    by_hocket: bool = True,
) -> TrainingPlan:
    """The best layouts of a model on a cluster, or one layout estimated.

    Args:
        model: a name of the catalogue, a Hugging Face directory, or a run folder.
        cluster: `2x8xH100-SXM`, `16xA100-40-PCIe`, `4xaws-p5`, a TOML file, or `auto`, which is
            this machine.
        global_batch: sequences of a step. None: `planner_problem.planned_global_batch`, which a
            note of the plan names.
        layout: price this one alone. None: search.
        pin: `tp=8`, or a mapping: axes and the only values that they may have.
        all: rank also what this hocket cannot run today.
        explain: say why the winner wins, and what would change the answer.
        precision: of matrix products. None: bf16, fp16 on a GPU without it, fp32 on CPU cores.
        grad_dtype: of gradients, `fp32` or `bf16`, as `hocket train` takes it. None: fp32 (under
            fp16: fp16).
        stack: one of `planning.stacks`: its constants estimate a step, and only layouts that it can
            run are ranked. None: hocket itself, with the constants of eager PyTorch and the memory
            that its own execution takes.
        lora_rank, lora_targets, quantize_base: train adapters instead of the model, as `hocket
            train` does.
        optimizer: `adamw` or `adamw_8bit`, as `hocket train` takes it. None: adamw.
        price_list: `hyperscaler`, `specialist` or `all` quotes of the catalogue. None: all.
        emit: a tool of `planning.tools.emit`: only layouts that it can run are ranked.
        save_seconds: that a save stops training. None: the state written by all nodes at
            `planning.goodput.SAVE_RATE`.
        restart_seconds: from a failure to the next step. failures: per GPU and hour. repair_hours:
            until a failed node is back. None: the defaults of `planning.goodput`.
        expert_imbalance: tokens of the expert rank that gets most, over the mean. None: 1.5.
        mtp_layers: layers for multi-token prediction, of `stack`. None: none.
        by_hocket: False: other software runs the layouts; without `stack` by Megatron-Core's
            constants.

    Raises:
        HocketError: what the caller can mend: an unknown name, or a model that does not fit, with
            the smallest cluster that it fits.
    """
    from hocket.catalogue.hardware import with_prices
    from hocket.jobs.adapters import adapter_text
    from hocket.jobs.machine import named_cluster as find_cluster
    from hocket.planning.goodput import plan_goodput
    from hocket.planning.pins import layout_pins
    from hocket.planning.plan import best_layouts as search
    from hocket.planning.plan import plan_one
    from hocket.planning.problem import STACK
    from hocket.planning.stacks import named_stack as find_stack
    from hocket.planning.tools.emit import reject_unsupported, tool

    texts = [f"{k}={v}" for k, v in pin.items()] if isinstance(pin, Mapping) else list(pin)
    pins = layout_pins(texts)
    if layout is not None and pins:
        raise OptionError("--layout prices one layout, and --pin searches", hint="one of the two")
    machines = find_cluster(cluster)
    if price_list is not None:
        machines = with_prices(machines, price_list)
    one = Layout.parse(layout) if isinstance(layout, str) else layout
    chosen_batch: tuple[str, ...] = ()
    if global_batch is None:
        global_batch = planned_global_batch(machines, seq_len, one, pins)
        chosen_batch = (batch_note(global_batch, machines),)
    if machines.is_cpu:
        if stack is not None:
            raise OptionError(
                f"--stack {stack} estimates GPUs; {machines.name} is CPU cores, "
                f"estimated from measurements",
                hint="leave --stack out",
            )
        if emit is not None:
            raise OptionError(
                f"--emit {emit} writes flags of software for GPUs; {machines.name} is CPU cores",
                hint="leave --emit out, or name GPUs: --cluster 8xH100-SXM",
            )
        if expert_imbalance not in (None, 1.0):
            raise OptionError(
                f"--expert-imbalance is {expert_imbalance:g}; CPU runs are predicted with even "
                "routing alone",
                hint="leave --expert-imbalance out",
            )
        if mtp_layers:
            raise OptionError(
                f"--mtp-layers is {mtp_layers}; hocket trains no layers for multi-token prediction",
                hint="leave --mtp-layers out",
            )
        if grad_dtype not in (None, "fp32"):
            raise OptionError(
                f"--grad-dtype is {grad_dtype}; CPU runs are predicted in fp32 alone",
                hint="leave --grad-dtype out",
            )
        if optimizer not in (None, "adamw"):
            raise OptionError(
                f"--optimizer is {optimizer}; CPU runs are predicted with AdamW's moments in fp32 "
                "alone",
                hint="leave --optimizer out",
            )
        from hocket.jobs import machine_plan

        found = machine_plan.machine_plan(
            os.fspath(model),
            machines,
            seq_len=seq_len,
            global_batch=global_batch,
            objective=objective,
            top=top,
            layout=one,
            pins=pins,
            precision=precision,
            explain=explain,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            quantize_base=quantize_base,
        )
        return dataclasses.replace(found, notes=(*chosen_batch, *found.notes))
    if optimizer not in (None, "adamw") and (stack or emit):
        raise OptionError(
            f"--optimizer is {optimizer}; other software is estimated with moments in fp32 alone",
            hint="leave --optimizer, --stack and --emit out",
        )
    chosen = None if stack is None else find_stack(stack)
    bounds = [] if chosen is None else [chosen.limits]
    bounds += [] if emit is None else [tool(emit).limits]
    limits = tuple(bounds)
    problem = training_problem(
        model_shape(os.fspath(model)),
        machines,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        grad_dtype=grad_dtype,
        stack=chosen.name if chosen else None if by_hocket else STACK,
        limits=limits,
        model_type=model_type_of(os.fspath(model)),
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        quantize_base=quantize_base,
        optimizer=optimizer,
        expert_imbalance=expert_imbalance,
        mtp_layers=mtp_layers,
    )
    for limit in limits:
        if problem.precision not in limit.precisions:
            raise OptionError(
                f"{limit.software} does not train in {problem.precision}; it has "
                + ", ".join(limit.precisions),
                hint=f"--dtype {limit.precisions[0]}",
            )
    usual = default_grad_dtype(problem.precision)
    if emit is not None and problem.grad_dtype not in (None, usual):
        raise OptionError(
            f"--grad-dtype is {problem.grad_dtype}; what --emit writes leaves gradients in {usual}",
            hint="leave --grad-dtype out, or --emit",
        )
    if one is not None:
        found = plan_one(problem, one)
        for limit in limits:
            reject_unsupported(limit, problem, found.best)
    else:
        everything = all or bool(limits)
        found = search(problem, objective=objective, top=top, pins=pins, everything=everything)
    positions = positions_of(os.fspath(model))
    if positions is not None and seq_len > positions:
        note = f"The model is configured for {positions} positions; the plan is for {seq_len}."
        found = dataclasses.replace(found, notes=(*found.notes, note))
    if not mtp_layers and (note := prediction_note(os.fspath(model))):
        found = dataclasses.replace(found, notes=(*found.notes, note))
    if any(one.layout.ep > 1 for one in (*found.layouts, *found.unsupported_layouts)):
        note = (
            f"With ep the most loaded expert rank gets {problem.expert_imbalance:g} times the mean "
            "number of tokens: --expert-imbalance."
        )
        found = dataclasses.replace(found, notes=(*found.notes, note))
    found = dataclasses.replace(
        found,
        notes=(*chosen_batch, *found.notes, *adapter_text(problem.shape)),
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        quantize_base=quantize_base,
        optimizer=optimizer,
        stack="" if chosen is None else chosen.title,
        goodput=plan_goodput(
            problem, found.best, save_seconds, restart_seconds, failures, repair_hours
        ),
    )
    if explain and found.best.fits:
        from hocket.planning.explain import explain_layout as sentences

        here = not all and not limits and found.best.runs_here
        explanation = sentences(problem, found.best, objective=objective, pins=pins, here=here)
        found = dataclasses.replace(found, explanation=explanation)
    return found


# --- what is printed -----------------------------------------------------------------------------

OWN_CONSTANTS = (
    "Steps are estimated as those of eager PyTorch, fitted to published runs: no run of hocket on "
    "a GPU was measured yet. Memory is that of hocket's own execution."
)

HEADERS = ("step", "tokens/s/GPU", "MFU", "memory", "bubble", "exposed", "$/B tokens")


def plan_table(found: TrainingPlan) -> str:
    """The answer as text: what was asked, the best layouts, and how to run the first."""
    from hocket.catalogue.hardware import price_text

    if found.machine:
        from hocket.jobs import machine_plan

        return machine_plan.machine_table(found)
    from hocket.planning.fit import HEADROOM
    from hocket.planning.problem import OWN

    lines = [
        f"{found.model} on {found.cluster}, {found.precision}: sequences of {found.seq_len:,}, "
        f"global batch {found.global_batch:,}",
        f"{found.num_legal:,} legal layouts, {found.num_fitting:,} fit; best by {found.objective}"
        if found.num_legal > 1
        else "one layout, estimated",
        "",
    ]
    if found.stack:
        software = found.problem.limits[0].software if found.problem else "it"
        lines.insert(1, f"Constants of {found.stack}; only layouts that {software} can run.")
    lines += [*found.notes, ""] if found.notes else []
    if found.layouts:
        lines += _rows(found.layouts)
    if found.unsupported_layouts:
        better = "Faster, but not supported by this version:" if found.layouts else "These fit:"
        lines += ["", better, ""] if found.layouts else [better, ""]
        lines += _rows(found.unsupported_layouts)
        lines += [
            "",
            *(f"* {reason}" for reason in _reasons(found.unsupported_layouts)),
            *_run_by(found.unsupported_layouts),
        ]
    elif any(one.unsupported for one in found.layouts):
        lines += ["", *(f"* {reason}" for reason in _reasons(found.layouts))]
        lines += _run_by([one for one in found.layouts if one.unsupported])
    lines += [
        "",
        "Ranges are the 10th to the 90th percentile; memory is the 95th of the peak GPU, "
        + (
            f"of {format_bytes(found.problem.cluster.node.gpu.usable)} usable, "
            if found.problem
            else ""
        )
        + f"of which {HEADROOM:.0%} stay free (!: does not fit; tight: less stays free).",
    ]
    if found.problem is not None:
        lines.append(f"$: {price_text(found.problem.cluster.node.gpu)}.")
        if found.problem.stack == OWN:
            lines.append(OWN_CONSTANTS)
    if not all(one.simulated for one in (*found.layouts, *found.unsupported_layouts)):
        lines.append("~: estimated by closed forms; its schedule is too long to simulate.")
    if any(one.num_similar for one in (*found.layouts, *found.unsupported_layouts)):
        lines.append(
            "+n: so many layouts differ from it in microbatches, virtual stages or shard alone and "
            "are not better."
        )
    if found.goodput is not None:
        lines.append(_failures(found.goodput))
    if found.explanation:
        lines += ["", *found.explanation]
    return "\n".join(lines)


def _failures(one: Goodput) -> str:
    """What failures cost the best layout, in two sentences."""
    without, with_one = one.spares[:2]
    spare = (
        f"; with one spare node {with_one:.1%}, as much as {one.spare_nodes:.2g} more nodes give"
    )
    return (
        f"Failures: one every {one.mean_hours:,.0f} h at {one.failures:g} per GPU and "
        f"hour. Best: a save (which stops training for {format_seconds(one.save_seconds)}) every "
        f"{format_seconds(one.interval_seconds)}. Goodput: {one.goodput:.1%} if a failed node is "
        f"replaced at once, {without:.1%} if its repair of {one.repair_hours:g} h is waited for"
        + (spare if one.spare_nodes >= 1 else "")
        + "."
    )


def trains(found: TrainingPlan) -> bool:
    """Whether hocket can train in the best layout."""
    return found.best.fits and found.best.runs_here


def rehearsal(found: TrainingPlan) -> list[str]:
    """The words of the command that executes the best layout on fake GPUs."""
    words = ["rehearse", found.model, "--layout", str(found.best.layout)]
    words += ["--seq-len", str(found.seq_len), "--global-batch", str(found.global_batch)]
    if found.precision != "bf16":  # its default
        words += ["--dtype", found.precision]
    return words + _options(found)


def train_command(found: TrainingPlan) -> list[str]:
    """The words of the command that trains in the best layout."""
    # LoRA needs weights, which a name of the catalogue has not.
    from hocket.catalogue import models

    known = found.lora_rank is not None and found.model in models.model_names()
    name = (known and models.entry(found.model).hub_id) or found.model
    words = ["train", name, "--data", "DATA", "--layout", str(found.best.layout)]
    words += ["--seq-len", str(found.seq_len), "--global-batch", str(found.global_batch)]
    words += ["--dtype", found.precision]
    return words + _options(found)


def _options(found: TrainingPlan) -> list[str]:
    """The flags of gradients, of what is trained instead of the model, and of the optimizer."""
    words: list[str] = []
    if found.grad_dtype not in ("", default_grad_dtype(found.precision)):
        words += ["--grad-dtype", found.grad_dtype]
    for name in ("lora_rank", "lora_targets", "quantize_base", "optimizer"):
        value = getattr(found, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return words


def emitted_layout(found: TrainingPlan, tool: str) -> str:
    """The best layout as another tool's flags.

    Raises:
        OptionError: an unknown tool, or a plan of CPU cores.
        LayoutError: the tool cannot run the layout.
    """
    from hocket.planning.tools.emit import emit

    if found.problem is None:
        raise OptionError(f"{found.cluster} is CPU cores; --emit writes flags for GPUs")
    return emit(tool, found.problem, found.best)


def _rows(layouts: Sequence[LayoutForecast]) -> list[str]:
    """Two lines for each: the layout, as --layout reads it, and below it what it gives."""
    from hocket.reporting.table import table_text

    head, rule, *numbers = table_text(HEADERS, [cells(one) for one in layouts]).splitlines()
    lines = [INDENT + head, INDENT + rule]
    for one, below in zip(layouts, numbers, strict=True):
        more = f"  +{one.num_similar}" if one.num_similar else ""
        marks = ("" if one.runs_here else "  *") + ("" if one.simulated else "  ~")
        lines += [str(one.layout) + marks + more, INDENT + below]
    return lines


INDENT = "    "


def cells(one: LayoutForecast) -> tuple[str, ...]:
    """What a layout gives, a text for each of HEADERS."""
    cost = one.dollars_per_billion_tokens
    return (
        _range(one.step_seconds, format_seconds),
        _range(one.tokens_per_second_per_gpu, format_count),
        _range(one.mfu, lambda value: f"{value:.0%}"),
        format_bytes(one.memory_high)
        + ("" if one.fits else " !")
        + (" tight" if one.tight else ""),
        f"{one.bubble:.1%}",
        f"{one.exposed:.1%}",
        "unknown" if cost is None else _range(cost, _dollars),
    )


def _range(values: Range, text: Any) -> str:
    return f"{text(values.median)} ({text(values.low)}-{text(values.high)})"


def _dollars(value: float) -> str:
    """Whole dollars, below 10 two digits."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def _run_by(layouts: Sequence[LayoutForecast]) -> list[str]:
    """The software that can run what this hocket cannot, best layout first."""
    found: dict[str, list[str]] = {}
    for one in layouts:
        found.setdefault(", ".join(one.tools), []).append(one.layout.axes_text())
    lines = []
    for tools, which in found.items():
        names = ", ".join(dict.fromkeys(which))
        lines.append(f"  {names}: " + (f"run by {tools} (--emit)" if tools else "no --emit has it"))
    return lines


def _reasons(layouts: Sequence[LayoutForecast]) -> list[str]:
    """Why they do not run here, each once by what the runtime does instead."""
    found: dict[str, str] = {}
    for one in layouts:
        for reason in one.unsupported:
            field, _, instead = reason.partition(": ")
            found.setdefault(instead, f"{field.split(' ')[0]}: {instead}")
    return list(dict.fromkeys(found.values()))
