"""The rank side of `hocket compare`: one way of splitting, proven equal, counted and timed.

    build -> the steps of the check, compared with one process
          -> one step counted (memory), one recorded (timeline, collectives), several timed
          -> several timed with an input pipeline that keeps Python busy

The input pipeline prepares the next batch in a thread while a step computes, as a training loop
does. Its work is pure Python, so replicas that are threads of one process wait for it and for
each other at the interpreter's lock; replicas that are processes do not.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.runtime.collectives import barrier
from hocket.spec.run import RunSpec
from hocket.spec.schedule import Schedule
from hocket.spec.units import parse_bytes
from hocket.training import timeline
from hocket.training.build import RankJob, build_rank_job
from hocket.training.check import compare_layout
from hocket.training.memory import MemoryCount, of_replicas
from hocket.training.reference import global_batch, num_tokens, rank_microbatches

if TYPE_CHECKING:
    from hocket.launch import RankContext

LONG = 900.0
"""Seconds of silence allowed while a model is built and checked."""

_KEPT = 4
"""Batches that are made once and gone through again: making them is no part of the timing."""


def main(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Run one way; rank 0 emits `{"event": "way", ...}`.

    Args:
        context: of the way's world.
        payload: `spec` (a RunSpec's JSON), `schedule` (its text), `steps` to time, `loops` of
            Python for each sequence of the loaded measurement (0: none), and `reference`, the
            folder of `training.check.run_reference` (absent: equality is not checked), with
            `checked`, the steps it holds.
    """
    spec = RunSpec.from_json(payload["spec"])
    context.expect(max(LONG, spec.options.timeout))
    job = build_rank_job(spec, context, Schedule.parse(payload["schedule"]), labels_shifted=False)
    report = None
    if "reference" in payload:
        report = compare_layout(
            spec, job.parallel, job.optimizer, Path(payload["reference"]), int(payload["checked"])
        )
    way = _Way(job, context)
    found = way.seen_whole()
    found |= way.timed(int(payload["steps"]))
    if payload.get("loops"):
        loaded = way.timed(int(payload["steps"]), loops=int(payload["loops"]))
        found["loaded_seconds"] = loaded["step_seconds"]
    rows = timeline.gather_values(context, "way", found)
    if rows is None:
        return
    context.emit(
        {
            "event": "way",
            "report": None if report is None else json.loads(report.to_json()),
            "ranks": rows,
        }
    )


def spend(loops: int) -> int:
    """Keep Python busy, as parsing and tokenizing in Python would; returns a checksum."""
    total = 0
    for number in range(loops):
        total = (total * 31 + number) & 0xFFFFFFFF
    return total


class _Feed:
    """The batches of one data rank, prepared one step ahead in a thread."""

    def __init__(self, spec: RunSpec, data_rank: int, device: Any, loops: int) -> None:
        self._kept = [
            [
                {key: value.to(device) for key, value in part.items()}
                for part in rank_microbatches(spec, global_batch(spec, step), data_rank)
            ]
            for step in range(1, _KEPT + 1)
        ]
        self._loops = loops
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="input")
        self._next: Future[Any] = self._thread.submit(self._prepare, 0)
        self._step = 0

    def _prepare(self, step: int) -> Any:
        parts = self._kept[step % _KEPT]
        for part in parts:
            for _ in range(len(part["input_ids"])):
                spend(self._loops)
        return parts

    def next(self) -> Any:
        """The microbatches of the next step; the one after it is begun."""
        parts = self._next.result()
        self._step += 1
        self._next = self._thread.submit(self._prepare, self._step)
        return parts

    def close(self) -> None:
        self._next.result()
        self._thread.shutdown()


class _Way:
    """One rank of a way."""

    def __init__(self, job: RankJob, context: RankContext) -> None:
        self.job = job
        self.context = context
        self.spec = job.spec
        self.threads = job.spec.layout.data_parallel == "threads"
        self.data_rank = 0 if self.threads else job.mesh.coordinate["dp"]
        self.tokens = [num_tokens(global_batch(job.spec, step)) for step in range(1, _KEPT + 1)]

    def seen_whole(self) -> dict[str, Any]:
        """One step whose memory is counted, and one that is recorded."""
        job, mesh = self.job, self.job.mesh
        limit = self.spec.options.memory_per_rank
        count = MemoryCount(
            job.parallel.tensors(),
            job.optimizer.tensors,
            mesh.device,
            compiled=self.spec.options.compile,
            limit=None if limit is None else parse_bytes(limit),
        )
        feed = _Feed(self.spec, self.data_rank, mesh.device, 0)
        job.optimizer.state_tensors()  # so that its state counts as such
        job.parallel.zero_grad()  # as every step begins: gradients are not there beforehand
        with count.counting():
            self._step(feed.next(), 0)
        with timeline.recorded(mesh, self.context.one_machine):
            self._step(feed.next(), 1)
        feed.close()
        if job.parallel.replicas is not None:
            rows = of_replicas(job.parallel.replicas.replica_bytes(), count.memory.optimizer)
            count.require(max(row.total for row in rows))
        else:
            rows = [count.memory]
        return {
            "memory": [row.to_json() for row in rows],
            "events": [dataclasses.asdict(event) for event in mesh.recorder.timeline_events()],
            "collectives": mesh.recorder.collectives(),
            "layers": self._layers(),
        }

    def _layers(self) -> int:
        """How many of the model's layers this rank holds parameters of."""
        stages = self.job.plan.stages
        if stages is None:
            return 0
        prefix = f"{stages.layers}."
        names = (name for name in self.job.parallel.placements if name.startswith(prefix))
        return len({name.removeprefix(prefix).split(".")[0] for name in names})

    def timed(self, steps: int, *, loops: int = 0) -> dict[str, Any]:
        """Median seconds of a step, and this process's processor seconds."""
        mesh = self.job.mesh
        feed = _Feed(self.spec, self.data_rank, mesh.device, loops)
        self._step(feed.next(), 0)  # fills the feed and warms up
        seconds = []
        self._wait()
        busy = time.process_time()
        for index in range(1, steps + 1):
            began = time.perf_counter()
            self._step(feed.next(), index)
            seconds.append(time.perf_counter() - began)
        busy = time.process_time() - busy
        feed.close()
        return {"step_seconds": statistics.median(seconds), "processor_seconds": busy / steps}

    def _step(self, parts: Any, index: int) -> None:
        job, options = self.job, self.spec.options
        job.parallel.forward_backward(parts, self.tokens[index % _KEPT])
        job.parallel.clip_grad_norm(options.max_grad_norm)
        with job.parallel.recorder.span("compute", "optimizer", "optimizer"):
            job.optimizer.step(options.lr)
        job.parallel.begin_unshard()
        self._wait(sync_only=True)

    def _wait(self, *, sync_only: bool = False) -> None:
        if self.job.mesh.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        if not sync_only:
            barrier(self.job.mesh.axis("world"), self.job.mesh.recorder)
