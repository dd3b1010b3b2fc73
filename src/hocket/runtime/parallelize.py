"""Parallel: a module carried out in a layout; all the axes composed.

parallelize   cut stages (pp), split them (tp); still on the meta device if the module was
finish        buckets of gradients (dp), ties, norm, random streams: needs real tensors
a step        forward_backward -> clip_grad_norm -> optimizer
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.runtime.clip import GradientNorm
from hocket.runtime.collectives import all_reduce
from hocket.runtime.data_parallel import Buckets, ThreadedReplicas
from hocket.runtime.device import pick_device
from hocket.runtime.loss import IGNORED, NextTokenLoss
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline.cut import cut, cut_costs
from hocket.runtime.pipeline.executor import Executor
from hocket.runtime.pipeline.stage import LossFunction, Microbatch, Stage
from hocket.runtime.random import Streams, draws_random_numbers
from hocket.runtime.tensor_parallel import PartialGradients, apply_tensor_parallel, copies_needed
from hocket.runtime.ties import Ties
from hocket.spec.cut import choose_cut
from hocket.spec.errors import LayoutError, ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement
from hocket.spec.plan import ParallelPlan
from hocket.spec.schedule import BACKWARD, FORWARD, Action, Schedule


def parallelize(
    module: nn.Module,
    layout: Layout,
    plan: ParallelPlan | None = None,
    *,
    mesh: Mesh | None = None,
    schedule: Schedule | None = None,
    loss_fn: LossFunction | None = None,
    bounds: Sequence[int] | None = None,
    seed: int = 0,
    bucket_mb: float = 25.0,
) -> Parallel:
    """Take this rank's part of `module`. Call on every rank of the world with equal arguments.

    A module on the meta device is left as it is and its part stays on the meta device: give it
    values, then call `finish`. A module with values (the same on every rank) is changed in place,
    keeps its slices of them, moves to the mesh's device and is ready.

    Args:
        module: any module; with several stages or tensor ranks it needs a plan that says how.
        layout: how it is split.
        plan: how it may be split. None: not at all, for data parallelism alone.
        mesh: None: made here, over the default process group or, without one, of one rank.
        schedule: when everything runs; needed with several stages.
        loss_fn: `(output, microbatch) -> (sum of losses, number of tokens)`. None: next-token
            cross-entropy of the output's `logits` (or of the output) against `labels`.
        bounds: layers per stage. None: as `layout.cut` says.
        seed: of the random numbers that dropout draws.
        bucket_mb: size of a gradient bucket in MB.

    Raises:
        LayoutError: the layout does not fit the world or the module.
        ModelError: the plan does not fit the module, or lacks what the layout needs.
    """
    plan = plan or ParallelPlan()
    _check(layout, plan, schedule)
    if mesh is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        mesh = Mesh(layout, rank, _device_of(module, rank))
    num_stages = layout.num_stages if schedule is None else schedule.num_stages
    place = (0,) if schedule is None else schedule.stage_ranks
    meta = any(p.is_meta for p in module.parameters())
    if not meta:
        _check_equal(module, mesh)
    crossing = plan.ties if num_stages > 1 else {}
    mesh.prepare(
        copies_needed(plan.tensor, layout.tp), tie=(place[0], place[-1]) if crossing else False
    )
    if num_stages > 1:
        assert plan.stages is not None
        if bounds is None:
            bounds = choose_cut(
                layout.cut, plan.stages.num_layers, num_stages, **cut_costs(module, plan.stages)
            )
    stages = []
    for index in [s for s, r in enumerate(place) if r == mesh.axis("pp").index]:
        if num_stages > 1:
            assert plan.stages is not None
            assert bounds is not None
            part = cut(module, plan.stages, bounds, index)
        else:
            part = copy.deepcopy(module) if meta else module
        placements = apply_tensor_parallel(part, plan.tensor, mesh.axis("tp"), mesh.recorder)
        for tied, owner in crossing.items():
            if tied in placements:
                placements[tied] = dataclasses.replace(placements[tied], tie=owner)
        last = index == num_stages - 1
        stages.append(
            Stage(
                part,
                index,
                num_stages,
                plan=plan.stages,
                placements=placements,
                loss_fn=(loss_fn or NextTokenLoss(part, mesh)) if last else None,
                hidden_size=plan.hidden_size,
            )
        )
    parallel = Parallel(layout, mesh, plan, stages, schedule, bounds=bounds, seed=seed)
    parallel.bucket_mb = bucket_mb
    if not meta:
        for stage in stages:
            stage.module.to(mesh.device)
        parallel.finish()
    return parallel


class Parallel:
    """This rank's part of a module in a layout.

    Attributes:
        layout, mesh, plan, schedule: as given; `schedule` None is plain gradient accumulation.
        stages: those that this rank holds.
        placements: global name to placement, over those stages.
        recorder: of the mesh.
        bounds: layers per stage, None if uncut.
        step: number of the next step; keys random numbers. Set it when a run is resumed.
        bucket_mb: size of a gradient bucket in MB, used by `finish`.
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
        self.bucket_mb = 25.0
        self._seed = seed
        self._count = 1
        self._finished = False
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
        """Set every stage to training (or evaluation) mode."""
        for stage in self.stages:
            stage.module.train(mode)

    def finish(self) -> None:
        """Build what needs real tensors. Once, after the stages were given their values."""
        assert not self._finished, "finish() was called already"
        empty = [name for name, p in self.named_parameters() if p.is_meta]
        assert not empty, f"still on the meta device: {', '.join(empty[:5])}"
        self._finished = True
        mesh = self.mesh
        self._buckets: dict[int, Buckets] = {}
        if mesh.axis("dp").size > 1:
            for stage in self.stages:
                self._buckets[stage.index] = Buckets(
                    stage.module.named_parameters(),
                    mesh.axis("dp"),
                    self.recorder,
                    bucket_mb=self.bucket_mb,
                )
        self._streams: Streams | None = None
        if any(draws_random_numbers(stage.module) for stage in self.stages):
            self._streams = Streams(self._seed, mesh)
            for stage in self.stages:
                self._streams.install(stage.module, self.plan.stages)
        self._partial = PartialGradients(self.named_parameters(), self.placements, mesh)
        self._norm = GradientNorm(self.named_parameters(), self.placements, mesh)
        self._ties: Ties | None = None
        if self.plan.ties and self._num_stages > 1:
            held = [dict(stage.module.named_parameters()) for stage in self.stages]
            self._ties = Ties(self.plan.ties, held, mesh)
        self._executors: dict[int, Executor] = {}
        if self.layout.data_parallel == "threads":
            (stage,) = self.stages
            assert stage.loss_fn is not None
            self.replicas = ThreadedReplicas(
                stage.module, self.layout.dp, stage.loss_fn, self.recorder
            )

    @property
    def _num_stages(self) -> int:
        return 1 if self.schedule is None else self.schedule.num_stages

    # --- a step ------------------------------------------------------------------------------

    def forward_backward(
        self, microbatches: Sequence[Microbatch], num_tokens: int | None = None
    ) -> Tensor:
        """One step's forwards and backwards; afterwards `.grad` holds the whole gradient.

        Gradients of the step before are forgotten first.

        Args:
            microbatches: of this data rank, in order; every rank of a replica is given the same.
            num_tokens: valid tokens of the global batch. None: counted from `labels`.

        Returns:
            The mean loss over the valid tokens of the global batch, fp32, equal on every rank.

        Raises:
            OptionError: the number of microbatches is not the schedule's.
        """
        assert self._finished, "finish() comes first"
        recorder, engine = self.recorder, self._executor(len(microbatches))
        self._count = len(microbatches)
        self.zero_grad()
        with recorder.in_phase("step"):
            if num_tokens is None:
                num_tokens = self.count_tokens(microbatches)
        with recorder.in_phase("microbatch"):
            if self.replicas is not None:
                share = self.replicas.forward_backward(microbatches, max(1, num_tokens))
            else:
                share = engine.step(microbatches, max(1, num_tokens))
        with recorder.in_phase("step"):
            for buckets in self._buckets.values():
                buckets.wait()
            if self._ties is not None:
                self._ties.sum(self.mesh.axis("embedding"))
            self._partial.sum()
            loss = self._everywhere(share)
        self.step += 1
        return loss

    def count_tokens(self, microbatches: Sequence[Microbatch]) -> int:
        """Labels of the global batch that are not ignored."""
        if any("labels" not in microbatch for microbatch in microbatches):
            raise OptionError(
                "the microbatches hold no labels to count",
                hint="forward_backward(..., num_tokens=N)",
            )
        found = [(microbatch["labels"] != IGNORED).sum() for microbatch in microbatches]
        total = torch.stack(found).sum()
        all_reduce(total, self.mesh.axis("dp"), self.recorder)
        return int(total)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """(sum of losses, valid tokens) of a global batch of which this data rank has a part."""
        modes = [stage.module.training for stage in self.stages]
        self.train(False)
        with self.recorder.in_phase("other"):
            total, tokens = self._executor(None).evaluate(microbatches)
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
            buckets = self._buckets.get(stage.index)
            if buckets is not None:
                buckets.zero_grad()
            else:
                for parameter in stage.module.parameters():
                    parameter.grad = None

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
                self.schedule or _accumulation(count),
                self.mesh.axis("pp"),
                self.recorder,
                device=self.mesh.device,
                reducers=self._buckets,
                before_forward=self._key if self._streams is not None else None,
            )
        return self._executors[count]

    def _key(self, stage: int, microbatch: int) -> None:
        """Tell the random streams which microbatch runs, among those of all data ranks."""
        assert self._streams is not None
        self._streams.step = self.step
        self._streams.microbatch = self.mesh.axis("dp").index * self._count + microbatch


def _accumulation(num_microbatches: int) -> Schedule:
    """Without a pipeline: one microbatch after the other."""
    line = [Action(0, kind, m) for m in range(num_microbatches) for kind in (FORWARD, BACKWARD)]
    return Schedule(
        name="accumulation",
        num_microbatches=num_microbatches,
        stage_ranks=(0,),
        ranks=(tuple(line),),
    )


def _check(layout: Layout, plan: ParallelPlan, schedule: Schedule | None) -> None:
    """Refuse what the layout asks for and the plan, or this version, does not have."""
    absent = {
        "cp": layout.cp > 1,
        "ep": layout.ep > 1,
        "zero": layout.zero > 0,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": layout.recompute != "none",
    }
    asked = [name for name, wanted in absent.items() if wanted]
    if asked:
        raise LayoutError(
            f"parallelize does not do {', '.join(asked)}; the layout is {layout}",
            hint=dataclasses.replace(
                layout, cp=1, ep=1, zero=0, sequence_parallel=False, recompute="none"
            ).axes_text(),
        )  # fmt: skip
    if layout.tp > 1 and plan.tensor is None:
        reason = plan.reasons.get("tensor", "its plan splits no tensors")
        raise ModelError(f"the module cannot be split over tp {layout.tp}: {reason}", hint="tp1")
    if plan.tensor is not None:
        for segment in plan.tensor.segments():
            segment.slice(0, layout.tp)
    if schedule is None:
        if layout.num_stages > 1:
            raise LayoutError(
                f"{layout.num_stages} stages need a schedule",
                hint="schedule=hocket.schedules.registry.build(layout, num_microbatches)",
            )
    elif schedule.num_ranks != layout.pp:
        raise LayoutError(
            f"the schedule {schedule.name} is for {schedule.num_ranks} pipeline ranks, "
            f"the layout has pp {layout.pp}"
        )
    elif schedule.num_stages > 1 and plan.stages is None:
        reason = plan.reasons.get("stages", "its plan names no layers")
        raise ModelError(f"the module cannot be cut into stages: {reason}", hint="pp1")


def _device_of(module: nn.Module, rank: int) -> torch.device:
    """The device of a rank that was given no mesh: CUDA only if the process group is for it."""
    if dist.is_initialized():
        cuda = dist.get_backend() == "nccl"
        local = int(os.environ.get("LOCAL_RANK", rank))
        return pick_device("cuda" if cuda else "cpu", local)
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


@torch.no_grad()
def _check_equal(module: nn.Module, mesh: Mesh) -> None:
    """Refuse a module whose values differ between ranks: it would train to nonsense in silence."""
    sums = [p.sum(dtype=torch.float64) for p in module.parameters()]
    if mesh.world_size == 1 or not sums:
        return
    total = torch.stack(sums).to(mesh.device)
    low, high = total.clone(), total.clone()
    all_reduce(low, mesh.axis("world"), mesh.recorder, op="min")
    all_reduce(high, mesh.axis("world"), mesh.recorder, op="max")
    differing = [
        name
        for (name, _), a, b in zip(module.named_parameters(), low, high, strict=True)
        if not torch.equal(a, b)
    ]
    if differing:
        raise ModelError(
            f"the ranks hold different values of {len(differing)} parameters, "
            f"the first of them {differing[0]}",
            hint="torch.manual_seed(0) before the module is made",
        )
