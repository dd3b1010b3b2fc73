"""The tiny-twin check: does this architecture compute the same when it is split?

Some architectures break in silence: a norm that runs again on every stage, one block that many
layers share, positions added twice. So before the ranks of a job start, the user's own
architecture, at sizes that run in milliseconds, is cut into stages of one layer and split over
two ranks; its logits and every gradient are compared with the whole. The verdict is kept in the
user's cache folder, keyed by the architecture and the versions of what runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hocket
from hocket.jobs.twin_numbers import (
    DRAWS,
    GRADIENT,
    TOLERANCE,
    compare,
    forward,
    microbatch,
    taken_gradients,
)
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.run import write_text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hocket.launch import Launcher, RankContext
    from hocket.models.source import ModelSource
    from hocket.models.twin import Twin
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder

RULES = 6
"""Counted up when models can be cut or split that could not before: old verdicts are forgotten."""

_IRRELEVANT = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the twin showed. Empty text: equal. None: not tried.

    Attributes:
        stages: why the model cannot be cut into stages.
        tensors: why its tensors cannot be split over ranks.
        slices: why they cannot be with sequence parallelism.
        pages: why it cannot be served from a paged cache.
        packed: why documents that share a row would see each other.
        served: by layout of one replica, why it answers differently when it is served there.
        note: blocks that tensor parallelism holds whole, and why.
    """

    stages: str | None = None
    tensors: str | None = None
    slices: str | None = None
    pages: str | None = None
    packed: str | None = None
    served: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything that was tried came out equal."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why not; empty where `ok`."""
        found = (self.stages, self.tensors, self.slices, self.pages, self.packed)
        return "; ".join(text for text in found if text)


def require(
    launcher: Launcher,
    source: ModelSource,
    layout: Layout,
    *,
    attention: str = "sdpa",
    pages: bool = False,
    packed: bool = False,
) -> Verdict:
    """Refuse a layout that would change what this model computes, before its ranks start; with
    `pages`, also a model that would compute something else when it is served at this layout, and
    with `packed`, one whose documents would see each other in a row that they share.

    Takes no time where the layout splits nothing or the verdict is cached.

    Raises:
        ModelError: the twin differs, by name and with the reason.
    """
    wanted = {
        "stages": layout.num_stages > 1,
        "tensors": layout.tp > 1,
        "slices": layout.tp > 1 and layout.sequence_parallel,
        "pages": pages,
        "packed": packed,
    }
    if not any(wanted.values()):
        return Verdict()
    file = _cache_file(source.config, attention) if source.code is None else None
    known = _read(file)
    missing = [part for part, want in wanted.items() if want and getattr(known, part) is None]
    if missing:
        heard: list[dict[str, Any]] = []
        payload = {
            "config": source.config,
            "attention": attention,
            "code": None if source.code is None else str(source.code),
            "parts": missing,
        }
        launcher.run(
            entry="hocket.jobs.twin:main",
            world_size=2 if {"tensors", "slices"} & {*missing} else 1,
            payload=payload,
            on_event=lambda event: heard.append(event) if event["event"] == "twin" else None,
        )
        found = {part: heard[-1][part] for part in missing}
        known = dataclasses.replace(known, **found, note=heard[-1]["note"] or known.note)
        _write(file, known)
    kind = source.config.get("model_type")
    if wanted["stages"] and known.stages:
        raise ModelError(
            f"{source.name} ({kind}) cannot be cut into pipeline stages: {known.stages}",
            hint=str(dataclasses.replace(layout, pp=1, virtual_stages=1, cut="balanced")),
        )
    if wanted["tensors"] and known.tensors:
        raise ModelError(
            f"{source.name} ({kind}) cannot be split over tensor-parallel ranks: {known.tensors}",
            hint=str(dataclasses.replace(layout, tp=1, sequence_parallel=False)),
        )
    if wanted["slices"] and known.slices:
        raise ModelError(
            f"{source.name} ({kind}) cannot run on slices of its sequences: {known.slices}",
            hint=str(dataclasses.replace(layout, sequence_parallel=False)),
        )
    if wanted["pages"]:
        if known.pages:
            raise ModelError(known.pages)
        known = _require_answers(launcher, source, layout, known, file)
    if wanted["packed"] and known.packed:
        raise ModelError(
            f"documents cannot share a row of {source.name} ({kind}) without seeing each other: "
            f"{known.packed}",
            hint="--packing none",
        )
    return known


def _require_answers(
    launcher: Launcher, source: ModelSource, layout: Layout, known: Verdict, file: Path | None
) -> Verdict:
    """Serve the proxy model at a layout that splits, unless the verdict is known. Raises
    ModelError: its answers are not those of plain transformers."""
    from hocket.jobs.serving import check

    replica = Layout(tp=layout.tp, pp=layout.pp)
    if replica.world_size == 1:
        return known
    if (text := str(replica)) not in known.served:
        reason = check.proxy_check(launcher, source, replica)
        known = dataclasses.replace(known, served={**known.served, text: reason})
        _write(file, known)
    if known.served[text]:
        raise ModelError(
            f"{source.name} does not answer as plain transformers does when it is served at "
            f"{text}: of its tiny proxy model, {known.served[text]}",
            hint="--layout dp1",
        )
    return known


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Try the parts that `payload` names; rank 0 emits `{"event": "twin", "ok", "reason", ...}`.

    Payload: `config`, `attention`, `code` (a directory or None), `parts` (of `stages`, `pages`,
    `packed`, `tensors`, `slices`; the last two need two ranks).
    """
    from hocket.models.skeleton import config_of

    code = payload.get("code")
    config = config_of(payload["config"], dropout=0.0, code=Path(code) if code else None)
    found = Verdict()
    if "stages" in payload["parts"] and context.rank == 0:
        found = dataclasses.replace(found, stages=try_stages(config, payload["attention"]))
    if "pages" in payload["parts"] and context.rank == 0:
        found = dataclasses.replace(found, pages=try_pages(config))
    if "packed" in payload["parts"] and context.rank == 0:
        from hocket.jobs.twin_packed import try_packed

        found = dataclasses.replace(found, packed=try_packed(config, payload["attention"]))
    split = [part for part in ("tensors", "slices") if part in payload["parts"]]
    if split:
        context.init_process_group("gloo")
    for part in split:
        reason, note = try_tensors(
            config,
            payload["attention"],
            index=context.rank,
            degree=context.world_size,
            slices=part == "slices",
        )
        changes = {part: reason, "note": note}
        found = dataclasses.replace(found, **changes)  # type: ignore[arg-type]
    if context.rank == 0:
        context.emit(
            {"event": "twin", "ok": found.ok, "reason": found.reason, **dataclasses.asdict(found)}
        )


def verdict(config: dict[str, Any], *, attention: str = "sdpa") -> Verdict:
    """Cut the twin of a configuration into stages, here in this process; nothing is cached."""
    from hocket.models.skeleton import config_of

    return Verdict(stages=try_stages(config_of(config, dropout=0.0), attention))


# --- the two trials ----------------------------------------------------------------------------


def try_stages(config: Any, attention: str) -> str:
    """Why the twin of a configuration cannot be cut; empty where the cut changes nothing."""
    import copy

    import torch

    from hocket.models.plans import plan_for
    from hocket.models.plans.stages import handed_on
    from hocket.models.twin import twin_of
    from hocket.runtime.pipeline.cut import MissingLayer, cut
    from hocket.runtime.pipeline.stage import Stage

    try:
        twin = twin_of(config)
        model = twin.build(attention=attention).train()
        inputs, weight = microbatch(twin)
        fresh = copy.deepcopy(model)  # some keep what they computed (RecurrentGemma)
        expected, gradients = _reference(model, inputs, weight)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny twin does not run: {type(error).__name__}: {error}"
    if reason := _not_causal(model, inputs, expected):
        return reason
    plan = plan_for(model)
    if plan.stages is None:
        return plan.reasons["stages"]
    if plan.stages.num_layers == 1:
        return "it has one layer"
    for end, owner in plan.ties.items():
        if f"{end}.".startswith(f"{plan.stages.layers}."):
            return f"its layers share parameters ({end} is {owner})"
    # One layer a stage is the hardest cut: whatever two layers share lies on two stages.
    bounds = (1,) * plan.stages.num_layers
    try:
        stages = [
            Stage(
                cut(copy.deepcopy(fresh), plan.stages, bounds, index), index, len(bounds),
                plan=plan.stages, hidden_size=plan.hidden_size,
            )
            for index in range(len(bounds))
        ]  # fmt: skip
        ends: list[tuple[Tensor, Tensor]] = []
        hidden = None
        for stage in stages[:-1]:
            sent = stage.output(inputs, hidden)
            if tuple(sent.shape) != stage.hidden_shape(inputs):
                shape = " x ".join(map(str, stage.hidden_shape(inputs)))
                return (
                    f"what its layers hand on has the shape {' x '.join(map(str, sent.shape))}, "
                    f"not that of rows, tokens and hidden size ({shape})"
                )
            hidden = sent.detach().requires_grad_()
            ends.append((sent, hidden))
        logits = stages[-1].output(inputs, hidden).logits
        torch.autograd.backward((logits * weight).sum())
        for sent, received in reversed(ends):
            assert received.grad is not None
            torch.autograd.backward(sent, received.grad)
    except Exception as error:  # the forward of a foreign family fails in its own way
        if isinstance(error, ModelError):
            return error.message
        if isinstance(error, AttributeError) and isinstance(error.obj, MissingLayer):
            return f"its own code reads {error.name!r} of a layer that lies on another stage"
        more = handed_on(model, plan.stages.layers, lambda: forward(model, inputs))
        return more or f"a stage of its tiny twin fails with {type(error).__name__}: {error}"
    found: dict[str, Tensor] = {}
    tied = {*plan.ties, *plan.ties.values()}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is None:
                continue
            owner = plan.ties.get(name, name)
            if owner in found and name not in tied:
                return f"{name} is used on more than one stage"
            found[owner] = found[owner] + parameter.grad if owner in found else parameter.grad
    # Of tied parameters the whole model names the first, which need not be the owner.
    wanted = {plan.ties.get(name, name): gradient for name, gradient in gradients.items()}
    reason = compare(expected, logits.detach(), wanted, found, plan)
    if not reason:
        return ""
    return handed_on(model, plan.stages.layers, lambda: forward(model, inputs)) or reason


def try_pages(config: Any) -> str:
    """Why a model of this configuration cannot be served; empty where its twin, served in chunks
    from scattered blocks, gives what its plain forward gives."""
    from hocket.serving.engine.families import self_check

    try:
        self_check(config)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"it cannot be served: its tiny twin fails with {type(error).__name__}: {error}"
    return ""


def try_tensors(
    config: Any, attention: str, *, index: int, degree: int, slices: bool = False
) -> tuple[str, str]:
    """(why the twin cannot be split over ranks, what is held whole); on `degree` ranks at once.

    `slices`: with sequence parallelism.
    """
    from hocket.models.twin import twin_of

    try:
        twin = twin_of(config)
    except ModelError as error:
        return error.message, ""
    for draw in range(DRAWS):
        reason, note = _try_tensors(
            twin, attention, index=index, degree=degree, slices=slices, draw=draw
        )
        if not reason.startswith(GRADIENT):
            break
    return reason, note


def _try_tensors(
    twin: Twin, attention: str, *, index: int, degree: int, slices: bool, draw: int
) -> tuple[str, str]:
    """`try_tensors` with one draw of weights and tokens. Every rank returns the same."""
    import copy

    import torch
    import torch.distributed as dist

    from hocket.models.plans import plan_for
    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder
    from hocket.runtime.tensor_parallel.apply import apply_tensor_parallel

    try:
        model = twin.build(seed=draw, attention=attention).train()
        inputs, weight = microbatch(twin, draw)
        fresh = copy.deepcopy(model)
        expected, gradients = _reference(model, inputs, weight)
    except ModelError as error:
        return error.message, ""
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny twin does not run: {type(error).__name__}: {error}", ""
    plan = plan_for(model, sequence=slices)
    note = plan.reasons.get("tensor", "")
    if plan.tensor is None:
        return note, ""
    if slices and plan.sequence is None:
        return plan.reasons["sequence"], note
    axis = Axis("tp", degree, index, tuple(range(degree)), dist.group.WORLD)
    recorder = Recorder(index)
    local = fresh
    try:
        placements = apply_tensor_parallel(local, plan.tensor, axis, recorder, plan.sequence)
        logits = forward(local, inputs, plan, degree)
        if logits.shape[1] != expected.shape[1]:
            return (
                f"{_head_weight(local).removesuffix('.weight') or 'its output head'} makes logits "
                f"of {logits.shape[1]} positions for {expected.shape[1]} tokens"
                + (": it gathers slices, and is given what is whole" if slices else "")
            ), note
        head = placements.get(_head_weight(local))
        mine = slice(None)
        if head is not None and head.sharded and logits.shape[-1] != expected.shape[-1]:
            mine = head.blocks[0].in_global[0]
        torch.autograd.backward((logits * weight[..., mine]).sum())
    except Exception as error:  # every rank runs the same code on equal shapes: all fail alike
        return f"its tiny twin fails with {type(error).__name__}: {error}", ""
    found: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, parameter in local.named_parameters():
        if parameter.grad is None:
            continue
        placement = placements[name]
        grad = parameter.grad.contiguous()
        if "tp" in placement.grad_sum:
            all_reduce(grad, axis, recorder)
        for block in placement.blocks:
            if block.copies > 1:  # on two ranks both hold it; what else is fused with it is theirs
                part = grad[block.in_local].contiguous()
                all_reduce(part, axis, recorder)
                grad[block.in_local] = part
        for there, here in placement.pairs():
            key = f"{name} {there}"
            found[key], wanted[key] = grad[here], gradients[name][there]
    reason = compare(expected[..., mine], logits.detach(), wanted, found, plan)
    return next((text for text in _said(reason, axis, recorder) if text), ""), note


def _said(text: str, axis: Axis, recorder: Recorder) -> list[str]:
    """What each rank of the axis says, in their order; it travels as bytes filled up with zeros."""
    import torch

    from hocket.runtime.collectives import all_gather, all_reduce

    said = text.encode()
    longest = torch.tensor([len(said)])
    all_reduce(longest, axis, recorder, op="max")
    row = torch.tensor([*said.ljust(int(longest) + 1, b"\0")], dtype=torch.uint8)
    rows = all_gather(row, axis, recorder).view(axis.size, -1).tolist()
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def _reference(
    model: nn.Module, inputs: dict[str, Tensor], weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    logits = forward(model, inputs)
    torch.autograd.backward((logits * weight).sum())
    return logits.detach(), taken_gradients(model)


def _not_causal(model: nn.Module, inputs: dict[str, Tensor], expected: Tensor) -> str:
    import torch

    changed = inputs["input_ids"].clone()
    changed[:, -1] = torch.where(changed[:, -1] == 5, 6, 5)
    with torch.no_grad():
        logits = forward(model, {**inputs, "input_ids": changed})
    off = float((logits - expected)[:, :-1].abs().max())
    if off > TOLERANCE * float(expected.abs().max()):
        return "it is not causal: a later token changes earlier logits"
    return ""


def _head_weight(model: nn.Module) -> str:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return next((f"{n}.weight" for n, m in model.named_modules() if m is head), "")


# --- the cache ---------------------------------------------------------------------------------


def _cache_file(config: dict[str, Any], attention: str) -> Path:
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    versions = [hocket.__version__, *(_version(name) for name in ("transformers", "torch"))]
    key = json.dumps([relevant, attention, versions, RULES], sort_keys=True, default=str)
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "hocket" / "twins" / name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(file: Path | None) -> Verdict:
    if file is None:
        return Verdict()
    try:
        return Verdict(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or of another version: try again
        return Verdict()


def _write(file: Path | None, found: Verdict) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(dataclasses.asdict(found)))
    except OSError:
        return  # a cache that cannot be written only costs the next run its second
