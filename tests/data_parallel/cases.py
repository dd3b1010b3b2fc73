"""What each rank runs in the data-parallel tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hocket.runtime.data_parallel import Buckets
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline import Executor, Stage, cut
from hocket.runtime.record import Recorder
from hocket.schedules import build
from hocket.spec.layout import Layout
from tests.runtime_pipeline.models import HIDDEN, batch, loss_fn, plain, reference, slices


def difference(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine - other).abs().max() / other.abs().max().clamp_min(1e-12))


def equality(
    context: Any,
    layout: str,
    microbatches: int,
    bucket_bytes: float,
    steps: int = 2,
    record: bool = False,
) -> dict[str, Any]:
    """Data ranks, alone or with a pipeline, against one process over the global batch."""
    torch.manual_seed(0)
    parsed = Layout.parse(layout)
    module, plan = plain(4)
    module.register_parameter("unused", nn.Parameter(torch.ones(5)))
    whole = batch(12, plan.input_argument)
    expected, gradients = reference(module, whole)
    tokens = int((whole["labels"] != -100).sum())
    mesh = Mesh(parsed, context.rank, recorder=Recorder(context.rank))
    dp, pp = mesh.axis("dp"), mesh.axis("pp")
    board = build(parsed, microbatches)
    bounds = [4 // parsed.num_stages] * parsed.num_stages
    stages = [
        Stage(
            cut(module, plan, bounds, s), s, len(bounds), plan=plan, loss_fn=loss_fn,
            hidden_size=HIDDEN,
        )
        for s in board.stages_of(pp.index)
    ]  # fmt: skip
    buckets = {
        stage.index: Buckets(
            stage.module.named_parameters(), dp, mesh.recorder, bucket_mb=bucket_bytes / 1e6,
            first_mb=bucket_bytes / 1e6,
        )
        for stage in stages
    }  # fmt: skip
    executor = Executor(stages, board, pp, mesh.recorder, reducers=buckets)
    mine = slices({k: v.chunk(dp.size)[dp.index] for k, v in whole.items()}, microbatches)
    mesh.recorder.recording = record
    worst, losses, unused = 0.0, [], []
    for _ in range(steps):
        mesh.recorder.clear()
        mesh.recorder.phase = "microbatch"
        for bucket in buckets.values():
            bucket.zero_grad()
        loss = executor.step(mine, tokens)
        for bucket in buckets.values():
            bucket.wait()
        losses.append(float(loss))
        for stage in stages:
            for name, p in stage.module.named_parameters():
                if name == "unused":
                    unused.append(float(p.grad.abs().sum()))
                else:
                    worst = max(worst, difference(p.grad, gradients[name]))
    return {
        "gradients": worst,
        "losses": losses,
        "expected": expected,
        "unused": unused,
        "bytes": [b.nbytes for b in buckets.values()],
        "collectives": [c for c in mesh.recorder.collectives() if c["axis"] == "dp"],
        "events": [[e.kind, e.name, e.start, e.end] for e in mesh.recorder.timeline_events()],
    }


def batch_of_cases(context: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [equality(context, **case) for case in cases]


def half_precision(context: Any) -> dict[str, Any]:
    """bf16 parameters with fp32 gradients, and with their own."""
    results = {}
    for wide in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8).to(torch.bfloat16)
        if wide:
            for p in layer.parameters():
                p.grad_dtype = torch.float32
        mesh = Mesh(Layout(dp=2), context.rank)
        buckets = Buckets(layer.named_parameters(), mesh.axis("dp"), mesh.recorder)
        buckets.zero_grad()
        buckets.last_backward()
        x = torch.full((2, 8), float(context.rank + 1), dtype=torch.bfloat16)
        layer(x).sum().backward()
        buckets.wait()
        results[str(layer.weight.grad.dtype)] = [
            float(layer.weight.grad.min()),
            float(layer.weight.grad.max()),
            buckets.nbytes,
        ]
    return results


def reads(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What a program meets that reads ZeRO-3's parameters between steps, and inside of one."""
    import copy

    from hocket.spec.errors import ModelError
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training.build import build_model, build_optimizer

    layout = Layout.parse("dp2:zero=3")
    mesh = Mesh(layout, context.rank)
    spec = RunSpec(
        model="tiny", config=config, layout=layout, workload=Workload(seq_len=8, global_batch=4),
        options=TrainOptions(dropout=0.0, device="cpu"),
    )  # fmt: skip
    *_, parallel = build_model(spec, mesh, None)
    optimizer = build_optimizer(parallel, spec.options)
    module = parallel.stages[0].module
    weight, other = module.model.layers[0].mlp.up_proj.weight, module.model.layers[3].mlp.up_proj
    ids = torch.arange(16).view(2, 8)
    batch = [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(8).expand(2, 8)}]

    def step() -> float:
        loss = float(parallel.forward_backward(batch))
        optimizer.step(1e-2)
        return loss

    def message(call: Any) -> str:
        try:
            call()
        except ModelError as error:
            return error.message
        return "no error"

    losses = [step()]
    raised = {
        "state_dict": message(module.state_dict),
        "sum": message(lambda: weight.sum()),
        "data": message(lambda: weight.data),
        "transpose": message(lambda: weight.T),
        "numpy": message(lambda: weight.numpy(force=True)),
        "write": message(lambda: torch.nn.init.zeros_(weight)),
        "list": message(lambda: torch.stack([torch.zeros(weight.shape), weight])),
        "copy": message(lambda: copy.deepcopy(module)),
    }
    handle = module.model.layers[0].register_forward_hook(lambda *_: other.weight.norm())
    raised["hook"] = message(step)
    handle.remove()
    asked = [list(weight.shape), weight.numel(), str(weight.dtype), weight.requires_grad]
    printed = repr(weight)
    losses.append(step())
    # What is read while it is whole stays readable, and is freed when its reader lets it go.
    parallel.arrive()
    inside = float(weight.sum())
    kept = module.state_dict()
    kept["array"] = weight.detach().numpy()
    parallel.release()
    after = float(kept["model.layers.0.mlp.up_proj.weight"].sum()), float(kept["array"].sum())
    held = weight.untyped_storage().nbytes()
    losses.append(step())
    return {
        "raised": raised, "asked": asked, "printed": printed, "losses": losses,
        "inside": inside, "after": after, "held": held,
    }  # fmt: skip
