"""What ranks do to show recomputing: the same two steps with and without it, counted."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hocket.launch import RankContext
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload

if TYPE_CHECKING:
    from hocket.runtime.parallel import Parallel

S, ROWS = 64, 2


def counted_activations(parallel: Parallel) -> list[None]:
    """A list that grows by one with each call of an activation function of the model."""
    calls: list[None] = []
    for stage in parallel.stages:
        for module in stage.module.modules():
            if type(module).__module__.endswith(".activations"):
                module.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def modes(
    context: RankContext,
    config: dict[str, Any],
    layout: str,
    modes: list[dict[str, Any]],
    dropout: float = 0.0,
    attention: str = "sdpa",
    dtype: str = "fp32",
    predicts: bool = True,
) -> list[dict[str, Any]]:
    """For each mode: losses of two steps, the gradients of the second (crc by name), the counted
    bytes of the first, how often it called activation functions, and with `predicts` the bytes
    that were predicted of this rank."""
    import zlib

    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.training.build import build_model, build_optimizer, offloaded_to_host
    from hocket.training.memory import MemoryCount
    from hocket.training.memory_forecast import forecast_memory

    plain = Layout.parse(layout)
    mesh = Mesh(plain, context.rank)
    count = plain.microbatches or 1
    generator = torch.Generator().manual_seed(mesh.axis("dp").index)
    ids = torch.randint(0, 64, (2, count, ROWS, S + 1), generator=generator)
    steps = [
        [
            {
                "input_ids": rows[:, :-1].contiguous(),
                "labels": rows[:, 1:].contiguous(),
                "position_ids": torch.arange(S).expand(ROWS, S).contiguous(),
            }
            for rows in step
        ]
        for step in ids
    ]
    found = []
    for mode in modes:
        split = dataclasses.replace(plain, **{k: v for k, v in mode.items() if k != "moved"})
        spec = RunSpec(
            model="tiny",
            config=config,
            layout=split,
            workload=Workload(seq_len=S, global_batch=ROWS * count * plain.dp, dtype=dtype),
            options=TrainOptions(dropout=dropout, attention=attention, device="cpu"),
        )
        schedule = build_schedule(split, count) if split.num_stages > 1 else None
        _, _, _, parallel = build_model(spec, mesh, schedule)
        # On CPU it is refused: here every saved tensor goes to another place all the same.
        moved = offloaded_to_host(parallel, least=1, host=True) if "moved" in mode else []
        calls = counted_activations(parallel)
        optimizer = build_optimizer(parallel, spec.options)
        optimizer.state_tensors()
        memory = MemoryCount(parallel.tensors(), optimizer.tensors, mesh.device)
        losses = []
        for number, step in enumerate(steps):
            with memory.counting():
                losses.append(
                    float(parallel.forward_backward(step, spec.workload.global_batch * S))
                )
                parallel.clip_grad_norm(0.0)
                optimizer.step(1e-3)
            if number == 0:
                counted, called = memory.memory.to_json(), len(calls)
            parallel.begin_unshard()
        gradients = parallel.gradients()
        found.append(
            {
                "losses": losses,
                "gradients": {
                    name: zlib.crc32(g.contiguous().float().numpy().tobytes())
                    for name, g in gradients.items()
                },
                "bytes": counted,
                "moved": sum(each.bytes for each in moved),
                "calls": called,
                "predicted": forecast_memory(spec, schedule)[context.rank].to_json()
                if predicts
                else None,
            }
        )
    return found
