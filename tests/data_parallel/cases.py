"""What each rank runs in the data-parallel tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hocket.runtime.data_parallel import Buckets
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline import Executor, Stage, cut
from hocket.runtime.record import Recorder
from hocket.schedules import build_schedule
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
    board = build_schedule(parsed, microbatches)
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
            stage.module.named_parameters(), dp, mesh.recorder, bucket_mb=bucket_bytes / 1e6
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
    parallel.unshard()
    inside = float(weight.sum())
    kept = module.state_dict()
    kept["array"] = weight.detach().numpy()
    parallel.reshard()
    after = float(kept["model.layers.0.mlp.up_proj.weight"].sum()), float(kept["array"].sum())
    held = weight.untyped_storage().nbytes()
    losses.append(step())
    return {
        "raised": raised, "asked": asked, "printed": printed, "losses": losses,
        "inside": inside, "after": after, "held": held,
    }  # fmt: skip


def built(
    context: Any, config: dict[str, Any], layout: str, directory: str | None
) -> dict[str, Any]:
    """What building this rank holds at its worst and reads, under a layout with ZeRO-3 and under
    the same one without; and whether both give the same values.

    Args:
        directory: weights are written there by rank 0 and read from there. None: from a seed.
    """
    import dataclasses
    from pathlib import Path

    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import resolve_model
    from hocket.models.weight_files import WeightFiles
    from hocket.runtime.collectives import barrier
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.layout import Layout
    from hocket.spec.plan import block_of
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training.build import build_model
    from hocket.training.memory import LiveBytes, storage_bytes

    sharded = Layout.parse(layout)
    mesh = Mesh(sharded, context.rank)
    # Found beforehand: that holds a tiny proxy model, whose size is not the model's.
    plan = plan_for(build_skeleton(config, attention="sdpa"))
    weights = None
    if directory is not None:
        if context.rank == 0:
            _save_random(config, Path(directory))
        barrier(mesh.axis("world"), mesh.recorder)
        weights, config = directory, resolve_model(directory).config

    class Real(LiveBytes):
        """Without what is on the meta device, which has no memory."""

        def _watch(self, tensor: torch.Tensor, counted: bool = True) -> None:
            if tensor.device.type != "meta":
                super()._watch(tensor, counted)

    closed: list[int] = []
    plain_close = WeightFiles.close

    def close(self: WeightFiles) -> None:
        closed.append(self.bytes_read)
        plain_close(self)

    def made(split: Layout) -> tuple[Any, int, int]:
        spec = RunSpec(
            model="tiny" if weights is None else weights,
            config=config,
            weights=weights,
            layout=split,
            workload=Workload(seq_len=16, global_batch=4, dtype="fp32"),
            options=TrainOptions(seed=5),
        )
        schedule = None
        if split.num_stages > 1:
            schedule = build_schedule(split, split.microbatches or 1)
        closed.clear()
        live = Real()
        with live:
            own = mesh if split.zero else Mesh(split, context.rank)  # its norm has other ranks
            *_, parallel = build_model(spec, own, schedule, plan)
        live.close()
        return parallel, live.peak, sum(closed)

    WeightFiles.close = close  # type: ignore[method-assign]
    try:
        whole, _, read_whole = made(dataclasses.replace(sharded, zero=0))
        parallel, peak, read = made(sharded)
    finally:
        WeightFiles.close = plain_close  # type: ignore[method-assign]
    shares = storage_bytes(parallel.tensors())
    blocks: dict[str, int] = {}
    wholes: dict[str, int] = {}
    for name, parameter in parallel.named_parameters():
        block = block_of(name, plan.stages)
        blocks[block] = blocks.get(block, 0) + parameter.nbytes
        numel = math.prod(parallel.placements[name].shape)
        wholes[block] = wholes.get(block, 0) + numel * parameter.element_size()
    parallel.unshard()
    expected = dict(whole.named_parameters())
    values = dict(parallel.named_parameters())
    equal = values.keys() == expected.keys() and all(
        torch.equal(p, expected[name]) for name, p in values.items()
    )
    parallel.reshard()
    return {
        "equal": equal,
        "read": read,
        "read_whole": read_whole,
        "shares": shares,
        "peak": peak,
        "stage": sum(blocks.values()),
        "block": max(blocks.values()),
        "whole_block": max(wholes.values()),
    }


def _save_random(config: dict[str, Any], to: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():  # norms are not at one
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(to)


def kept(context: Any, config: dict[str, Any], layout: str, folder: str) -> dict[str, Any]:
    """What saving, resuming and exporting hold beside the shares, and whether the values are those
    that were saved, bit for bit."""
    import dataclasses
    from pathlib import Path

    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.runtime.checkpoint import load_checkpoint, save_checkpoint
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.layout import Layout
    from hocket.spec.plan import block_of
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training.build import build_model, build_optimizer
    from hocket.training.export import ModelFiles, export_ranks
    from hocket.training.memory import LiveBytes

    sharded = Layout.parse(layout)
    mesh = Mesh(sharded, context.rank)
    plan = plan_for(build_skeleton(config, attention="sdpa"))
    schedule = None
    if sharded.num_stages > 1:
        schedule = build_schedule(sharded, sharded.microbatches or 1)

    class Real(LiveBytes):
        """Without what is on the meta device, which has no memory."""

        def _watch(self, tensor: torch.Tensor, counted: bool = True) -> None:
            if tensor.device.type != "meta":
                super()._watch(tensor, counted)

    def made(split: Layout, seed: int) -> tuple[Any, Any]:
        options = TrainOptions(seed=seed)
        spec = RunSpec(
            model="tiny", config=config, layout=split, options=options,
            workload=Workload(seq_len=16, global_batch=4, dtype="fp32"),
        )  # fmt: skip
        own = mesh if split.zero else Mesh(split, context.rank)  # its norm has other ranks
        *_, parallel = build_model(spec, own, schedule, plan)
        return parallel, build_optimizer(parallel, options)

    def peak_of(parallel: Any, optimizer: Any, call: Any) -> int:
        """The most bytes that `call` held beside what is there between steps."""
        with Real([*parallel.tensors(), *optimizer.tensors()]) as live:
            call()
        live.close()
        return live.peak

    whole, _ = made(dataclasses.replace(sharded, zero=0, offload=Layout().offload), 5)
    files = ModelFiles(config=config)
    export_ranks(whole, Path(folder, "plain"), files)
    parallel, optimizer = made(sharded, 5)
    generator = torch.Generator().manual_seed(context.rank)
    for tensor in optimizer.tensors():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    common = {"layout": layout, "model": "m"}
    checkpoints = Path(folder, "checkpoints")

    def save() -> None:
        state = optimizer.state_tensors()
        save_checkpoint(checkpoints, step=1, parallel=parallel, optimizer_state=state, **common)

    saving = peak_of(parallel, optimizer, save)
    exporting = peak_of(
        parallel, optimizer, lambda: export_ranks(parallel, Path(folder, "shared"), files)
    )
    other, moments = made(sharded, 6)

    def resume() -> None:
        state = moments.state_tensors()
        load_checkpoint(checkpoints, parallel=other, optimizer_state=state, **common)

    resuming = peak_of(other, moments, resume)
    other.unshard()
    values = dict(other.named_parameters())
    equal = [torch.equal(p, values[name]) for name, p in whole.named_parameters()]
    other.reshard()
    states = zip(optimizer.tensors(), moments.tensors(), strict=True)
    blocks: dict[str, int] = {}
    for name, parameter in parallel.named_parameters():
        block = block_of(name, plan.stages)
        blocks[block] = blocks.get(block, 0) + parameter.nbytes
    exported = [
        Path(folder, each, "model.safetensors").read_bytes() for each in ("plain", "shared")
    ]
    return {
        "values": all(equal),
        "moments": all(torch.equal(one, two) for one, two in states),
        "exports": exported[0] == exported[1],
        "saving": saving,
        "exporting": exporting,
        "resuming": resuming,
        "block": max(blocks.values()),
        "stage": sum(blocks.values()),
    }
