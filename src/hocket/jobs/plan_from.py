"""The job behind `hocket plan --from`: predict another tool's configuration, and improve it."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from hocket.jobs.plan import plan_table, plan_training
from hocket.jobs.planner_problem import model_shape
from hocket.spec.errors import OptionError
from hocket.spec.global_batch import default_global_batch
from hocket.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hocket.planning.forecast import LayoutForecast
    from hocket.planning.plan import TrainingPlan
    from hocket.planning.problem import Problem
    from hocket.planning.reading.configuration import ToolConfiguration


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """What a configuration gives, and a better one of the same tool.

    Attributes:
        file: its name. configuration: what it says.
        predicted: its layout, estimated.
        better: the best layout that the same tool can run; None where the file has it.
        diff: of the file, from its layout to the better one.
        environment: a line of shell that the better one needs; empty where none.
        searched: the problem whose best layout is `better`.
    """

    file: str
    configuration: ToolConfiguration
    predicted: TrainingPlan
    better: LayoutForecast | None = None
    diff: str = ""
    environment: str = ""
    searched: Problem | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "file": self.file,
            "tool": self.configuration.tool,
            "unread": list(self.configuration.unread),
            "notes": list(self.configuration.notes),
            "predicted": self.predicted.to_json(),
            "better": None if self.better is None else self.better.to_json(),
            "diff": self.diff,
            "environment": self.environment,
        }


def plan_from(
    file: str,
    *,
    model: str = "",
    cluster: str,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    stack: str | None = None,
) -> ReadPlan:
    """Predict a configuration of another tool, and find a better one that the tool can run.

    Args:
        file: torchtitan TOML or Python, Megatron-Bridge's Python, DeepSpeed JSON, accelerate's or
            Automodel's YAML, a line or script with Megatron's or torchtitan's flags. It is parsed
            and never executed.
        model ... precision: what the file leaves out; given both ways, they must agree.

    Raises:
        OptionError: what neither the file nor an argument says, or a value that no layout has.
        LayoutError: a layout that does not fit model, batch or GPUs.
    """
    from hocket.planning.reading.file import changed, read_tool_file, target, text_diff
    from hocket.planning.tools.emit import SERVERS, job
    from hocket.planning.tools.megatron import _megatron_environment

    text, found = read_tool_file(file)
    if found.tool in SERVERS:
        raise OptionError(
            f"--from {file}: a server's command, and this plans a training step",
            hint="--serve",
        )
    name = _model(found.model, model)
    length = _one("seq-len", found.seq_len, seq_len, 4096)
    gpus = _gpus(cluster)
    batch = _batch(found, gpus, global_batch)
    if batch is None:
        unit = _data(found, gpus) * (found.microbatch or 1) * (found.accumulation or 1)
        batch = default_global_batch(gpus, length, unit)
        note = f"the file specifies no global batch; {batch} sequences are assumed (--global-batch)"
        found = dataclasses.replace(found, notes=(*found.notes, note))
    asked: dict[str, Any] = {
        "cluster": cluster, "seq_len": length, "global_batch": batch, "stack": stack,
        "precision": precision or found.precision, "by_hocket": False,
        "mtp_layers": found.predictions,
    }  # fmt: skip
    if found.world is not None and found.world != gpus:
        raise OptionError(
            f"{file} is for {found.world} GPUs, and {cluster} has {gpus}",
            hint=f"--cluster with {found.world} GPUs",
        )
    stages = found.layers_per_stage or found.edges is not None
    layers = len(model_shape(name).layers) if stages else None
    predicted = plan_training(name, layout=found.layout(gpus, batch, layers), **asked)
    tool = target(found)
    searched = plan_training(name, emit=tool, top=1, **asked)
    best = searched.best
    here = predicted.best
    if here.fits and best.step_seconds.median >= here.step_seconds.median * 0.999:
        return ReadPlan(file=file, configuration=found, predicted=predicted)
    assert searched.problem is not None
    chosen = job(searched.problem, best)
    new = changed(text, found, chosen)
    return ReadPlan(
        file=file, configuration=found, predicted=predicted, better=best,
        diff=text_diff(os.path.basename(file), text, new), searched=searched.problem,
        environment=(_megatron_environment(chosen) or "") if tool.startswith("megatron") else "",
    )  # fmt: skip


def reading_text(reading: ReadPlan) -> str:
    """For a person: what was read, the prediction, and the diff."""
    found = reading.configuration
    lines = [
        f"{os.path.basename(reading.file)}, read as {found.tool}: {reading.predicted.best.layout}"
    ]
    lines += [*_said(found), "", plan_table(reading.predicted), ""]
    best, here = reading.better, reading.predicted.best
    if best is None:
        return "\n".join([*lines, "No layout that this tool can run is faster."])
    gain = here.step_seconds.median / best.step_seconds.median
    what = f"{gain:.2f} times as fast" if here.fits else "fits, which the file's layout does not"
    lines.append(
        f"Better: {best.layout}: {format_seconds(best.step_seconds.median)}/step, "
        f"{format_bytes(best.memory_high)} on the peak rank ({what})."
    )
    if reading.environment:
        lines.append(f"Its environment: {reading.environment}")
    return "\n".join([*lines, "", reading.diff.rstrip("\n")])


def serve_from(file: str, *, model: str = "", cluster: str | None = None, **asked: Any) -> str:
    """The same for a server's command (vLLM, SGLang): its deployment, and a cheaper one with the
    changed command.

    Args:
        asked: the load, as `jobs.serving.plan.serve_plan` takes it.

    Raises:
        HocketError: as `plan_from`, and where no deployment meets the goals.
    """
    from hocket.jobs import machine
    from hocket.jobs.serving import table as serve_table
    from hocket.jobs.serving.deployment import emitted_deployment
    from hocket.jobs.serving.plan import serve_plan
    from hocket.planning.reading import servers
    from hocket.planning.reading.file import read_tool_file, text_diff
    from hocket.planning.tools.emit import SERVERS
    from hocket.spec.layout import Layout

    text, found = read_tool_file(file)
    if found.tool not in SERVERS:
        raise OptionError(
            f"--from {file}: a configuration of {found.tool}, which trains",
            hint=f"hocket plan --from {file} --cluster 8xH100-SXM",
        )
    if cluster is None:
        raise OptionError("which GPUs?", hint="--cluster H100-SXM-80")
    name = _model(found.model, model)
    if found.tool == "vllm" and "," not in cluster:
        found = servers.vllm_defaults(found, machine.named_cluster(cluster).node.gpu)
    asked.setdefault("precision", found.precision)
    asked.setdefault("quantization", found.quantization)
    asked.setdefault("engine", found.tool)
    given = {**found.server, **asked}
    layout = Layout(dp=found.data_ranks or 1, **found.fields)
    pins = (f"max_num_batched_tokens={found.microbatch}",) if found.microbatch else ()
    (here,) = serve_plan(name, cluster=cluster, layout=layout, pin=pins, **given)
    given["max_num_seqs"] = None  # the planner's to choose, as the layout is
    (best,) = serve_plan(name, cluster=cluster, top=1, **given)
    new = servers.changed_command(text, found.tool, emitted_deployment(best, found.tool))
    lines = [f"{os.path.basename(file)}, read as {found.tool}: {layout}", *_said(found), ""]
    lines += [serve_table.plans_text([here]), ""]
    now, better = here.best, best.best
    if better is None or now is None or (now.meets and better.layout == now.layout):
        lines.append("No layout of these GPUs is cheaper.")
        return "\n".join(lines)
    lines += [f"Better: {better.layout} on {better.num_gpus} {better.gpu}.", ""]
    return "\n".join([*lines, text_diff(os.path.basename(file), text, new).rstrip("\n")])


def _said(found: ToolConfiguration) -> list[str]:
    """Notes, and the keys that were not read."""
    lines = [f"Note: {note}." for note in found.notes]
    if found.unread:
        lines.append("Not read, and not part of the prediction:")
        lines += [f"    {item}" for item in found.unread[:LISTED]]
        if len(found.unread) > LISTED:
            lines.append(f"    ... and {len(found.unread) - LISTED} more")
    return lines


LISTED = 40
"""Keys that are listed."""


def _one(name: str, written: Any, given: Any, default: Any) -> Any:
    """The value of the file or of the flag. Raises OptionError where they differ."""
    if written is not None and given is not None and written != given:
        raise OptionError(
            f"the file has {name} {written}, --{name} is {given}", hint=f"leave --{name} out"
        )
    return next((value for value in (written, given) if value is not None), default)


def _gpus(cluster: str) -> int:
    from hocket.jobs.machine import named_cluster as find_cluster

    return find_cluster(cluster).num_gpus


def _batch(found: ToolConfiguration, gpus: int, given: int | None) -> int | None:
    """Sequences of a step: of the file, of its microbatches, or as given; None: none of them."""
    written = found.global_batch
    if written is None and found.microbatch is not None:
        written = found.microbatch * (found.accumulation or 1) * _data(found, gpus)
        if given is not None and found.accumulation is None:
            written = None
    batch = _one("global-batch", written, given, None)
    return None if batch is None else int(batch)


def _data(found: ToolConfiguration, gpus: int) -> int:
    """Data ranks of the file's layout on so many GPUs."""
    others = math.prod(int(found.fields.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    return found.data_ranks or max(1, gpus // others)


def _model(written: str | None, given: str) -> str:
    """The model's name here. Raises OptionError where neither is a name of the catalogue."""
    from hocket.catalogue import models
    from hocket.planning.tools.torchtitan import CONFIGS

    if given:
        return given
    if written is None:
        raise OptionError(
            "the file does not name a model", hint="hocket plan llama-3-8b --from FILE ..."
        )
    for name in models.model_names():
        if written.removesuffix("-Instruct") in (name, models.entry(name).hub_id):
            return name
    if written.lower() in CONFIGS:
        return CONFIGS[written.lower()]
    raise OptionError(
        f"the file's model is {written!r}, which is not a name of the catalogue",
        hint="hocket plan MODEL --from FILE ...",
    )
