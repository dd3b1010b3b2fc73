"""What ranks run for the matrix: many checks in one world, each with a mesh of its own."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import traceback
from pathlib import Path
from typing import Any

from hocket.doctor.families import FLEXIBLE
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from tests.families import EXPERTS, FAMILIES, HYBRIDS

PLAN = "plan.json"
CONFIGS = {**FLEXIBLE, **FAMILIES, **EXPERTS, **HYBRIDS}

CONTEXT_FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3")
CONTEXT_LAYOUTS = (
    "cp2:zero=1", "cp2:zero=2", "cp2:zero=3", "cp2:recompute=full", "cp2:recompute=selective",
    "cp2:recompute=norm+activation",
    "cp2:microbatches=2", "cp4", "dp2.cp2", "dp2.cp2:zero=1", "dp2.cp2:zero=3",
    "dp2.cp2:zero=2,shard=1", "cp2.tp2", "cp2.tp2:sequence_parallel=true", "cp2.pp2:microbatches=2",
    "cp2.pp2:microbatches=4,recompute=full,zero=1", "dp2.cp2:order=dp-cp-tp-pp",
)  # fmt: skip


DOUBLE = ("qwen3_next", "qwen3_5_text")
"""Families with strong decays, whose gradients in fp32 are mostly rounding that depends on where
the chunks of a scan begin."""


def spec_of(family: str, layout: str) -> RunSpec:
    dtype = "fp64" if family in DOUBLE else "fp32"
    return RunSpec(
        model=family,
        config=CONFIGS[family],
        layout=Layout.parse(layout),
        # Chunks of four ranks are no shorter than what a convolution looks back.
        workload=Workload(seq_len=32 if family in HYBRIDS else 16, global_batch=8, dtype=dtype),
        options=TrainOptions(seed=3, lr=1e-3, dropout=0.0),
        command="check",
    )


def references(context: Any, folder: str, families: list[str]) -> str:
    """What one process computes, and the plan that all ranks of all layouts go by: looking for it
    takes longer than the steps of a case. Each rank takes some families."""
    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.training.reference import write_reference

    for family in families[context.rank :: context.world_size]:
        where = Path(folder) / family
        write_reference(spec_of(family, "dp1"), where, 3)
        plan = plan_for(build_skeleton(CONFIGS[family], dropout=0.0), sequence=True)
        (where / PLAN).write_text(plan.to_json())
    return "done"


def matrix(context: Any, folder: str, cases: list[list[str]], fault: str = "") -> list[Any]:
    """One [family, layout, report or error, seconds] per case; rank 0 reports."""
    from hocket.training.check import compare_layout

    found: list[Any] = []
    meshes: dict[str, Any] = {}
    for family, layout in cases:
        begun = time.perf_counter()
        spec = spec_of(family, layout)
        where = Path(folder) / family
        # Schedules of several stages a rank place them differently, and with them the tie's group.
        name = spec.layout.schedule if spec.layout.virtual_stages > 1 else "1f1b"
        key = dataclasses.replace(
            spec.layout,
            schedule=name,
            microbatches=None,
            pipeline_split="balanced",
            recompute="none",
            recompute_layers=None,
            sequence_parallel=False,
        )
        try:
            parallel, optimizer = compose(context, spec, meshes, str(key), where)
            break_something(parallel, optimizer, fault)
            report = compare_layout(spec, parallel, optimizer, where, 3)
            result = report and json.loads(report.to_json())
        except Exception:
            result = "".join(traceback.format_exc())
            if context.world_size > 1:  # the other ranks wait in a collective
                raise RuntimeError(f"{family} {layout}:\n{result}") from None
        found.append([family, layout, result, time.perf_counter() - begun])
    return found


def context(
    context: Any, folder: str, cases: list[list[str]], kind: str = "auto", fault: str = "",
    dispatch: str = "direct",
) -> Any:  # fmt: skip
    """`matrix` with `--context-parallel KIND` and `--expert-dispatch DISPATCH`."""
    found = []
    if dispatch == "deepep":
        from tests.runtime import deep_ep_emulated

        deep_ep_emulated.install()
    for family, layout in cases:
        spec = spec_of(family, layout)
        spec = dataclasses.replace(
            spec,
            options=dataclasses.replace(
                spec.options, context_parallel=kind, expert_dispatch=dispatch
            ),
        )
        from hocket.training.check import compare_layout

        where = Path(folder) / family
        parallel, optimizer = compose(context, spec, {}, layout, where)
        break_something(parallel, optimizer, fault)
        report = compare_layout(spec, parallel, optimizer, where, 3)
        found.append([family, layout, report and json.loads(report.to_json()), 0.0])
    return found


def compose(
    context: Any, spec: RunSpec, meshes: dict[str, Any], key: str, folder: Path | None = None
) -> tuple[Any, Any]:
    """A rank as training composes it, on a mesh that earlier cases have made already, by the plan
    that `references` left in `folder`."""
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.plan import ParallelPlan
    from hocket.training.build import build_model, build_optimizer

    if key not in meshes:
        meshes[key] = Mesh(spec.layout, context.rank)
    threads = spec.layout.data_parallel == "threads"
    schedule = None if threads else build_schedule(spec.layout, spec.layout.microbatches or 1)
    plan = ParallelPlan.from_json((folder / PLAN).read_text()) if folder else None
    *_, parallel = build_model(spec, meshes[key], schedule, plan, labels_shifted=False)
    return parallel, build_optimizer(parallel, spec.options)


def own_share(sharded: Any, finish: Any, reduction: Any) -> None:
    """End a reduction as if no other rank had sent anything."""
    reduction.work.wait()
    reduction.work = None
    size = reduction.part.numel()
    start = size * reduction.bucket.axis.index
    reduction.part.copy_(reduction.whole[start : start + size])
    finish(reduction)


def wrong_positions(sliced: Any, microbatch: Any, arguments: Any, *rest: Any) -> Any:
    """Every slice begins at position 0, as a decoder finds by itself."""
    length = arguments["position_ids"].shape[1] // 2
    arguments["position_ids"] = arguments["position_ids"][:, :length].repeat(1, 2)
    return sliced(microbatch, arguments, *rest)


def too_early(reduce: Any, bucket: Any) -> None:
    """Reduce a layer without the last gradient that came."""
    if len(bucket.parameters) > 2:
        bucket.parameters[0].grad = None
    reduce(bucket)


def break_something(parallel: Any, optimizer: Any, fault: str) -> None:
    """Leave out one thing that parallelism needs; the check must notice."""
    import torch

    if fault == "input gradient not summed over tp":
        from hocket.runtime.tensor_parallel import layers

        layers.copy_to_axis = lambda x, axis, recorder: x
    elif fault in ("shared heads' gradient not summed", "slices' gradients not summed"):
        parallel._partial.sum = lambda: None
    elif fault == "gradient of what was gathered not summed":
        from hocket.runtime.tensor_parallel import sequence

        sequence._Gather.backward = sequence._GatherReplicated.backward
    elif fault == "input not gathered again":
        from hocket.runtime.tensor_parallel import sequence

        def alone(again: Any, piece: torch.Tensor) -> torch.Tensor:
            return torch.cat([piece] * again._axis.size, -2)

        sequence.GatheredAgain.__call__ = alone
    elif fault == "positions of a slice":
        for stage in parallel.stages:
            stage._sliced = functools.partial(wrong_positions, stage._sliced)
    elif fault == "gradients not summed over dp":
        for buckets in parallel._buckets.values():
            for bucket in buckets._buckets:
                bucket.axis = dataclasses.replace(bucket.axis, group=None)
    elif fault == "experts summed over dp":
        for buckets in parallel._buckets.values():
            for bucket in buckets._buckets:
                bucket.axis = parallel.mesh.axis("dp")
    elif fault == "an expert's copies not summed":
        for buckets in parallel._buckets.values():
            for bucket in buckets._buckets:
                if bucket.axis.name == "expert_data":
                    bucket.axis = dataclasses.replace(bucket.axis, group=None)
    elif fault == "tokens not brought back":
        from hocket.runtime.expert_parallel import dispatch

        dispatch._back = lambda rows, routes: rows.new_zeros(len(routes.order), rows.shape[-1])
    elif fault == "shares of gradients not summed":
        for sharded in parallel._sharded.values():
            sharded._finish = functools.partial(own_share, sharded, sharded._finish)
    elif fault == "stepped shares not gathered":
        for sharded in parallel._sharded.values():
            sharded.begin_unshard = lambda: None
    elif fault == "blocks not gathered anew":
        for sharded in parallel._sharded.values():
            sharded._free = lambda bucket: None
    elif fault == "a block reduced before its gradients are there":
        for sharded in parallel._sharded.values():
            sharded._reduce = functools.partial(too_early, sharded._reduce)
    elif fault == "labels shifted after the cut":
        from hocket.runtime.context_parallel import split

        split.targets = lambda labels, shifted: labels
        parallel.stages[-1].loss_fn.labels_shifted = False
    elif fault == "positions of a rank":
        from hocket.runtime.context_parallel import split

        cut = split.part_of

        def local(microbatch: Any, axis: Any, **more: Any) -> Any:
            part = cut(microbatch, axis, **more)
            length = part["position_ids"].shape[1]
            part["position_ids"] = torch.arange(length).expand_as(part["position_ids"])
            return part

        split.part_of = local
    elif fault == "keys of a rank alone":
        from hocket.runtime.context_parallel import ring

        class Nothing:
            def wait(self) -> bool:
                return True

        ring._pass_on = lambda tensor, axis, recorder: ring._Message(
            tensor, torch.zeros_like(tensor), Nothing()
        )
    elif fault == "states not handed on":
        from hocket.runtime.context_parallel import state

        state.Line.take = lambda line, like, peer: torch.zeros_like(like)
        state.Line.give = lambda line, tensor, peer: None
    elif fault == "gradients of states not handed back":
        from hocket.runtime.context_parallel import state

        state._States.backward = staticmethod(
            lambda ctx, grad: (grad, torch.zeros_like(ctx.saved_tensors[0]), None, None, None)
        )
    elif fault == "inputs not handed on":
        from hocket.runtime.context_parallel import state

        state._along = lambda tensor, axis, recorder, step: torch.zeros_like(tensor)
    elif fault == "tie forgotten":
        parallel._ties = None
    elif fault == "one weight off by a little":
        if parallel.mesh.rank == parallel.mesh.world_size - 1:
            with torch.no_grad():
                next(parallel.parameters()).view(-1)[0] += 1e-6
    elif fault == "loss divided by its own tokens":
        whole = parallel.forward_backward

        def own(microbatches: Any, num_tokens: int) -> Any:
            mine = sum(int((m["labels"][:, 1:] != -100).sum()) for m in microbatches)
            return whole(microbatches, mine * parallel.mesh.axis("dp").size)

        parallel.forward_backward = own
    elif fault == "a learning rate of its own":
        step = optimizer.step
        optimizer.step = lambda lr: step(0.7 * lr)
    elif fault == "norm counted once a rank":
        parallel.clip_grad_norm = lambda largest: torch.stack(
            [p.grad.norm() for p in parallel.parameters()]
        ).norm()
    elif fault == "a norm applied twice":
        if parallel.stages[-1].is_last:
            norm = parallel.stages[-1].module.model.norm
            norm.register_forward_hook(lambda module, args, out: module.weight * out)
    else:
        assert not fault, fault
