"""StageRunner: one rank's part of the serving engine.

    plan                what all ranks compute in this step
    BlockTables         which blocks each slot holds                       (1)
    StepIndices         where tokens go, what attends to what              (2)
    the model's code    packed [1, T], layer by layer; attention is paged  (3)
    logits              of the asked positions alone, on the last stage    (4)

Legend: T tokens of the step, H hidden, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Mesh
from hocket.runtime.native.kernels import Kernels
from hocket.runtime.native.sums import Sums, use_sums
from hocket.runtime.pages import in_large_pages
from hocket.runtime.pipeline.stage import Stage
from hocket.serving.engine.attention import Options, attending
from hocket.serving.engine.attention_cpu import CpuAttention, Remembered
from hocket.serving.engine.attention_cuda import CudaAttention, DeviceStep, choose_kernel
from hocket.serving.engine.attention_step import StepIndices, indices
from hocket.serving.engine.cache import BlockTables, LayerShape, PagedCache, bytes_per_block
from hocket.serving.engine.fused import fuse
from hocket.serving.engine.fused_layer import fuse_layers
from hocket.serving.engine.graphs import DecodeGraphs
from hocket.serving.engine.half import can_be_half, compute_in_fp32, multiply_by_halves
from hocket.serving.engine.products import choose_products
from hocket.serving.engine.projections import (
    lay_inputs_first,
    merge_projections,
    unmerge_wasted,
)
from hocket.serving.engine.refusal import no_attention, refuse
from hocket.serving.scheduling.step import StepPlan

_WIDE = 1_500_000
"""Multiplications of a product (the stage's mean) that several threads share with profit. On two
cores a product of 235,000 weights took as long with one row and less with eight."""


class StageRunner:
    """Runs the plans of a replica on one stage of its model.

    Args:
        stage: this rank's stage, with its values, built with the attention `attention.NAME`.
        mesh: the ranks of the replica.
        config: the model's configuration.
        block_size: tokens of a block of the cache.
        max_rows: slots.
        max_batch_tokens: tokens of a step.
        max_model_len: tokens of a sequence.
        threads: on a CPU, those that a step may use which is large enough for them; a smaller one
            is over before they have met.

    Attributes:
        layers: the shape of what each attention layer of the stage keeps, in calling order.
        dtype: of what travels between stages, and of the cache.
        half: whether weights are in bfloat16 and the rest is in fp32.
        kernel: what attends: `cpu`, or on CUDA what `attention_cuda` chose.

    Raises:
        ModelError: layers of the stage keep something else than keys and values.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        config: Any,
        *,
        block_size: int,
        max_rows: int,
        max_batch_tokens: int,
        max_model_len: int,
        threads: int = 1,
    ) -> None:
        self.stage = stage
        self.mesh = mesh
        self.config = config
        self.device = mesh.device
        self.block_size = block_size
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        refuse(config, stage.module, max_model_len)
        stage.module.eval().requires_grad_(False)
        merges = merge_projections(stage.module)
        self._keeps = stage.is_last and "logits_to_keep" in (
            inspect.signature(stage.module.forward).parameters
        )
        self.cache: PagedCache | None = None
        self.kernel = "cpu"
        self._graphs: DecodeGraphs | None = None
        self._kernels: Kernels | None = None
        self.tables = BlockTables(max_rows, -(-max_model_len // block_size))
        self.threads = threads
        self._wide = _wide_step(stage.module)
        self.half = self._halved()
        self.dtype = torch.float32 if self.half else stage.dtype
        if self.half:
            compute_in_fp32(stage.module)
        self.layers = self._watch()
        unmerge_wasted(merges)
        if self.half:
            multiply_by_halves(stage.module)
        if self.device.type == "cpu":
            lay_inputs_first(stage.module)
            in_large_pages(stage.module.parameters())
            self._kernels = Kernels.load()
            if self._kernels is not None:
                choose_products(stage.module, self._kernels, threads=self._threads_of)
                fuse(stage.module, self._kernels)
            everywhere = torch.tensor([int(self._kernels is not None)])
            all_reduce(everywhere, mesh.axis("tp"), mesh.recorder, op="min")
            if self._kernels is not None and bool(everywhere):
                sums = Sums.of(mesh.axis("tp"), mesh.recorder, self._kernels)
                if sums is not None:
                    use_sums(stage.module, sums)
                fuse_layers(stage.module, self._kernels)
        self._remembered: Remembered = {}

    def _halved(self) -> bool:
        """Whether all ranks keep weights in bfloat16 under a computation in fp32."""
        if self.device.type != "cpu":
            return False
        agreed = torch.tensor([int(can_be_half(self.stage.module))])
        for axis in ("tp", "pp"):
            all_reduce(agreed, self.mesh.axis(axis), self.mesh.recorder, op="min")
        return bool(agreed)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes on this rank, in all of the stage's layers."""
        return bytes_per_block(self.layers, self.block_size)

    def allocate(self, num_blocks: int) -> None:
        """Make the cache, once; on CUDA also choose the kernel and capture decode in graphs."""
        if self.device.type == "cpu":
            self.cache = PagedCache(self.layers, num_blocks, self.block_size, self.device)
            return
        # One block more than the scheduler knows of: what padding writes to.
        self.cache = PagedCache(self.layers, num_blocks + 1, self.block_size, self.device)
        self.kernel = choose_kernel(self.layers, self.block_size, self.device)
        if self.kernel == "gathered":
            return  # padded to the longest sequence there is, a graph would copy all of that
        self._graphs = DecodeGraphs(
            self._on_device,
            max_rows=self.max_rows,
            max_blocks=self.tables.table.shape[1],
            block_size=self.block_size,
            spare_block=num_blocks,
            hidden=None if self.stage.is_first else self._empty_hidden(self.max_rows),
            device=self.device,
        )
        with torch.inference_mode():
            self._graphs.capture()

    @torch.inference_mode()
    def run(self, plan: StepPlan, hidden: Tensor | None = None) -> Tensor:
        """Compute a plan.

        Args:
            plan: the step; every plan of the replica is run, in order.
            hidden: [1, T, H] from the stage before; None on the first stage.

        Returns:
            The hidden state [1, T, H], or on the last stage logits [N, V of this rank]: one for
            each row with LAST, `count` for each with ALL, in row order.
        """
        assert self.cache is not None, "allocate() first"
        self.tables.apply(plan)
        step = indices(plan, self.tables, self.block_size)
        if self.device.type == "cpu":
            if self.threads > 1:
                torch.set_num_threads(self._threads_of(step.num_tokens))
            attention = CpuAttention(self.cache, step, self._remembered, self._kernels)
            return self._forward(step, hidden, attention)
        there = DeviceStep.of(step, self.device)
        decodes = not step.chunks
        if decodes and self._graphs is not None and self._graphs.fits(there):
            return self._graphs.run(there, hidden)
        return self._on_device(there, hidden)

    def _threads_of(self, num_tokens: int) -> int:
        """Those that torch uses in a step of so many tokens."""
        return self.threads if num_tokens >= self._wide else 1

    @torch.inference_mode()
    def step_bytes(self) -> int:
        """Bytes of device memory that the largest step takes besides weights and cache, measured.

        0 on CPU, whose allocator keeps no account.
        """
        if self.device.type == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        tokens, rows = self.max_batch_tokens, min(self.max_rows, self.max_batch_tokens)
        hidden = None if self.stage.is_first else self._empty_hidden(tokens)
        self._forward(_unplaced(tokens, rows, self.block_size), hidden, _Watch())
        return torch.cuda.max_memory_allocated(self.device) - before

    def _on_device(self, step: DeviceStep, hidden: Tensor | None) -> Tensor:
        assert self.cache is not None
        return self._forward(step, hidden, CudaAttention(self.cache, step, self.kernel))

    def _empty_hidden(self, tokens: int) -> Tensor:
        assert self.stage.hidden_size is not None
        shape = (1, tokens, self.stage.hidden_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _forward(
        self, step: StepIndices | DeviceStep, hidden: Tensor | None, attention: Any
    ) -> Tensor:
        batch = {
            "input_ids": step.tokens.unsqueeze(0).to(self.device),
            "position_ids": step.positions.unsqueeze(0).to(self.device),
        }
        wanted = step.wanted.to(self.device)
        extra: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps else {}
        with attending(attention):
            output = self.stage.output(batch, hidden, use_cache=False, **extra)
        if not self.stage.is_last:
            return output  # type: ignore[no-any-return]
        logits: Tensor = output.logits[0]
        return logits if self._keeps else logits.index_select(0, wanted)

    @torch.inference_mode()
    def _watch(self) -> list[LayerShape]:
        """Run two tokens without a cache and see which layers attend, and with what."""
        watch = _Watch()
        hidden = None if self.stage.is_first else self._empty_hidden(2)
        step = _unplaced(2, 1, self.block_size)
        self._forward(step, hidden, watch)
        if not watch.layers:
            raise no_attention(self.config, self.stage.module)
        return watch.layers


def _wide_step(module: nn.Module) -> int:
    """Tokens from which on the products of a step are worth several threads."""
    sizes = [p.numel() for p in module.parameters() if p.dim() > 1]
    return max(1, -(-_WIDE * len(sizes) // max(1, sum(sizes))))


def _unplaced(tokens: int, logits: int, block_size: int) -> StepIndices:
    """A step of one sequence from its beginning, for a forward that keeps nothing."""
    none = torch.zeros(0, dtype=torch.long)
    return StepIndices(
        tokens=torch.zeros(tokens, dtype=torch.long),
        positions=torch.arange(tokens),
        places=torch.arange(tokens),
        num_decode=0,
        lengths=none,
        tables=torch.zeros(0, 0, dtype=torch.long),
        chunks=[],
        wanted=torch.arange(logits),
        block_size=block_size,
    )


class _Watch:
    """Stands for attention: notes what layers hand over, and returns something of the shape."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        self.layers.append(
            LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
