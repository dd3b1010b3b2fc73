"""Cases of the models' tests: those that run inside ranks, and the verdict on stages."""

from __future__ import annotations

from typing import Any

from hocket.spec.proxy_verdict import ProxyVerdict


def stages_verdict(config: dict[str, Any]) -> ProxyVerdict:
    """The proxy model's verdict on stages, in this process."""
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.trial import try_stages

    return ProxyVerdict(stages=try_stages(config_of(config, dropout=0.0), "sdpa"))


def tensors(
    context: Any, configs: dict[str, dict[str, Any]], slices: bool = False
) -> dict[str, tuple[str, str]]:
    """The proxy model's verdict on splitting tensors (with `slices`, sequences too), by model."""
    from hocket.models.skeleton import config_of
    from hocket.ranks.proxy.trial import try_tensors

    return {
        name: try_tensors(
            config_of(config, dropout=0.0),
            "sdpa",
            index=context.rank,
            degree=context.world_size,
            slices=slices,
        )
        for name, config in configs.items()
    }


def said(context: Any, texts: list[str]) -> list[str]:
    """What every rank hears when each says its own text."""
    import torch.distributed as dist

    from hocket.ranks.proxy.trial import said_by_all
    from hocket.runtime.mesh import Axis
    from hocket.runtime.record import Recorder

    size = context.world_size
    axis = Axis("tp", size, context.rank, tuple(range(size)), dist.group.WORLD)
    return said_by_all(texts[context.rank], axis, Recorder(context.rank))


def read_and_export(
    context: Any, directory: str, layouts: list[str], to: str
) -> list[dict[str, Any]]:
    """Per layout: bytes that this rank reads and holds, the growth of its process at its worst
    while it reads weights and while it exports, and whether the export's bytes
    are those of the directory."""
    import shutil
    from pathlib import Path

    from hocket.models.source import resolve_model
    from hocket.runtime.mesh import Mesh
    from hocket.schedules.registry import build_schedule
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training import build as room
    from hocket.training.export import ModelFiles, export_ranks

    source = resolve_model(directory)
    row: dict[str, Any] = {}
    plain = room.Weights

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **more: Any) -> None:
            before = _rchar()
            super().__init__(*args, **more)
            row["rchar"] += _rchar() - before

        def fill(self, names: Any = None) -> None:
            before, peak = _rchar(), Peak()
            super().fill(names)
            row["rchar"] += _rchar() - before
            row["reading"] = max(row["reading"], peak.growth())

        def close(self) -> int:
            read = super().close()
            row["read"] += read
            return read

    found = []
    room.Weights = Watched  # type: ignore[misc]
    try:
        for layout in [layouts[0], *layouts]:  # once more: the first imports the family's code
            row = {"rchar": 0, "reading": 0, "read": 0}
            spec = RunSpec(
                model=directory,
                config=source.config,
                weights=directory,
                layout=Layout.parse(layout),
                workload=Workload(seq_len=16, global_batch=4, dtype="bf16"),
                options=TrainOptions(bucket_mb=2.0),
            )
            mesh = Mesh(spec.layout, context.rank)
            schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
            *_, parallel = room.build_model(spec, mesh, schedule)
            row["held"] = sum(p.numel() * p.element_size() for p in parallel.parameters())
            peak = Peak()
            export_ranks(parallel, Path(to), ModelFiles(config=source.config))
            row["exporting"] = peak.growth()
            row["same"] = _sums(Path(to)) == _sums(Path(directory)) if context.rank == 0 else True
            del parallel
            found.append(row)
            if context.rank == 0:
                shutil.rmtree(to)
            mesh_barrier(mesh)
    finally:
        room.Weights = plain  # type: ignore[misc]
    return found[1:]


def mesh_barrier(mesh: Any) -> None:
    from hocket.runtime.collectives import barrier

    barrier(mesh.axis("world"), mesh.recorder)


class Peak:
    """The most resident memory of this process from now on, beyond what it has now."""

    def __init__(self) -> None:
        import gc
        from pathlib import Path

        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")

    def growth(self) -> int:
        return _status("VmHWM") - self._before


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


def _rchar() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def _sums(directory: Any) -> dict[str, int]:
    from hocket.spec.tensor_file import TensorFile

    files = [TensorFile(path) for path in directory.glob("*.safetensors")]
    return {name: file.crc32(name) for file in files for name in file.entries}
