"""Training steps on fake CUDA tensors, with the order of their streams checked.

`python -m tests.rehearsal.stream_cases JOBS`: JSON jobs in, a JSON list of results out. A process
of its own, because the fake device is loaded before torch.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hocket.rehearsal import device

STEPS = 3


def main() -> None:
    """Run the jobs of the command line."""
    device.load_fake_device()
    print(json.dumps([run(**job) for job in json.loads(sys.argv[1])]))


def run(
    layout: str,
    model: str = "tiny-llama",
    seq_len: int = 64,
    packed: bool = False,
    counted: bool = False,
    broken: str | None = None,
    rank: int = -1,
    **options: Any,
) -> dict[str, Any]:
    """Some steps of the last rank, with the loop's own inputs, readings and optimizer.

    Args:
        packed: rows hold several documents. counted: the step counts its labels itself.
        broken: a wait to leave out.
    """
    from hocket.catalogue import models as catalogue
    from hocket.models.rows import one_sequence_each, packed_rows
    from hocket.rehearsal.execution import Actions, allocate, executing
    from hocket.rehearsal.streams import StreamOrder
    from hocket.rehearsal.training import Rehearsal
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.parallelize import parallelize
    from hocket.schedules.registry import build_schedule
    from hocket.spec.layout import Layout
    from hocket.spec.rehearsal import RehearsedDevice
    from hocket.spec.run import RunSpec, TrainOptions, Workload
    from hocket.training.build import build_optimizer, keep_gradients, offloaded_to_host
    from hocket.training.reading import LossReading, Readings

    placed = Layout.parse(layout)
    placed = dataclasses.replace(placed, microbatches=placed.microbatches or 1)
    config = dict(catalogue.config(model))
    config["num_hidden_layers" if "num_hidden_layers" in config else "n_layer"] = 4
    spec = RunSpec(
        model=model,
        config=config,
        layout=placed,
        workload=Workload(
            seq_len=seq_len, global_batch=2 * placed.dp * placed.microbatches, dtype="bf16"
        ),
        options=TrainOptions(**{"dropout": 0.0, "device": "cuda", **options}),
    )
    schedule = build_schedule(placed, placed.microbatches) if placed.num_stages > 1 else None
    gpu = RehearsedDevice(
        name="NVIDIA H100", capability=(9, 0), memory=80 << 30, sms=132, l2=50 << 20
    )
    job = Rehearsal(spec, schedule, gpu)
    rank = range(placed.world_size)[rank]
    with executing(gpu, rank, placed.world_size) as execution:
        import torch

        order = StreamOrder(execution.launches.wait)
        execution.world.enqueued = order.collective
        cuda = torch.device("cuda", rank % 8)
        recorder = Actions(rank, cuda)
        mesh = Mesh(placed, rank, cuda, recorder)
        parallel = parallelize(
            copy.deepcopy(job.skeleton), placed, job.plan, mesh=mesh, schedule=schedule,
            labels_shifted=True, context_parallel=spec.options.context_parallel,
        )  # fmt: skip
        rows = packed_rows() if packed else one_sequence_each()
        with execution.fake(), order.installed(), rows, without(broken):
            for stage in parallel.stages:
                allocate(stage.module, cuda)
            keep_gradients(parallel, spec.options)
            parallel.finish()
            if placed.offloads("activations"):
                offloaded_to_host(parallel)
            parallel.train()
            optimizer = build_optimizer(parallel, spec.options)
            optimizer.state_tensors()
            inputs = inputs_of(spec, mesh.coordinate["dp"], cuda, packed)
            readings = []
            tokens = None if counted else spec.workload.global_batch * seq_len
            for index in range(STEPS):
                if index == 1:
                    execution.begin(recorder)
                loss = parallel.forward_backward(inputs.step(index), tokens)
                norm = parallel.clip_grad_norm(spec.options.max_grad_norm)
                reading = LossReading(index + 1, 1e-3, loss, norm, 1)
                optimizer.step(1e-3, reading.skip())
                parallel.begin_unshard()
                inputs.prefetch(index + 1)
                readings.append(reading)
            execution.end()
            Readings(readings)
        reads = {
            f"{what} at {place}": count
            for (what, place), count in execution.launches.host_reads.items()
        }
        order.close()
    return {"conflicts": order.conflicts, "reads": reads, "steps": STEPS - 1}


def inputs_of(spec: Any, data_rank: int, cuda: Any, packed: bool) -> Any:
    """The loop's own inputs, from a file of zeros."""
    import numpy as np
    from torch.utils._python_dispatch import _disable_current_modes

    from hocket.training.dataset import Batch, BatchOrder, TokenDataset
    from hocket.training.inputs import Inputs

    layout, workload = spec.layout, spec.workload
    path = Path(tempfile.mkdtemp()) / "tokens.bin"
    count = workload.seq_len * workload.global_batch * (STEPS + 2) + 1
    np.zeros(count, np.uint16).tofile(path)

    class Documents(TokenDataset):
        def batch(self, indices: Any) -> Batch:
            found = super().batch(indices)
            half = np.arange(self.seq_len) % (self.seq_len // 2)
            return Batch(found.ids, found.labels, np.tile(half, (len(found.ids), 1)))

    class RealDocuments(Inputs):
        def _documents(self, batch: Batch) -> Any:
            with _disable_current_modes():  # their number is read on the host, from the data
                return super()._documents(batch)

    kind = Documents if packed else TokenDataset
    order = BatchOrder(workload.global_batch, layout.dp, layout.microbatches)
    return RealDocuments(kind(path, "uint16", workload.seq_len, 0), order, data_rank, cuda)


def without(wait: str | None) -> Any:
    """Within, one kind of wait is left out."""
    from contextlib import nullcontext
    from unittest.mock import patch

    from hocket.rehearsal import process_group, streams
    from hocket.runtime import copy_stream

    if wait is None:
        return nullcontext()
    if wait == "of collectives":
        return patch.object(process_group.RehearsedWork, "wait", lambda self, timeout=None: True)
    if wait == "for copies":
        return patch.object(copy_stream.Copied, "wait", lambda self: None)
    if wait == "of copies":
        return patch.object(streams._Stream, "wait_stream", lambda self, other: None)
    if wait == "for events":
        return patch.object(streams._Stream, "wait_event", lambda self, event: None)
    assert wait == "of the host", wait
    return patch.object(streams._Event, "synchronize", lambda self: None)


if __name__ == "__main__":
    main()
