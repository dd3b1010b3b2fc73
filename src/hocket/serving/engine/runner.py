"""StageRunner: one rank's part of the serving engine.

    plan                what all ranks compute in this step
    BlockTables         which blocks each slot holds                       (1)
    StepIndices         where tokens go, what attends to what              (2)
    the model's code    packed [1, T], layer by layer; attention is paged  (3)
    logits              of the asked positions alone, on the last stage    (4)

On CUDA, (1) and (2) are `DeviceTables` and `DeviceStep`, and a step of decoding rows is replayed
from a graph.

Legend: T tokens of the step, H hidden, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.models.latent import take_latents
from hocket.runtime.expert_parallel.gathered import GatheredTokens
from hocket.runtime.hugepages import in_large_pages
from hocket.runtime.mesh import Mesh
from hocket.runtime.native.kernels import CpuKernels
from hocket.runtime.native.sums import Sums, use_sums
from hocket.runtime.pipeline.stage import Stage
from hocket.serving.engine.agreement import Chooser, agreed_choice, all_able
from hocket.serving.engine.attention import attending
from hocket.serving.engine.attention_context import ContextAttention, ContextStep
from hocket.serving.engine.attention_cpu import CpuAttention
from hocket.serving.engine.attention_cuda import CudaAttention, CudaContextAttention, Trial
from hocket.serving.engine.attention_kernels import (
    Accelerator,
    Choice,
    Chosen,
    LayerKind,
    choose_kernels,
)
from hocket.serving.engine.attention_step import StepIndices, indices
from hocket.serving.engine.bf16_weights import can_be_half, compute_in_fp32, multiply_by_halves
from hocket.serving.engine.cache import BlockTables, PagedCache, bytes_per_block
from hocket.serving.engine.context_exchange import (
    BlockPart,
    Exchange,
    TokenShare,
)
from hocket.serving.engine.device_step import DeviceStep, DeviceTables, HostStep
from hocket.serving.engine.fused import fuse
from hocket.serving.engine.fused_layer import fuse_layers
from hocket.serving.engine.gathered_experts import gathered_tokens, gathering
from hocket.serving.engine.gemm_select import choose_products, wide_step
from hocket.serving.engine.graphs import CudaDevice, DecodeGraphs, GraphDevice, captured_rows
from hocket.serving.engine.layer_probe import LayerProbe, unplaced
from hocket.serving.engine.projections import (
    lay_inputs_first,
    merge_projections,
    unmerge_wasted,
)
from hocket.serving.engine.refusal import no_attention, refuse
from hocket.serving.engine.states import RecurrentStates, StateStep
from hocket.serving.scheduling.step import StepPlan
from hocket.spec.serving import BLOCK_SIZE


class StageRunner:
    """Runs the plans of a replica on one stage of its model.

    Args:
        stage: this rank's stage, with its values, built with the attention `attention.NAME`.
        mesh: the ranks of the replica.
        config: the model's configuration.
        block_size: tokens of a block of the cache. None: 16 on CPU; on CUDA what the kernels of
            all ranks' layers read.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of a step.
        max_model_len: tokens of a sequence.
        cache_dtype: of keys and values in the cache. None: as they are computed.
        threads: on a CPU, those that a large step may use; a small one is over before they meet.
        lookahead: whether plans may hold tokens that only the device knows, below 0. Not on CPU.
        chooser: chooses the kernels of the attention layers, given their kinds and the block size.
            None: on CUDA by capability and a trial of each; on a CPU they are the CPU's own.
        graphs: streams and graphs to capture decode with. None: CUDA's, on CUDA.

    Attributes:
        layers: the shape of what each attention layer of the stage keeps, in calling order.
        states: what its recurrent layers keep. num_snapshots: copies of them that `allocate` makes
            room for, for the prefix cache.
        kinds: what each of them asks of a kernel.
        dtype: of what travels between stages, and of the cache.
        half: whether weights are in bfloat16 and the rest is in fp32.
        choice: kernels of the attention layers; None: a CPU's own.
        gathered: the steps whose tokens reach experts over ranks without a host read; None: there
            are no such experts, or all steps are dispatched.

    Raises:
        ModelError: layers of the stage keep something else than keys and values.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        config: Any,
        *,
        block_size: int | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cache_dtype: torch.dtype | None = None,
        threads: int = 1,
        lookahead: bool = False,
        chooser: Chooser | None = None,
        graphs: GraphDevice | None = None,
    ) -> None:
        self.stage = stage
        self.mesh = mesh
        self.config = config
        self.device = mesh.device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        refuse(config, stage.module, max_model_len)
        stage.module.eval().requires_grad_(False)
        self.states = RecurrentStates(stage.module)
        self.num_snapshots = 0
        merges = merge_projections(stage.module)
        self._keeps = stage.is_last and "logits_to_keep" in (
            inspect.signature(stage.module.forward).parameters
        )
        self.cache: PagedCache | None = None
        self.lookahead = lookahead
        self.choice: Choice | None = None
        self.graphs: DecodeGraphs | None = None
        self._graph_device = graphs
        self._kernels: CpuKernels | None = None
        self.threads = threads
        self._wide = wide_step(stage.module)
        self.half = self._halved()
        self.dtype = torch.float32 if self.half else stage.dtype
        if self.half:
            compute_in_fp32(stage.module)
        take_latents(stage.module, self.dtype if self.half else None)
        self.gathered: GatheredTokens | None = None
        self._dispatches = ""
        if self.device.type != "cpu" or chooser is not None:
            self.gathered, self._dispatches = gathered_tokens(
                stage.module, mesh, recurrent=bool(self.states)
            )
        self.kinds = [kind.stored_in(cache_dtype) for kind in self._watch()]
        self.layers = [kind.shape for kind in self.kinds]
        self.block_size = block_size or BLOCK_SIZE
        self.context = mesh.axis("cp")
        if chooser is None and self.device.type != "cpu":
            chooser = self._by_trial
        if chooser is not None:
            self.choice = agreed_choice(chooser, self.kinds, block_size, mesh)
            self.block_size = self.choice.block_size
        if self.context.size > 1:
            self.states.over_ranks(mesh.layout)
            assert self.block_size % self.context.size == 0
        self.tables = BlockTables(max_num_seqs, self._max_blocks)
        self._device_tables: DeviceTables | None = None
        unmerge_wasted(merges)
        if self.half:
            multiply_by_halves(stage.module)
        if self.choice is None and self.device.type == "cpu":
            lay_inputs_first(stage.module)
            in_large_pages(stage.module.parameters())
            self._kernels = CpuKernels.load()
            if self._kernels is not None:
                choose_products(stage.module, self._kernels, threads=self._threads_of)
                fuse(stage.module, self._kernels)
            everywhere = all_able(self._kernels is not None, mesh, "tp")
            if self._kernels is not None and everywhere:
                sums = Sums.of(mesh.axis("tp"), mesh.recorder, self._kernels)
                if sums is not None:
                    use_sums(stage.module, sums)
                fuse_layers(stage.module, self._kernels)

    def _halved(self) -> bool:
        """Whether all ranks keep weights in bfloat16 under a computation in fp32."""
        if self.device.type != "cpu":
            return False
        return all_able(can_be_half(self.stage.module), self.mesh, "tp", "pp")

    @property
    def _max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def _by_trial(self, kinds: Sequence[LayerKind], block_size: int | None) -> Choice:
        ranks = self.context.size
        trial = Trial(self.device, ranks)
        return choose_kernels(kinds, Accelerator.of(self.device), block_size, trial, ranks)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes on this rank, in all of the stage's layers."""
        return bytes_per_block(self.layers, self.block_size // self.context.size)

    def attention_json(self) -> list[dict[str, Any]]:
        """The kernel of each kind of layer and why, as plain data."""
        if self.choice is not None:
            return self.choice.to_json()
        name = "torch" if self._kernels is None else "native"
        counts = dict.fromkeys(self.kinds, 0)
        for kind in self.kinds:
            counts[kind] += 1
        one = [Chosen(kind, count, name, {}) for kind, count in counts.items()]
        return Choice(tuple(one), self.block_size).to_json()

    def graphs_json(self) -> dict[str, Any]:
        """Sizes of the captured decode steps, and why there are none, as plain data."""
        if self.graphs is None:
            return {"sizes": [], "reason": "a CPU has no graphs"}
        return {"sizes": self.graphs.captured, "reason": self.graphs.reason}

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states: of every slot, of padding and of `num_snapshots`."""
        return self.states.bytes_per_slot * (self.max_num_seqs + 1 + self.num_snapshots)

    def allocate(self, num_blocks: int) -> None:
        """Make the cache, once; on CUDA also capture decode in graphs."""
        if self.choice is None:
            self.states.allocate(self.max_num_seqs, self.num_snapshots, self.device)
            part, first = self.block_size // self.context.size, self.context.size == 1
            self.cache = PagedCache(self.layers, num_blocks, part, self.device, heads_first=first)
            return
        self.capture(num_blocks)

    @torch.inference_mode()
    def capture(self, num_blocks: int, rows: Iterable[int] | None = None) -> DecodeGraphs:
        """As `allocate` on a device.

        Args:
            rows: captured are the sizes that hold so many. None: all.
        """
        self._place(num_blocks)
        self.graphs = self._decode_graphs()
        if self._dispatches:
            self.graphs.give_up(self._dispatches)
            return self.graphs
        every = self.graphs.sizes
        wanted = None if rows is None else {next(n for n in every if n >= min(r, every[-1]))
                                            for r in rows}  # fmt: skip
        with gathering(self.gathered, always=True):
            self.graphs.capture(None if wanted is None else sorted(wanted))
        return self.graphs

    def _place(self, num_blocks: int) -> None:
        """Cache and tables on the device."""
        # One block more than the scheduler knows of: what padding writes to.
        self.cache = PagedCache(
            self.layers, num_blocks + 1, self.block_size // self.context.size, self.device,
            heads_first=False,
        )  # fmt: skip
        self._device_tables = DeviceTables(
            self.max_num_seqs,
            self._max_blocks,
            self.max_num_batched_tokens,
            block_size=self.block_size,
            spare_block=num_blocks,
            device=self.device,
        )
        self.states.allocate(self.max_num_seqs, self.num_snapshots, self.device)

    def _decode_graphs(self) -> DecodeGraphs:
        assert self._device_tables is not None
        return DecodeGraphs(
            self._on_device,
            self._device_tables,
            max_num_seqs=self.max_num_seqs,
            hidden=None if self.stage.is_first else self._empty_hidden(self.max_num_seqs),
            unknown=self.lookahead,
            device=self._graph_device or CudaDevice(self.device),
            agree=lambda captured: all_able(captured, self.mesh, "tp", "cp", "expert"),
        )

    @torch.inference_mode()
    def trial_graphs(self) -> Iterator[int]:
        """Capture the largest size, then the smallest, over a cache of one block; yields after
        each. `drop_trial` gives their memory back."""
        if self._dispatches:
            return
        self._place(1)
        graphs = self._decode_graphs()
        for rows in dict.fromkeys((graphs.sizes[-1], graphs.sizes[0])):
            with gathering(self.gathered, always=True):
                graphs.capture([rows])
            if graphs.reason:
                return
            yield rows

    def drop_trial(self) -> None:
        """Give back what `trial_graphs` took."""
        self.cache = self._device_tables = None
        self.states.free()

    @property
    def num_graphs(self) -> int:
        """Sizes of decode steps that are captured."""
        return len(captured_rows(self.max_num_seqs))

    @property
    def last_tokens(self) -> Tensor | None:
        """[slots + 1] int64, where the tokens that were sampled last are kept for steps that the
        host makes before it knows them. None: there are none."""
        if not self.lookahead or self._device_tables is None:
            return None
        return self._device_tables.last

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
        if not plan.rows and (self.choice is None or self.states):
            # One token, which is kept nowhere: experts exchange tokens all the same.
            return self._forward(unplaced(1, 0, self.block_size), hidden, LayerProbe())
        if self.choice is not None:
            return self._run_on_device(plan, hidden)
        if self.context.size > 1:
            return self._run_part(plan, hidden)
        self.tables.apply(plan)
        step = indices(plan, self.tables, self.block_size)
        if self.threads > 1:
            torch.set_num_threads(self._threads_of(step.num_tokens))
        attention = CpuAttention(self.cache, step, self._kernels)
        states = self.states.begin(plan) if self.states else None
        output = self._forward(step, hidden, attention, states)
        if states is not None:
            self.states.end(states)
        return output

    def num_tokens(self, plan: StepPlan) -> int:
        """Tokens of a plan that this rank computes."""
        return self._share(plan).each

    def _share(self, plan: StepPlan) -> TokenShare:
        # On a device a step that decodes is bound by the weights that it reads, and captured.
        whole = self.choice is not None and all(row.count == 1 for row in plan.rows)
        return TokenShare.of(len(plan.tokens), self.context, whole=whole)

    def _exchange(self, share: TokenShare) -> Exchange:
        return Exchange(self.context, self.mesh.recorder, share)

    def _states(
        self, plan: StepPlan, share: TokenShare, slots: Tensor | None = None
    ) -> StateStep | None:
        """Whose states a step continues; None: there are no recurrent layers."""
        if not self.states:
            return None
        states = self.states.begin(plan, slots)
        if share.split:
            self.states.split(states, share, self.context, self.mesh.recorder)
        return states

    def _run_part(self, plan: StepPlan, hidden: Tensor | None) -> Tensor:
        """A context rank's part of a step; on the last stage the logits of all of it."""
        assert self.cache is not None
        self.tables.apply(plan)
        mine = ContextStep.of(indices(plan, self.tables, self.block_size), self.context)
        attention = ContextAttention(self.cache, mine, self._exchange(mine.share))
        states = self._states(plan, mine.share)
        output = self._forward(mine.local, hidden, attention, states)
        if states is not None:
            self.states.end(states)
        return self._logits(output, mine.share, mine.counts)

    def _logits(self, output: Tensor, share: TokenShare, counts: list[int]) -> Tensor:
        return self._exchange(share).logits(output, counts) if self.stage.is_last else output

    def _run_on_device(self, plan: StepPlan, hidden: Tensor | None) -> Tensor:
        tables = self._device_tables
        assert tables is not None
        changes = tables.apply(plan)
        if plan.rows:
            step = tables.host(plan)
        else:
            step = HostStep.idle(self.max_num_seqs, tables.spare_place)
        if self.graphs is not None and plan.decoding and self.graphs.fits(step, plan.widest):
            if not self.states:
                return self.graphs.run(step, changes, hidden, plan.widest)
            states = self.states.begin(plan)
            output = self.graphs.run(step, changes, hidden)
            self.states.end(states)
            return output
        share, counts = self._share(plan), []
        if share.split:
            counts = share.counts(step.wanted)
            step.wanted = share.wanted(step.wanted)
        sent = tables.send(step, changes)
        found = self._states(plan, share, sent.slots)
        with gathering(self.gathered, plan.widest or None):
            output = self._on_device(sent, hidden, found, share)
        if found is not None:
            self.states.end(found)
        return self._logits(output, share, counts)

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
        tokens, rows = (
            self.max_num_batched_tokens,
            min(self.max_num_seqs, self.max_num_batched_tokens),
        )
        hidden = None if self.stage.is_first else self._empty_hidden(tokens)
        self._forward(unplaced(tokens, rows, self.block_size), hidden, LayerProbe())
        return torch.cuda.max_memory_allocated(self.device) - before

    def _on_device(
        self,
        step: DeviceStep,
        hidden: Tensor | None,
        states: StateStep | None = None,
        share: TokenShare | None = None,
    ) -> Tensor:
        """A step's forward. `share`: of it, on a context rank; None: all of it, as captured."""
        assert self.cache is not None
        assert self.choice is not None
        names = [self.choice.name(kind) for kind in self.kinds]
        if states is None and self.states:  # as it is captured: rows that decode alone
            assert step.slots is not None
            states = StateStep(step.slots, [])
        attention: CudaAttention | CudaContextAttention
        if self.context.size == 1:
            attention = CudaAttention(self.cache, step, names)
            return self._forward(step, hidden, attention, states)
        share = share or TokenShare.of(step.tokens.shape[0], self.context, whole=True)
        part = BlockPart.of(self.block_size, self.context)
        spare = (self.cache.num_blocks - 1) * part.size
        attention = CudaContextAttention(
            self.cache, step, names, part, self._exchange(share), spare
        )
        if share.split:
            step = dataclasses.replace(
                step, tokens=share.part(step.tokens), positions=share.part(step.positions)
            )
        return self._forward(step, hidden, attention, states)

    def _empty_hidden(self, tokens: int) -> Tensor:
        assert self.stage.hidden_size is not None
        shape = (1, tokens, self.stage.hidden_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _forward(
        self,
        step: StepIndices | DeviceStep,
        hidden: Tensor | None,
        attention: Any,
        states: StateStep | None = None,
    ) -> Tensor:
        batch = {
            "input_ids": step.tokens.unsqueeze(0).to(self.device),
            "position_ids": step.positions.unsqueeze(0).to(self.device),
        }
        wanted = None if step.wanted is None else step.wanted.to(self.device)
        picks = self._keeps and wanted is not None
        extra: dict[str, Any] = {"logits_to_keep": wanted} if picks else {}
        with attending(attention), self.states.running(states):
            output = self.stage.output(batch, hidden, use_cache=False, **extra)
        if not self.stage.is_last:
            return output  # type: ignore[no-any-return]
        logits: Tensor = output.logits[0]
        return logits if picks or wanted is None else logits.index_select(0, wanted)

    @torch.inference_mode()
    def _watch(self) -> list[LayerKind]:
        """Run two tokens without a cache and see which layers attend, and with what."""
        watch = LayerProbe()
        hidden = None if self.stage.is_first else self._empty_hidden(2)
        step = unplaced(2, 1, 1)
        self._forward(step, hidden, watch)
        if not watch.kinds and not self.states:
            raise no_attention(self.config, self.stage.module)
        return watch.kinds
