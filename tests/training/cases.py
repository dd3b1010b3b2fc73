"""What single ranks do in tests of this room."""

from __future__ import annotations

import dataclasses
from typing import Any

from hocket.launch import RankContext
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload


def compiled(
    context: RankContext,
    config: dict[str, Any],
    dropout: float,
    slices: bool = False,
    functional: bool = False,
    axis: str = "tp",
) -> list[Any]:
    """Loss and norm of a step, plain and with compiled blocks (traced, without a compiler); with
    `functional` collectives, also those inside graphs, by name, and the number of graphs."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from hocket.runtime.mesh import Mesh
    from hocket.training.build import build_model, compile_blocks

    degree = {axis: context.world_size}
    layout = Layout(**degree, microbatches=2, sequence_parallel=slices)  # type: ignore[arg-type]
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
    inside: set[str] = set()
    graphs = 0

    def forward(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return note(graph, inputs)

    def note(graph: Any, inputs: Any) -> Any:
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        inside.update(name.split(".")[1] for name in names if name.startswith("_c10d_functional."))
        return make_boxed_func(graph.forward)

    backend: Any = (
        aot_autograd(fw_compiler=forward, bw_compiler=note) if functional else "aot_eager"
    )
    found: list[Any] = []
    for compile_them in (False, True):
        _, _, plan, parallel = build_model(dataclasses.replace(spec), mesh, None)
        if compile_them:
            for stage in parallel.stages:
                compile_blocks(stage.module, plan, backend=backend, functional=functional)
        loss = parallel.forward_backward(batch, 32)
        found.append([float(loss), float(parallel.clip_grad_norm(0.0))])
    return [*found, sorted(inside), graphs] if functional else found
