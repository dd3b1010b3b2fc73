"""Parallel: one rank's part of a module in a layout; all the axes composed.

finish        buckets of gradients (dp), ties, norm, random streams: needs real tensors
a step        forward_backward -> clip_grad_norm -> optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.clip import GradientNorm
from hocket.runtime.collectives import all_reduce
from hocket.runtime.context_parallel import context_parts, with_positions
from hocket.runtime.data_parallel import (
    Buckets,
    Fill,
    FlatShard,
    ShardedBlocks,
    ShardedBuckets,
    Shares,
    ThreadedReplicas,
)
from hocket.runtime.loss import IGNORED, NextTokenLoss, OwnLoss, divide_by_counted, targets
from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.pipeline.executor import Executor, accumulation_schedule
from hocket.runtime.pipeline.stage import Microbatch, Stage
from hocket.runtime.random import Streams, draws_random_numbers
from hocket.runtime.recompute import recompute_layers
from hocket.runtime.tensor_parallel import PartialGradients
from hocket.runtime.ties import Ties
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement
from hocket.spec.plan import ParallelPlan
from hocket.spec.run import bucket_mb
from hocket.spec.schedule import Schedule


class Parallel:
    """This rank's part of a module in a layout.

    Attributes:
        layout, mesh, plan, schedule: as given; `schedule` None is plain gradient accumulation.
        stages: those that this rank holds.
        placements: global name to placement, over those stages.
        recorder: of the mesh.
        bounds: layers per stage, None if uncut.
        step: number of the next step; keys random numbers. Set it when a run is resumed.
        bucket_mb: size of a gradient bucket in MB, used by `finish`. None: by the device.
        labels_shifted: whether labels are at the positions that predict them. None: they belong to
            a loss function of the caller's, and are counted as they are.
        own_loss: this rank's part of the last step's loss: 0 where it is computed elsewhere.
        replicas: after `finish`, the threads of a layout that asks for them, else None.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        plan: ParallelPlan,
        stages: Sequence[Stage],
        schedule: Schedule | None = None,
        *,
        bounds: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.plan = plan
        self.stages = list(stages)
        self.schedule = schedule
        self.bounds = None if bounds is None else tuple(bounds)
        self.recorder = mesh.recorder
        self.placements: dict[str, Placement] = {}
        for stage in self.stages:
            self.placements.update(stage.placements)
        self.step = 0
        self.bucket_mb: float | None = None
        self.labels_shifted: bool | None = None
        self._seed = seed
        self._count = 1
        self._finished = self.forward_only = False
        self._stale = False
        self._open_whole = False
        self.own_loss: Tensor | None = None
        self.replicas: ThreadedReplicas | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, local parameter) of this rank's stages, each parameter once."""
        for stage in self.stages:
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The local parameters of this rank's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.module.train(mode)
        if self.replicas is not None:
            for replica in self.replicas.replicas:
                replica.train(mode)

    def finish(self, fills: Sequence[Fill] = ()) -> None:
        """Build what needs real tensors. Once, after the stages were given their values.

        Args:
            fills: for each stage, what gives its parameters their values: block by block while
                they are shared out (ZeRO-3), so that a stage is never whole, else all before.
                Empty: they have them.
        """
        assert not self._finished, "finish() was called already"
        empty = [name for name, p in self.named_parameters() if p.is_meta]
        assert not empty, f"still on the meta device: {', '.join(empty[:5])}"
        self._finished = True
        mesh = self.mesh
        self._buckets: dict[int, Buckets] = {}
        self._sharded: dict[int, Shares] = {}
        # One rank alone has nobody to share with, and may still keep its parameters on the host.
        experts = self._experts_axes()
        alone = all(axis.size == 1 for axis in (mesh.data, *experts.values()))
        shared = not (alone or self.forward_only) or self.layout.offloads("params")
        given: Sequence[Fill | None] = fills or [None] * len(self.stages)
        for stage, fill in zip(self.stages, given, strict=True):
            if fill is not None and not (shared and self.layout.zero == 3):
                fill([name for name, _ in stage.module.named_parameters()])
            if shared:
                if self.layout.zero:
                    self._sharded[stage.index] = self._shard(stage, fill)
                else:
                    self._buckets[stage.index] = Buckets(
                        stage.module.named_parameters(),
                        mesh.data,
                        self.recorder,
                        bucket_mb=self._bucket_mb,
                        others=experts,
                    )
        self._streams: Streams | None = None
        threads = self.layout.data_parallel == "threads"  # they share one generator
        if not threads and any(draws_random_numbers(stage.module) for stage in self.stages):
            slices = any(stage.slices is not None for stage in self.stages)
            self._streams = Streams(self._seed, mesh, slices=slices)
            for stage in self.stages:
                self._streams.install(stage.module, self.plan.stages)
        if self.layout.recompute != "none":
            assert self.plan.stages is not None
            for stage in self.stages:
                recompute_layers(stage.module, self.layout, self.plan.stages, self._streams)
        self._partial = PartialGradients(self.named_parameters(), self.placements, mesh)
        pieces = list(self._pieces()) if self._sharded else None
        self._norm = GradientNorm(self.named_parameters(), self.placements, mesh, pieces)
        self._ties: Ties | None = None
        crossing = self.plan.crossing() if self._num_stages > 1 else {}
        if crossing:
            held = [dict(stage.module.named_parameters()) for stage in self.stages]
            self._ties = Ties(crossing, held, mesh)
        self._executors: dict[int, Executor] = {}
        if threads:
            (stage,) = self.stages
            assert stage.loss_fn is not None
            self.replicas = ThreadedReplicas(
                stage.module, self.layout.dp, stage.loss_fn, self.recorder
            )

    def _experts_axes(self) -> dict[str, Axis]:
        """Name of each expert parameter to the ranks that hold copies of it."""
        axis = self.mesh.axis("expert_data")
        return {name: axis for name, p in self.placements.items() if p.is_expert}

    @property
    def _bucket_mb(self) -> float:
        cuda = self.mesh.device.type == "cuda"
        return bucket_mb(self.bucket_mb, cuda=cuda, dp=self.mesh.data.size)

    @property
    def _num_stages(self) -> int:
        return 1 if self.schedule is None else self.schedule.num_stages

    def _shard(self, stage: Stage, fill: Fill | None) -> Shares:
        """ZeRO: this stage's state in shares."""
        late = set(sum(self.plan.crossing().items(), ())) if self._num_stages > 1 else set()
        late |= {name for name, p in stage.placements.items() if "tp" in p.grad_sum or p.has_copies}
        axis, replicas = self.mesh.axis("shard"), self.mesh.axis("replicas")
        if self.layout.zero == 3:
            return ShardedBlocks(
                stage.module,
                self.plan.stages,
                late,
                axis=axis,
                replicas=replicas,
                recorder=self.recorder,
                on_host=self.layout.offloads("params"),
                fill=fill,
                others=self._experts_axes(),
            )
        return ShardedBuckets(
            stage.module,
            late,
            axis,
            replicas,
            self.recorder,
            each_microbatch=self.layout.zero == 2,
            bucket_mb=self._bucket_mb,
            others=self._experts_axes(),
        )

    # --- what an optimizer steps -------------------------------------------------------------

    def _pieces(self) -> Iterator[FlatShard]:
        for sharded in self._sharded.values():
            yield from sharded.pieces

    def named_stepped(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, tensor) that this rank's optimizer steps, its gradient in `.grad`.

        They are the parameters; with ZeRO, 1-D views of this rank's share of them. After the
        optimizer's step `begin_unshard` makes the parameters whole again.
        """
        if not self._sharded:
            yield from self.named_parameters()
            return
        for piece in self._pieces():
            yield piece.name, piece.tensor

    def tensors(self) -> list[Tensor]:
        """The parameters, and what of them is stepped or held: all that is there between steps,
        and all whose `.grad` may hold memory."""
        held = [tensor for sharded in self._sharded.values() for tensor in sharded.held()]
        return [*self.parameters(), *(p for _, p in self.named_stepped()), *held]

    def gradient_buffers(self) -> list[Tensor]:
        """The flat buckets that gradients lie in from `finish` on (without ZeRO)."""
        return [flat for buckets in self._buckets.values() for flat in buckets.flats()]

    def buffers(self) -> list[Tensor]:
        """What collectives fill for a while: whole gradients on their way to shards, and whole
        parameters where they are held in shards (ZeRO-3). To be counted, not read."""
        return [tensor for sharded in self._sharded.values() for tensor in sharded.buffers()]

    def local_part(self, name: str) -> slice | None:
        """What of the flattened local parameter `name` this rank's optimizer steps; None: none."""
        if not self._sharded:
            return slice(None)
        found = next((piece for piece in self._pieces() if piece.name == name), None)
        return None if found is None else slice(found.start, found.stop)

    def begin_unshard(self) -> None:
        """Begin to gather what the data ranks' optimizers have stepped in shares (ZeRO); a module
        waits for its parameters when it runs next. Every rank calls it, after its optimizer's
        step; what runs next calls it if nobody did. Without ZeRO it does nothing.
        """
        self._gather_stepped()
        self._stale = False

    def _gather_stepped(self) -> None:
        """For a reader: the optimizer may step afterwards, and the next reader gathers that."""
        for sharded in self._sharded.values() if self._stale else ():
            if not (self._open_whole and isinstance(sharded, ShardedBlocks)):  # it may be written
                sharded.begin_unshard()

    def unshard(self) -> None:
        """Wait until every parameter is whole; to be called, by every rank, before parameters are
        read, or written, other than by a step. `reshard` ends it, or the next step does."""
        self._gather_stepped()
        self._open_whole = True
        with self.recorder.in_phase("other"):
            for sharded in self._sharded.values():
                sharded.unshard()

    def reshard(self) -> None:
        """Free the parameters that only `unshard` made whole (ZeRO-3), and keep what was written
        into them."""
        self._open_whole = False
        for sharded in self._sharded.values():
            sharded.reshard()

    def groups(self) -> list[list[str]]:
        """Names of this rank's parameters by what is made whole at once: under ZeRO-3 those of a
        block, else those of a stage."""
        found: list[list[str]] = []
        for stage in self.stages:
            sharded = self._sharded.get(stage.index)
            if isinstance(sharded, ShardedBlocks):
                found += sharded.groups()
            else:
                found.append([name for name, _ in stage.module.named_parameters()])
        return found

    @contextmanager
    def reading(self, group: Sequence[str]) -> Iterator[None]:
        """Within the block the parameters of one of `groups` have their values, and under ZeRO-3 no
        others. Every rank enters the same groups in the same order."""
        with self._open(group, ShardedBlocks.reading):
            yield

    @contextmanager
    def writing(self, group: Sequence[str]) -> Iterator[None]:
        """Within the block the parameters of one of `groups` have memory, and are all to be
        written; what is written stays."""
        with self._open(group, ShardedBlocks.writing), torch.no_grad():
            yield

    @contextmanager
    def _open(
        self,
        group: Sequence[str],
        how: Callable[[ShardedBlocks, str], AbstractContextManager[None]],
    ) -> Iterator[None]:
        self._gather_stepped()
        with self.recorder.in_phase("other"):
            for sharded in self._sharded.values():
                if not isinstance(sharded, ShardedBlocks):
                    sharded.unshard()
                elif group[0] in (name for names in sharded.groups() for name in names):
                    with how(sharded, group[0]):
                        yield
                    return
        yield

    def gradients(self) -> dict[str, Tensor]:
        """Every local parameter's whole summed gradient after a step, by name; gathered from the
        data ranks where they hold shares. For checks: every rank calls it."""
        if self._sharded:
            found: dict[str, Tensor] = {}
            with self.recorder.in_phase("other"):
                for sharded in self._sharded.values():
                    found |= sharded.whole_gradients()
            return found
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.named_parameters()
            if p.requires_grad
        }

    # --- a step ------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], num_tokens: int | None = None
    ) -> Tensor:
        """One step's forwards and backwards, after which `.grad` holds its whole gradient alone.

        Args:
            microbatches: of this data rank, in order; every rank of a replica is given the same.
            num_tokens: valid tokens of the global batch. None: counted, by `loss_fn` if given.

        Returns:
            The mean loss over the valid tokens of the global batch, fp32, equal on every rank.

        Raises:
            OptionError: the number of microbatches is not the schedule's.
        """
        assert self._finished, "finish() comes first"
        recorder, engine = self.recorder, self._executor(len(microbatches))
        microbatches = self._parts(microbatches)
        self._count = len(microbatches)
        self.begin_unshard()
        self.zero_grad()
        # A CUDA rank does not read how many it counted.
        divisor: Any = max(1, num_tokens or 1)
        counted = self.labels_shifted is None and num_tokens is None  # by the loss function
        if num_tokens is None and not (counted and "labels" not in microbatches[0]):
            with recorder.in_phase("step"):
                total = self._num_labels(microbatches)
            divisor = total.clamp(min=1).float() if total.is_cuda else max(1, int(total))
        self._weigh_router_loss(microbatches, divisor)
        with recorder.in_phase("microbatch"):
            if self.replicas is not None:
                share = self.replicas.forward_backward(microbatches, divisor)
            else:
                share = engine.step(microbatches, divisor)
        self.own_loss = share.detach().clone()
        with recorder.in_phase("step"):
            reducers = self._reducers()
            for reducer in reducers.values():
                reducer.flush()
            if self._ties is not None:
                self._ties.sum(self.mesh.axis("embedding"))
            self._partial.sum()
            for reducer in reducers.values():
                reducer.wait()
            loss = self._everywhere(share)
            if counted:
                stepped = self.named_stepped()
                loss = divide_by_counted(loss, divisor, self.stages, stepped, self._everywhere)
        self._stale = bool(self._sharded)
        self._open_whole = False
        self.step += 1
        return loss

    def _weigh_router_loss(self, microbatches: Sequence[Microbatch], num_tokens: Any) -> None:
        """Weigh a router's auxiliary loss by microbatch."""
        count = len(microbatches) * self.layout.data_degree
        for stage in self.stages:
            if isinstance(stage.loss_fn, NextTokenLoss | OwnLoss):
                stage.loss_fn.begin(num_tokens / count)

    def count_tokens(self, microbatches: Sequence[Microbatch]) -> int:
        """Labels of the global batch that are not ignored. Reads the device."""
        return int(self._num_labels(self._parts(microbatches)))

    def _parts(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """What of the microbatches this rank computes: its tokens of every sequence (cp)."""
        shifted = self.labels_shifted is not False
        given = with_positions(microbatches) if self.plan.mask_positions else microbatches
        return context_parts(given, self.mesh.axis("cp"), labels_shifted=shifted)

    def _num_labels(self, microbatches: Sequence[Microbatch]) -> Tensor:
        if any("labels" not in microbatch for microbatch in microbatches):
            raise OptionError(
                "the microbatches hold no labels to count",
                hint="forward_backward(..., num_tokens=N)",
            )
        shifted = self.labels_shifted is not False or self.mesh.axis("cp").size > 1
        found = [
            (targets(microbatch["labels"], shifted) != IGNORED).sum() for microbatch in microbatches
        ]
        total = torch.stack(found).sum()
        all_reduce(total, self.mesh.data, self.recorder)
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """(sum of losses, valid tokens) of a global batch of which this data rank has a part; a
        router's auxiliary loss is left out."""
        modes = [stage.module.training for stage in self.stages]
        self.train(False)
        self._gather_stepped()
        with self.recorder.in_phase("other"):
            total, tokens = self._executor(None).evaluate(self._parts(microbatches))
            both = torch.stack([total.double(), tokens.double()])
            first = self.mesh.axis("tp").index == 0
            both = both if first else torch.zeros_like(both)
            all_reduce(both, self.mesh.axis("world"), self.recorder)
        for stage, mode in zip(self.stages, modes, strict=True):
            stage.module.train(mode)
        return float(both[0]), int(both[1])

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the global norm (0: do not clip); returns the norm before, on every rank."""
        with self.recorder.in_phase("step"):
            return self._norm.clip(max_norm)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for stage in self.stages:
            reducer = self._reducers().get(stage.index)
            if reducer is not None:
                reducer.zero_grad()
            else:
                for parameter in stage.module.parameters():
                    parameter.grad = None

    def _reducers(self) -> Mapping[int, Buckets | Shares]:
        """Stage to what sums its gradients over the data ranks."""
        return self._sharded or self._buckets

    def _everywhere(self, share: Tensor) -> Tensor:
        """The sum over the world of each last stage's share, counted by one tensor rank."""
        if self.mesh.axis("tp").index > 0:
            share = torch.zeros_like(share)
        all_reduce(share, self.mesh.axis("world"), self.recorder)
        return share

    def _executor(self, num_microbatches: int | None) -> Executor:
        """The executor for a number of microbatches; None: any, for forwards alone."""
        if self.schedule is not None:
            count = self.schedule.num_microbatches
            if num_microbatches not in (None, count):
                raise OptionError(
                    f"{num_microbatches} microbatches, the schedule {self.schedule.name} "
                    f"has {count}"
                )
        else:
            count = num_microbatches or 1
        if count not in self._executors:
            self._executors[count] = Executor(
                self.stages,
                self.schedule or accumulation_schedule(count),
                self.mesh.axis("pp"),
                self.recorder,
                device=self.mesh.device,
                reducers=self._reducers(),
                before_forward=self._key if self._streams is not None else None,
            )
        return self._executors[count]

    def _key(self, stage: int, microbatch: int) -> None:
        """Tell the random streams which microbatch runs, among those of all data ranks."""
        assert self._streams is not None
        self._streams.step = self.step
        self._streams.microbatch = self.mesh.data.index * self._count + microbatch
