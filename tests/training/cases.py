"""What single ranks do in tests of this room."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.launch import RankContext
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload


def compiled(context: RankContext, config: dict[str, Any], dropout: float) -> list[list[float]]:
    """Loss and norm of a step, plain and with compiled blocks (traced, without a compiler)."""
    import torch

    from hocket.runtime.mesh import Mesh
    from hocket.training.build import build_model, compile_blocks

    layout = Layout(tp=context.world_size, microbatches=2)
    spec = RunSpec(
        model="tiny",
        config=config,
        layout=layout,
        workload=Workload(seq_len=8, global_batch=4),
        options=TrainOptions(dropout=dropout),
    )
    mesh = Mesh(layout, context.rank)
    ids = torch.randint(0, 64, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    batch = [
        {
            "input_ids": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": torch.arange(8).expand(2, 8),
        }
        for rows in ids
    ]
    found = []
    for compile_them in (False, True):
        _, _, plan, parallel = build_model(dataclasses.replace(spec), mesh, None)
        if compile_them:
            for stage in parallel.stages:
                compile_blocks(stage.module, plan, backend="aot_eager")
        loss = parallel.forward_backward(batch, 32)
        found.append([float(loss), float(parallel.clip_grad_norm(0.0))])
    return found
