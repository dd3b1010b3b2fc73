"""Run folders as a job leaves them, made without ranks: simulated timelines stand for both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hocket.schedules import build_schedule
from hocket.simulation import simulate
from hocket.spec.files import write_text
from hocket.spec.forecast import Alternative, Forecast
from hocket.spec.layout import Layout
from hocket.spec.measured import DevicePair, Host, MachineMeasurements, MeasuredDevice
from hocket.spec.prices import Prices
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload
from hocket.spec.timeline import Event, Timeline

MB = 1_000_000


def gpus(name: str = "A made GPU") -> MachineMeasurements:
    """A machine of four GPUs bridged two by two: NVLink inside a pair, measured; PCIe beyond."""
    inside = ((0, 1), (2, 3))
    return MachineMeasurements(
        device="cuda",
        date="2026-11-20T12:00:00Z",
        torch="2.13.0",
        hocket="0.1.0",
        host=Host(name="a machine", cpu="A CPU", cores=16, memory=2**36),
        devices=tuple(MeasuredDevice(index=i, name=name, memory=24 * 10**9) for i in range(4)),
        pairs=tuple(
            DevicePair(
                first=i, second=j, path="NV4", links=4, rate=50e9, latency=8e-6, measured=True
            )
            if (i, j) in inside
            else DevicePair(first=i, second=j, path="SYS", rate=31.5e9)
            for i in range(4)
            for j in range(i + 1, 4)
        ),
    )


def measured(layout: Layout, microbatches: int, slower: float = 1.0) -> Timeline:
    """A timeline of all ranks, with messages, tensor collectives inside compute, an optimizer."""
    schedule = build_schedule(layout, microbatches)
    stages = schedule.num_stages
    base = Prices.uniform(stages, forward=0.010 * slower, backward=0.020 * slower)
    seconds = {**base.seconds, "SEND_F": (0.001,) * stages, "SEND_B": (0.001,) * stages}
    lines = simulate(schedule, dataclasses.replace(base, seconds=seconds))
    events = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)["pp"]
        mine = [dataclasses.replace(e, rank=rank) for e in lines.events if e.rank == at]
        events += mine
        if layout.tp > 1:
            for e in (e for e in mine if e.kind in ("F", "B")):
                middle = (e.start + e.end) / 2
                events.append(
                    Event(
                        rank=rank, lane="communication", kind="all-reduce", name="all-reduce tp",
                        start=middle, end=middle + 0.002, axis="tp", bytes=131072,
                    )
                )  # fmt: skip
        end = lines.duration
        events.append(
            Event(
                rank=rank, lane="compute", kind="optimizer", name="optimizer", start=end,
                end=end + 0.003,
            )
        )  # fmt: skip
    return Timeline.of("measured", layout.world_size, events, [9 * MB] * layout.world_size)


def make(
    path: Path,
    *,
    layout: str = "dp2.pp2.tp2:microbatches=4",
    model: str = "tiny-llama",
    data: str = "corpus.txt",
    steps: int = 20,
    done: int | None = None,
    predicted: bool = True,
    reason: str = "",
    metrics: dict[str, Any] | None = None,
    machine: MachineMeasurements | None = None,
) -> Path:
    """Write a run folder; `done` steps of `steps` are in its metrics. Returns `path`."""
    placed = Layout.parse(layout)
    folder = RunFolder(path)
    spec = RunSpec(
        model=model,
        config={"model_type": "llama", "num_hidden_layers": 4},
        layout=placed,
        workload=Workload(seq_len=128, global_batch=16),
        options=TrainOptions(steps=steps, device="cpu"),
        data=(data,),
    )
    folder.create(spec)
    write_text(folder.schedule_file, str(build_schedule(placed, placed.microbatches or 1)))
    rows = []
    for step in range(1, (steps if done is None else done) + 1):
        row = {
            "step": step, "steps": steps, "loss": 2 + 6 / step, "lr": 1e-3, "grad_norm": 1.0,
            "step_seconds": 0.2, "tokens_per_second": 10240.0, **(metrics or {}),
        }  # fmt: skip
        if step == steps:
            row["held_out_loss"] = 2.5
        rows.append(json.dumps(row) + "\n")
    write_text(folder.metrics_file, "".join(rows))
    timeline = measured(placed, placed.microbatches or 1)
    write_text(folder.timeline_file, timeline.to_json())
    kinds = {"parameters": 2 * MB, "gradients": 2 * MB, "optimizer": 4 * MB, "activations": 1 * MB}
    if machine is not None:
        write_text(folder.topology_file, machine.to_json())
    memory = [{**kinds, "total": 9 * MB}] * placed.world_size
    write_text(folder.memory_file, json.dumps(memory))
    total = [
        {"name": "all-reduce", "axis": "tp", "phase": "microbatch", "count": 64, "bytes": 8 * MB},
        {"name": "send", "axis": "pp", "phase": "microbatch", "count": 16, "bytes": 2 * MB},
        {"name": "receive", "axis": "pp", "phase": "microbatch", "count": 16, "bytes": 2 * MB},
    ]
    write_text(folder.communication_file, json.dumps({"step": 7, "ranks": [], "total": total}))
    if predicted:
        then = dataclasses.replace(
            measured(placed, placed.microbatches or 1, 0.9), source="predicted"
        )
        write_text(path / "timeline.predicted.json", then.to_json())
        forecast = Forecast(
            layout=layout,
            step_seconds=0.18,
            tokens_per_second=11377.0,
            bubble=then.bubble,
            memory=tuple(memory),
            capacity=20 * MB,
            exposed={"tp": 0.01, "pp": 0.002},
            links={"tp": "shared memory", "pp": "shared memory"},
            cluster="a laptop",
            measured="2026-11-20, quick",
            alternatives=(
                Alternative(layout=layout, step_seconds=0.18, memory=9 * MB, chosen=True),
                Alternative(layout="dp8", step_seconds=0.2, memory=30 * MB, fits=False,
                            reason=reason),
            ),
        )  # fmt: skip
        write_text(folder.forecast_file, forecast.to_json())
    return path
