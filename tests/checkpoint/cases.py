"""What ranks run: a few training steps, saved, resumed and exported."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from hocket.spec.checkpoint import config_hash
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from tests.families import EXPERTS, FAMILIES


def train(
    context: Any, family: str, layout: str, first: int, last: int, folder: str, to: str = ""
) -> dict[str, Any]:
    """Steps `first` .. `last` - 1, from the checkpoint in `folder` unless `first` is 0; saves at
    the end. Returns losses and norms, a checksum of every tensor, and where each one lies.
    """
    from hocket.runtime.checkpoint import load_checkpoint, save_checkpoint
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.training.build import build_model, build_optimizer
    from hocket.training.export import ModelFiles, export_ranks
    from hocket.training.reference import global_batch, rank_microbatches

    spec = RunSpec(
        model=family,
        config={**FAMILIES, **EXPERTS}[family],
        layout=Layout.parse(layout),
        workload=Workload(seq_len=16, global_batch=8),
        options=TrainOptions(seed=1, dropout=0.1 if family == "gpt2" else None),
    )
    schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
    mesh = Mesh(spec.layout, context.rank)
    *_, parallel = build_model(spec, mesh, schedule, labels_shifted=False)
    optimizer = build_optimizer(parallel, spec.options)
    common = {"parallel": parallel, "layout": str(spec.layout), "model": config_hash(spec.config)}
    if first:
        state = optimizer.state_tensors()
        restored = load_checkpoint(folder, optimizer_state=state, **common)
        assert restored.step == first
        assert restored.cursor == {"step": first}
        parallel.step = restored.step
    steps = []
    for step in range(first, last):
        parts = rank_microbatches(spec, global_batch(spec, step), mesh.coordinate["dp"])
        loss = parallel.forward_backward(parts)
        norm = parallel.clip_grad_norm(0.5)
        optimizer.step(1e-3 * (step + 1))
        steps.append([float(loss), float(norm)])
    save_checkpoint(
        folder,
        step=last,
        optimizer_state=optimizer.state_tensors(),
        cursor={"step": last},
        **common,
    )
    if to:
        export_ranks(parallel, Path(to), ModelFiles(config=spec.config))
    parallel.unshard()
    sums = {f"parameter {name}": _sum(p) for name, p in parallel.named_parameters()}
    for name, state in optimizer.state_tensors().items():
        sums |= {f"{key} {name}": _sum(tensor) for key, tensor in state.items()}
    where = {name: p.to_json() for name, p in parallel.placements.items()}
    return {"steps": steps, "sums": sums, "where": where}


def _sum(tensor: Any) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).numpy().tobytes())


def refused(context: Any, layout: str, folder: str) -> tuple[str, bool, bool, list[str]]:
    """A save in which rank 1's disk is full after the first tensor, and one after it: what the
    first raised, whether this rank is at fault, whether the second is there, what is left aside."""
    import errno
    import os

    from hocket.runtime import checkpoint, rank_state
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.errors import SaveError
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training.build import build_model, build_optimizer

    spec = RunSpec(
        model="llama",
        config=FAMILIES["llama"],
        layout=Layout.parse(layout),
        workload=Workload(seq_len=16, global_batch=8),
        options=TrainOptions(seed=1),
    )
    schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
    *_, parallel = build_model(spec, Mesh(spec.layout, context.rank), schedule)
    state = build_optimizer(parallel, spec.options).state_tensors()

    def save(step: int) -> Path:
        return checkpoint.save_checkpoint(
            folder, step=step, parallel=parallel, optimizer_state=state, layout=layout, model="m"
        )

    whole = rank_state.write_tensors

    def full(path: Path, entries: Any, buffers: Any) -> list[int]:
        next(buffers)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    rank_state.write_tensors = full if context.rank == 1 else whole  # type: ignore[assignment]
    try:
        save(1)
        raise AssertionError("the first save did not fail")
    except SaveError as error:
        message, mine = error.message, error.mine
    finally:
        rank_state.write_tensors = whole
    left = [path.name for path in Path(folder).iterdir()]
    return message, mine, save(2).is_dir(), left
