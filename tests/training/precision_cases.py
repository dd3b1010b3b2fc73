"""What ranks do to show a precision: layouts in bf16 against one process in bf16, and in fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.launch import RankContext
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload

STEPS = 3


def layouts(
    context: RankContext, config: dict[str, Any], cases: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """For each (layout, grad_dtype): how far this rank's gradients and losses lie from those of
    one process, and both from fp32 (sums of squares); its memory, counted and predicted."""
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.training.memory_forecast import forecast_memory

    found = []
    references: dict[Any, Any] = {}
    for text, grad_dtype in cases:
        layout = Layout.parse(text)
        spec = RunSpec(
            model="tiny",
            config=config,
            layout=layout,
            workload=Workload(seq_len=32, global_batch=8, dtype="bf16"),
            options=TrainOptions(
                seed=4, dropout=0.0, device="cpu", grad_dtype=grad_dtype, bucket_mb=0.01
            ),
        )
        count = layout.microbatches or 1
        key = count * layout.dp, grad_dtype
        if key not in references:
            references[key] = _one_process(spec, count * layout.dp)
        one, exact = references[key]
        mesh = Mesh(layout, context.rank)
        schedule = build_schedule(layout, count) if layout.num_stages > 1 else None
        here = _steps(spec, mesh, schedule)
        wide = torch.zeros(4, dtype=torch.float64)
        largest = 0.0
        for name, gradient in here["gradients"].items():
            assert gradient.dtype == getattr(torch, {"fp32": "float32"}.get(grad_dtype, "bfloat16"))
            for there, mine in here["placements"][name].pairs():
                g, h, e = (
                    gradient[mine].double(),
                    one["gradients"][name][there].double(),
                    exact["gradients"][name][there].double(),
                )
                top = float(one["gradients"][name].abs().max())
                if top > 1e-6:
                    largest = max(largest, float((g - h).abs().max()) / top)
                wide += torch.stack([(g - h).pow(2).sum(), (g - e).pow(2).sum(),
                                     (h - e).pow(2).sum(), e.pow(2).sum()])  # fmt: skip
        found.append(
            {
                "largest": largest,
                "squares": wide.tolist(),
                "losses": [here["losses"], one["losses"], exact["losses"]],
                "rounded": here["rounded"],
                "counted": here["counted"],
                # A forecast simulates every rank: one process does it, of cases that differ.
                "predicted": forecast_memory(spec, schedule)[0].to_json()
                if context.rank == 0 and grad_dtype == "bf16"
                else None,
            }
        )
    return found


def _one_process(spec: RunSpec, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same in one process of as many microbatches: in bf16, and in fp32 from its values."""
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.record import Recorder

    spec = dataclasses.replace(spec, layout=Layout(microbatches=count))
    one = _steps(spec, Mesh.single("cpu", Recorder(0)), None)
    exact = dataclasses.replace(
        spec,
        workload=dataclasses.replace(spec.workload, dtype="fp32"),
        options=dataclasses.replace(spec.options, grad_dtype="fp32"),
    )
    return one, _steps(exact, Mesh.single("cpu", Recorder(0)), None, rounded=True)


def _steps(spec: RunSpec, mesh: Any, schedule: Any, *, rounded: bool = False) -> dict[str, Any]:
    """Three steps; gradients are those of the first. `rounded`: start from values in bf16."""
    import torch

    from hocket.training.build import build_model, build_optimizer
    from hocket.training.memory import MemoryCount
    from hocket.training.reference import global_batch, rank_microbatches

    *_, parallel = build_model(spec, mesh, schedule, labels_shifted=False)
    if rounded:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.copy_(parameter.bfloat16())
    optimizer = build_optimizer(parallel, spec.options)
    optimizer.state_tensors()
    memory = MemoryCount(parallel.tensors(), optimizer.tensors, mesh.device)
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for step in range(STEPS):
        parts = rank_microbatches(spec, global_batch(spec, step), mesh.coordinate["dp"])
        with memory.counting():
            losses.append(float(parallel.forward_backward(parts)))
            parallel.clip_grad_norm(0.0)
            if step == 0:
                gradients = {n: g.clone() for n, g in parallel.gradients().items()}
            optimizer.step(1e-3)
        parallel.begin_unshard()
    parallel.unshard()
    masters = dict(optimizer.masters)
    return {
        "losses": losses,
        "gradients": gradients,
        "placements": parallel.placements,
        "counted": memory.memory.to_json(),
        "rounded": all(
            torch.equal(p.detach().reshape(-1), masters[n].reshape(-1).to(p.dtype))
            for n, p in parallel.named_stepped()
            if n in masters
        )
        and len(masters) == (0 if spec.workload.dtype == "fp32" else len(optimizer.parameters)),
    }
