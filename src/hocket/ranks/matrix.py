"""The ranks' side of the matrix: many types and many layouts in one world.

    prepare   each rank by itself: its share of the types made small, tried in stages, and run by
              one process for reference
    try_parts the proxy check of `hocket train`, on two ranks: tensors, slices, context
    widen     the same reference in fp64
    compare   the world of one size: case by case, a layout's steps against the reference

Every rank says which case it begins, so that the one that ends a world is known by name. A rank
that raises in a case ends its world: the others may be waiting for it in a collective.

FOLDER/KIND/
  plan.json            how the tiny model may be split
  weights/             of a family that does not initialise all of them itself
  batch-N/             what one process computed of N microbatches (`training.check`)
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.models.dimensions import dimensions
from hocket.spec.errors import HocketError, ModelError
from hocket.spec.files import write_text
from hocket.spec.layout import Layout
from hocket.spec.matrix import DIFFERENT, EQUAL
from hocket.spec.run import RunSpec, TrainOptions, Workload

if TYPE_CHECKING:
    from torch import nn

    from hocket.launch import RankContext
    from hocket.runtime.mesh import Mesh
    from hocket.spec.plan import ParallelPlan

STEPS = 3
WEIGHTS = "weights"
SWITCH = "output_router_logits"
ROUTER_SPLITS = tuple((n, m) for n in (1, 2, 4, 8) for m in (1, 2, 4, 8) if n * m <= 8)
"""Data ranks and microbatches of the layouts that a router's auxiliary loss allows."""
MOST_FAILURES = 2
"""Lines of a report that a cell repeats."""


def workload(config: Mapping[str, Any], dtype: str = "fp32") -> Workload:
    """Eight sequences of 16 tokens, or more where a convolution reads more earlier inputs than a
    chunk of cp4 would have. Raises ModelError: the configuration names no sizes."""
    seq_len = max(16, 8 * dimensions(config).handed_width)
    return Workload(seq_len=seq_len, global_batch=8, dtype=dtype)


def _case_spec(
    kind: str, config: dict[str, Any], layout: Layout, folder: Path, dtype: str = "fp32"
) -> RunSpec:
    """One case as a job, from the weights in its folder if there are any, else a draw of them."""
    return RunSpec(
        model=kind,
        config=config,
        weights=str(folder / WEIGHTS) if (folder / WEIGHTS).exists() else None,
        layout=layout,
        workload=workload(config, dtype),
        options=TrainOptions(seed=3, lr=1e-3, dropout=0.0, device="cpu", grad_dtype=dtype),
        command="check",
    )


def reference_folder(where: Path, layout: Layout, config: dict[str, Any]) -> Path:
    """Where the reference is: a router's loss depends on microbatches, each of all data ranks."""
    dp, count = (layout.dp, layout.microbatches or 1) if config.get(SWITCH) else (1, 1)
    return where / f"batch-{dp}x{count}"


def _write_references(kind: str, config: dict[str, Any], where: Path, dtype: str = "fp32") -> None:
    from hocket.training.reference import write_reference

    for dp, count in ROUTER_SPLITS if config.get(SWITCH) else ((1, 1),):
        layout = Layout(dp=dp, microbatches=count)
        spec = _case_spec(kind, config, layout, where, dtype)
        write_reference(spec, reference_folder(where, layout, config), STEPS)


# --- one process -----------------------------------------------------------------------------


def prepare_cases(context: RankContext, payload: dict[str, Any]) -> None:
    """Make each type small, try it in stages, and write its reference.

    Payload: `folder`, and `types`: for each [name, configuration as its source gave it, switches].
    Of the switches as many are set as the class can be built with together. Rank r takes every
    world-size-th type. Emits `{"event": "type", "kind", ...}` for each, with `refused` or `crashed`
    (why there is no model to compare with), else its `config`, `parameters`, `switches`, and as
    `verdict` the parts of a `ProxyVerdict` that are known: whether it can be cut, and what its plan
    rejects.
    """
    for kind, config, switches in payload["types"][context.rank :: context.world_size]:
        context.emit({"event": "begin", "what": kind})
        found = _prepare(kind, config, switches, Path(payload["folder"]))
        context.emit({"event": "type", "kind": kind, **found})
        gc.collect()


def _prepare(
    kind: str, values: dict[str, Any], switches: dict[str, Any], folder: Path
) -> dict[str, Any]:
    from hocket.models.plans import plan_for
    from hocket.models.proxy import switched_proxy
    from hocket.models.skeleton import build_skeleton
    from hocket.ranks.proxy.loss import try_loss
    from hocket.ranks.proxy.trial import try_stages

    try:
        proxy, taken = switched_proxy(values, switches)
        model = build_skeleton(proxy.config)
        plan = plan_for(model, sequence=True)
        config = json.loads(json.dumps(proxy.config.to_dict(), default=str))
        loss, _ = try_loss(proxy.config, "sdpa")
        if loss:
            raise ModelError(loss)
        reason = try_stages(proxy.config, "sdpa")
        where = folder / kind
        where.mkdir(parents=True, exist_ok=True)
        write_text(where / "plan.json", plan.to_json())
        if _uninitialised(model):
            _save(proxy.build(), where / WEIGHTS)
        _write_references(kind, config, where)
    except HocketError as error:
        return {"rejected": error.message}
    except Exception as error:  # no other rank waits for this one: the next type may do better
        return {"crashed": _said(error)}
    return {
        "config": config,
        "parameters": sum(p.numel() for p in model.parameters()),
        "verdict": {"stages": reason, **_rejected(plan)},
        "inferred": plan.inferred,
        "switches": ", ".join(f"{name}={value}" for name, value in taken.items()),
        "note": plan.reasons.get("tensor", "") if plan.tensor is not None else "",
    }


def _rejected(plan: ParallelPlan) -> dict[str, str]:
    """Parts that a plan rejects, which no ranks need to try."""
    if plan.tensor is None:
        return dict.fromkeys(("tensors", "slices"), plan.reasons["tensor"])
    return {} if plan.sequence is not None else {"slices": plan.reasons["sequence"]}


def try_parts(context: RankContext, payload: dict[str, Any]) -> None:
    """Try proxy models on two ranks.

    Payload: `trials`: for each [type, configuration, part]. Rank 0 emits
    `{"event": "tried", "reason"}` for each, in their order.
    """
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.context import try_context
    from hocket.ranks.proxy.trial import try_tensors

    context.init_process_group("gloo")
    ranks = {"index": context.rank, "degree": context.world_size}
    for kind, values, part in payload["trials"]:
        context.emit({"event": "begin", "what": kind})
        config = config_of(values, dropout=0.0)
        if part == "context":
            reason = try_context(config, "sdpa", **ranks)
        else:
            reason, _ = try_tensors(config, "sdpa", slices=part == "slices", **ranks)
        if context.rank == 0:
            context.emit({"event": "tried", "reason": reason})
        gc.collect()


def widen(context: RankContext, payload: dict[str, Any]) -> None:
    """Write references in fp64.

    Payload: `folder`, and `types`: for each [name, tiny configuration].
    """
    for kind, config in payload["types"][context.rank :: context.world_size]:
        context.emit({"event": "begin", "what": kind})
        where = Path(payload["folder"]) / kind
        _write_references(kind, config, where, "fp64")


def _uninitialised(model: nn.Module) -> bool:
    """Whether the family's own initialisation leaves weights out: they come from a file then."""
    from hocket.models.initial import random_values

    names = [name for name, _ in model.named_parameters()]
    try:
        for _ in random_values(model, names, 0):
            pass
    except ModelError:
        return True
    return False


def _save(model: nn.Module, folder: Path) -> None:
    from hocket.training.reference import save_reference

    folder.mkdir()
    save_reference(
        folder / "model.safetensors", {n: p.detach() for n, p in model.named_parameters()}
    )


def tidy(folder: Path, kinds: list[str]) -> None:
    """Take a batch's references from the disk."""
    for kind in kinds:
        shutil.rmtree(folder / kind, ignore_errors=True)


# --- a layout --------------------------------------------------------------------------------


def compare_cases(context: RankContext, payload: dict[str, Any]) -> None:
    """Run cases one after the other in this world.

    Payload: `folder`, `dtype`, and `cases`: for each [number, type, configuration, layout]. Rank 0
    emits `{"event": "case", "case", "outcome", "reason", "ratio", "seconds", "tipped"}` for each
    (tipped: it is different, and may be equal in fp64); a rank that raises emits
    `{"event": "raised", "case", "refused", "reason"}` first.
    """
    from hocket.training.build import join_world

    meshes: dict[str, Mesh] = {}
    for number, kind, config, text in payload["cases"]:
        context.emit({"event": "begin", "what": number})
        begun = time.perf_counter()
        layout = Layout.parse(text)
        spec = _case_spec(kind, config, layout, Path(payload["folder"]) / kind, payload["dtype"])
        if not meshes:
            meshes[_shape(layout)] = join_world(spec, context)
        try:
            found = _compare(context, spec, meshes, Path(payload["folder"]) / kind)
        except Exception as error:
            refused = isinstance(error, HocketError)
            reason = error.message if isinstance(error, HocketError) else _said(error)
            context.emit({"event": "raised", "case": number, "refused": refused, "reason": reason})
            raise
        if found is not None:
            seconds = time.perf_counter() - begun
            context.emit({"event": "case", "case": number, "seconds": seconds, **found})
        gc.collect()


def _compare(
    context: RankContext, spec: RunSpec, meshes: dict[str, Mesh], folder: Path
) -> dict[str, Any] | None:
    import math

    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.plan import ParallelPlan
    from hocket.training.build import build_model, build_optimizer
    from hocket.training.check import compare_layout

    shape = _shape(spec.layout)
    if shape not in meshes:
        first = next(iter(meshes.values()))
        meshes[shape] = Mesh(spec.layout, context.rank, first.device)
    plan = ParallelPlan.from_json((folder / "plan.json").read_text())
    schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
    *_, parallel = build_model(spec, meshes[shape], schedule, plan, labels_shifted=False)
    optimizer = build_optimizer(parallel, spec.options)
    reference = reference_folder(folder, spec.layout, dict(spec.config))
    report = compare_layout(spec, parallel, optimizer, reference, STEPS)
    if report is None:
        return None
    ratio = report.worst_ratio
    return {
        "outcome": EQUAL if report.ok else DIFFERENT,
        "reason": "; ".join(report.failures[:MOST_FAILURES]),
        "ratio": ratio if math.isfinite(ratio) else None,
        "tipped": not report.ok
        and all(step.ok for step in report.steps)
        and all(row.covered and row.start <= 0 for row in report.rows),
    }


def _shape(layout: Layout) -> str:
    """Layouts of one shape share a mesh."""
    return f"{layout.axes_text()}, {layout.zero}, {layout.shard}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"
