"""The proxy model's trials: cut into stages of one layer and split over two ranks, it is compared
with the whole, logits and every gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.ranks.proxy.loss import try_loss
from hocket.ranks.proxy.numbers import (
    DRAWS,
    GRADIENT,
    TOLERANCE,
    forward,
    microbatch,
    one_number,
    outputs,
    proxy_differences,
    taken_gradients,
)
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.plan import recompute_rejected, router_loss_rejected
from hocket.spec.proxy_verdict import (
    RECOMPUTED,
    ProxyVerdict,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hocket.launch import RankContext
    from hocket.models.proxy import ProxyModel
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder


def main(context: RankContext, payload: dict[str, Any]) -> None:
    """Try the parts that `payload` names; rank 0 emits `{"event": "proxy", "ok", "reason", ...}`.

    Payload: `config`, `attention`, `code` (a directory or None), `parts` (of `stages`, `loss`,
    `pages`, `packed`, those of `RECOMPUTED`, `tensors`, `slices`, `context`; the last three need
    two ranks).
    """
    from hocket.models.skeleton import config_of

    code = payload.get("code")
    config = config_of(payload["config"], dropout=0.0, code=Path(code) if code else None)
    found = ProxyVerdict()
    if "stages" in payload["parts"] and context.rank == 0:
        found = dataclasses.replace(found, stages=try_stages(config, payload["attention"]))
    if "loss" in payload["parts"] and context.rank == 0:
        reason, shifts = try_loss(config, payload["attention"])
        found = dataclasses.replace(found, loss=reason, shifts=shifts)
    if "pages" in payload["parts"] and context.rank == 0:
        found = dataclasses.replace(found, pages=try_pages(config))
    if "packed" in payload["parts"] and context.rank == 0:
        from hocket.ranks.proxy.packed import try_packed

        found = dataclasses.replace(found, packed=try_packed(config, payload["attention"]))
    if RECOMPUTED.keys() & {*payload["parts"]} and context.rank == 0:
        found = dataclasses.replace(found, **try_recompute(config, payload["attention"]))
    split = [part for part in ("tensors", "slices") if part in payload["parts"]]
    if split or "context" in payload["parts"]:
        context.init_process_group("gloo")
    if "context" in payload["parts"]:
        from hocket.ranks.proxy.context import try_context

        reason = try_context(
            config, payload["attention"], index=context.rank, degree=context.world_size
        )
        found = dataclasses.replace(found, context=reason)
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
            {"event": "proxy", "ok": found.ok, "reason": found.reason, **dataclasses.asdict(found)}
        )


def pages_verdict(config: dict[str, Any]) -> str:
    """`try_pages` of a configuration dictionary, in this process; nothing is cached."""
    from hocket.models.skeleton import config_of

    return try_pages(config_of(config, dropout=0.0))


def try_stages(config: Any, attention: str) -> str:
    """Why the proxy model of a configuration cannot be cut; empty where the cut changes nothing."""
    import copy

    import torch

    from hocket.models.failure import failure_place
    from hocket.models.plans import plan_for
    from hocket.models.plans.stages import handed_on
    from hocket.models.proxy import proxy_of
    from hocket.runtime.pipeline.cut import MissingLayer, cut
    from hocket.runtime.pipeline.stage import Stage

    try:
        proxy = proxy_of(config)
        model = proxy.build(attention=attention).train()
        inputs, weight = microbatch(proxy)
        fresh = copy.deepcopy(model)  # some keep what they computed (RecurrentGemma)
        expected, gradients = proxy_reference(model, inputs, weight)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny proxy model does not run: it fails in {failure_place(error)}"
    if reason := _not_causal(model, inputs, expected):
        return reason
    plan = plan_for(model)
    if plan.stages is None:
        return plan.reasons["stages"]
    if plan.router is not None and (why := router_loss_rejected(Layout(pp=2), plan.router)):
        return why
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
            return f"its own code reads {error.name!r} of a layer that is on another stage"
        more = handed_on(model, plan.stages.layers, lambda: forward(model, inputs))
        return (
            more
            or "a stage of its tiny proxy model does not run alone: it fails in "
            f"{failure_place(error)}"
        )
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
    reason = proxy_differences(expected, logits.detach(), wanted, found, plan)
    if not reason:
        return ""
    return handed_on(model, plan.stages.layers, lambda: forward(model, inputs)) or reason


def try_recompute(config: Any, attention: str) -> dict[str, Any]:
    """Of each of `RECOMPUTED`, why layers of this configuration's proxy model cannot be recomputed
    so; empty where they can."""
    from hocket.models.failure import failure_place
    from hocket.models.plans import plan_for
    from hocket.models.proxy import proxy_of

    try:
        plan = plan_for(proxy_of(config).build(attention=attention))
    except ModelError as error:
        return dict.fromkeys(RECOMPUTED, error.message)
    except Exception as error:  # the forward of a foreign family fails in its own way
        reason = f"its tiny proxy model does not run: it fails in {failure_place(error)}"
        return dict.fromkeys(RECOMPUTED, reason)
    return {part: recompute_rejected(text, plan) for part, text in RECOMPUTED.items()}


def try_pages(config: Any) -> str:
    """Why a model of this configuration cannot be served; empty where its proxy model, in chunks
    from scattered blocks, gives what its plain forward gives."""
    from hocket.models.failure import failure_place
    from hocket.serving.engine.families import self_check

    try:
        self_check(config)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"it cannot be served: its tiny proxy model fails in {failure_place(error)}"
    return ""


def try_tensors(
    config: Any,
    attention: str,
    *,
    index: int,
    degree: int,
    slices: bool = False,
    group: Any = None,
) -> tuple[str, str]:
    """(why the proxy model cannot be split over ranks, what is replicated); run on `degree` ranks.

    `slices`: with sequence parallelism. `group`: the ranks' process group; None: the default one.
    """
    from hocket.models.proxy import proxy_of

    try:
        proxy = proxy_of(config)
    except ModelError as error:
        return error.message, ""
    for draw in range(DRAWS):
        reason, note = _try_tensors(
            proxy, attention, index=index, degree=degree, slices=slices, draw=draw, group=group
        )
        if not reason.startswith(GRADIENT):
            break
    return reason, note


def _try_tensors(
    proxy: ProxyModel,
    attention: str,
    *,
    index: int,
    degree: int,
    slices: bool,
    draw: int,
    group: Any,
) -> tuple[str, str]:
    """`try_tensors` with one draw of weights and tokens. Every rank returns the same."""
    import copy

    import torch
    import torch.distributed as dist

    from hocket.models.failure import failure_place
    from hocket.models.plans import plan_for
    from hocket.runtime.collectives import all_reduce
    from hocket.runtime.loss import router_degree
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder
    from hocket.runtime.tensor_parallel.apply import apply_tensor_parallel

    try:
        model = proxy.build(seed=draw, attention=attention).train()
        inputs, weight = microbatch(proxy, draw)
        fresh = copy.deepcopy(model)
        expected, gradients = proxy_reference(model, inputs, weight)
    except ModelError as error:
        return error.message, ""
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny proxy model does not run: it fails in {failure_place(error)}", ""
    plan = plan_for(model, sequence=slices)
    note = plan.reasons.get("tensor", "")
    if plan.tensor is None:
        return note, ""
    if slices and plan.sequence is None:
        return plan.reasons["sequence"], note
    axis = Axis("tp", degree, index, tuple(range(degree)), group or dist.group.WORLD)
    recorder = Recorder(index)
    local = fresh
    try:
        placements = apply_tensor_parallel(local, plan.tensor, axis, recorder, plan.sequence)
        output = outputs(local, inputs, plan, degree)
        logits = output.logits
        if logits.shape[1] != expected.shape[1]:
            return (
                f"{_head_weight(local).removesuffix('.weight') or 'its output head'} makes logits "
                f"of {logits.shape[1]} positions for {expected.shape[1]} tokens"
                + (": it gathers sequence shards, and is given whole sequences" if slices else "")
            ), note
        head = placements.get(_head_weight(local))
        mine = slice(None)
        if head is not None and head.sharded and logits.shape[-1] != expected.shape[-1]:
            mine = head.blocks[0].in_global[0]
        shared = 1 if plan.router is None else router_degree(plan.router, placements, degree)
        torch.autograd.backward(one_number(output, weight[..., mine], plan.router, shared))
    except Exception as error:  # every rank runs the same code on equal shapes: all fail
        return (
            f"{failure_place(error)} fails on a shard of tp {degree}: it reads a size that the "
            "split does "
            "not change"
        ), ""
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
    reason = proxy_differences(expected[..., mine], logits.detach(), wanted, found, plan)
    if reason and plan.router is not None:
        reason += ' (with the router\'s auxiliary loss; "output_router_logits": false is without)'
    return next((text for text in said_by_all(reason, axis, recorder) if text), ""), note


def said_by_all(text: str, axis: Axis, recorder: Recorder) -> list[str]:
    """What each rank of the axis says, in their order; it travels as bytes filled up with zeros."""
    import torch

    from hocket.runtime.collectives import all_gather, all_reduce

    said = text.encode()
    longest = torch.tensor([len(said)])
    all_reduce(longest, axis, recorder, op="max")
    row = torch.tensor([*said.ljust(int(longest) + 1, b"\0")], dtype=torch.uint8)
    rows = all_gather(row, axis, recorder).view(axis.size, -1).tolist()
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def proxy_reference(
    model: nn.Module, inputs: dict[str, Tensor], weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    from hocket.models.plans.router import router_loss

    output = outputs(model, inputs)
    torch.autograd.backward(one_number(output, weight, router_loss(model)))
    return output.logits.detach(), taken_gradients(model)


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
