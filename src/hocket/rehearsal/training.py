"""One rank's training step, executed by hocket's own code on fake CUDA tensors.

    Rehearsal      what all ranks share: the model without memory, its plan, the schedule
    .rank(r)       mesh, parallelize, ZeRO, pipeline, clip, optimizer, reading: one step of rank r

What differs from `training.build` and `training.loop`: parameters get no values, no file is read,
and inputs are fake.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket.models.attention import choose_kernels_on_cuda
from hocket.models.masks import of_whole_sequences
from hocket.models.plan_cache import built_plan
from hocket.models.rows import Documents, note_documents, one_sequence_each, packed_rows
from hocket.models.skeleton import build_skeleton
from hocket.models.source import run_source
from hocket.rehearsal.device import NUM_DEVICES
from hocket.rehearsal.execution import Actions, Execution, allocate, executing
from hocket.rehearsal.memory import LiveMemory
from hocket.runtime.base_4bit import load_library, quantize_base
from hocket.runtime.data_parallel.buckets import on_gradient
from hocket.runtime.fp8 import multiply_in_fp8
from hocket.runtime.lora import adapt
from hocket.runtime.mesh import Mesh
from hocket.runtime.moments_8bit import MEAN, SQUARE, code_values
from hocket.runtime.parallelize import Parallel, parallelize
from hocket.spec.errors import HocketError
from hocket.spec.rehearsal import RankRehearsal, RehearsedDevice
from hocket.spec.run import RunSpec
from hocket.spec.schedule import Schedule
from hocket.training.build import (
    build_optimizer,
    compile_blocks,
    dtype_of,
    group_experts,
    keep_gradients,
    lora_of,
    offloaded_to_host,
    over_context_ranks,
)
from hocket.training.optimizer import Optimizer
from hocket.training.reading import LossReading

_DOCUMENTS = 16
"""Boundaries of documents in a microbatch, the smallest number that `rows.documents_in` gives."""


class Rehearsal:
    """A training job, to be executed rank by rank in this process.

    Args:
        spec: of the job; no data is read.
        schedule: as in the run folder; None: plain gradient accumulation.
        device: the GPU that ranks run on.

    Raises:
        HocketError: the model cannot be built.
    """

    def __init__(self, spec: RunSpec, schedule: Schedule | None, device: RehearsedDevice) -> None:
        self.spec, self.schedule, self.device = spec, schedule, device
        options, layout = spec.options, spec.layout
        source = run_source(spec)
        self.skeleton = build_skeleton(
            source.config,
            attention=options.attention,
            dtype=dtype_of(spec.workload.dtype),
            dropout=options.dropout,
            code=source.code,
        )
        self.plan = built_plan(self.skeleton, sequence=layout.sequence_parallel)
        self.lora = lora_of(self.skeleton, options)
        if layout.sequence_parallel:
            of_whole_sequences()
        choose_kernels_on_cuda(self.skeleton, asked=options.attention)
        group_experts()
        if layout.cp > 1:
            over_context_ranks(self.skeleton, self.plan)

    @classmethod
    def of_json(cls, payload: dict[str, Any]) -> Rehearsal:
        """The rehearsal that a task describes: `spec`, `schedule` and `device`."""
        return cls(
            RunSpec.from_json(payload["spec"]),
            Schedule.parse(payload["schedule"]) if payload.get("schedule") else None,
            RehearsedDevice.from_json(payload["device"]),
        )

    def rank(self, rank: int, *, steps: int = 1) -> RankRehearsal:
        """Execute one rank; an error of its step is in the result, as a traceback.

        Args:
            steps: executed one after the other; what is counted is the last one.

        Raises:
            HocketError: the job cannot be executed, whatever its rank.
        """
        if self.spec.options.quantize_base is not None:
            load_library()
        if self.spec.options.optimizer == "adamw_8bit":
            code_values(MEAN), code_values(SQUARE)
        begin = time.perf_counter()
        found = RankRehearsal(rank=rank)
        world_size, compiles = self.spec.layout.world_size, self.spec.options.compile
        with executing(self.device, rank, world_size, compiles=compiles) as execution:
            try:
                self._execute(found, execution, steps)
            except HocketError:
                raise
            except Exception:
                found.error = traceback.format_exc()
                found.host_reads = execution.launches.reads()
        found.seconds = time.perf_counter() - begin
        return found

    def _execute(self, found: RankRehearsal, execution: Execution, steps: int) -> None:
        layout, options, workload = self.spec.layout, self.spec.options, self.spec.workload
        device = torch.device("cuda", found.rank % NUM_DEVICES)
        recorder = Actions(found.rank, device)
        mesh = Mesh(layout, found.rank, device, recorder)
        parallel = parallelize(
            self.skeleton,
            layout,
            self.plan,
            mesh=mesh,
            schedule=self.schedule,
            seed=options.seed,
            bucket_mb=options.bucket_mb,
            labels_shifted=True,
            context_parallel=options.context_parallel,
            expert_dispatch=options.expert_dispatch,
        )
        memory = execution.memory
        # As the loop: whether rows hold several documents is known, and not read off positions.
        packed = options.packing not in (None, "across")
        with execution.fake(), packed_rows() if packed else one_sequence_each():
            optimizer = self._build(parallel, memory, device)
            upcoming = self._inputs(memory, device, packed=packed)
            for step in range(steps):
                if step == steps - 1:
                    execution.begin(recorder)
                microbatches, upcoming = upcoming, []
                loss = parallel.forward_backward(
                    microbatches, workload.global_batch * workload.seq_len
                )
                del microbatches
                norm = parallel.clip_grad_norm(options.max_grad_norm)
                reading = LossReading(step + 1, options.lr, loss, norm, 1)
                optimizer.step(options.lr, reading.skip())
                parallel.begin_unshard()
                upcoming = self._inputs(memory, device, packed=packed)
            execution.end()
            memory.own("gradients", (p.grad for p in parallel.tensors()))
            execution.into(found, mesh, recorder)

    def _build(self, parallel: Parallel, memory: LiveMemory, device: torch.device) -> Optimizer:
        """A rank's part of the model with memory, and its optimizer, all of it with an owner."""
        for stage in parallel.stages:
            allocate(stage.module, device)
        if self.lora is not None:
            adapt(parallel, self.lora, values=False)
        keep_gradients(parallel, self.spec.options)
        if self.spec.options.quantize_base is not None:
            quantize_base(parallel)
        if self.spec.workload.dtype == "fp8":
            for stage in parallel.stages:
                multiply_in_fp8(stage.module, self.plan.stages)
        parallel.finish()
        if self.spec.layout.offloads("activations"):
            offloaded_to_host(parallel)
        if self.spec.options.compile:
            for stage in parallel.stages:
                compile_blocks(stage.module, self.plan)
        parallel.train()
        optimizer = build_optimizer(parallel, self.spec.options)
        optimizer.state_tensors()
        memory.own("other", _buffers(parallel))
        memory.own("gradients", parallel.gradient_buffers())
        memory.own("optimizer", optimizer.tensors())
        memory.own("parameters", parallel.tensors())
        for parameter in parallel.parameters():
            if parameter.requires_grad:
                on_gradient(parameter, lambda p: memory.own("gradients", [p.grad]))
        return optimizer

    def _inputs(
        self, memory: LiveMemory, device: torch.device, *, packed: bool
    ) -> list[dict[str, Tensor]]:
        """The microbatches of one data rank's step, as `training.inputs` brings them."""
        layout, seq_len = self.spec.layout, self.spec.workload.seq_len
        rows = self.spec.workload.global_batch // layout.dp
        size = rows // (layout.microbatches or 1)
        ids = torch.empty(rows, seq_len, dtype=torch.long, device=device)
        labels = torch.empty_like(ids)
        positions = torch.empty(size, seq_len, dtype=torch.long, device=device)
        documents = None
        if packed:  # as few as they may be: their number is that of the data
            begins = torch.empty(_DOCUMENTS, dtype=torch.int32, device=device)
            documents = Documents(begins, seq_len)
        note_documents(positions, documents)
        memory.own("other", [ids, labels, positions])
        return [
            {
                "position_ids": positions,
                "input_ids": ids[first : first + size],
                "labels": labels[first : first + size],
            }
            for first in range(0, rows, size)
        ]


def _buffers(parallel: Parallel) -> Iterator[Tensor]:
    for stage in parallel.stages:
        yield from stage.module.buffers()
