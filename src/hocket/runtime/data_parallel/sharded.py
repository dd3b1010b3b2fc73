"""ShardedBuckets: replicas that each step a share of the parameters (ZeRO-1 and ZeRO-2).

    parameters of a bucket, flat      | w9 w8 w7 ........ pad |      values, whole on every rank
    backward fills the gradient       ======================
    reduce-scatter                    |  rank 0  |  rank 1  |        each keeps the sum of its share
    the optimizer steps its share        ^^^^^^                      1/dp of moments and masters
    all-gather, in place              | w9 w8 w7 ........ pad |      while the next forward begins

The optimizer's state is never whole on any rank. Both halves together move as many bytes as the
all-reduce they replace (Rajbhandari et al. 2020, ZeRO, section 7.2.1). Stage 1 keeps the whole
gradient until the step's last backward; stage 2 keeps only this rank's share of it between
microbatches, and so reduces once a microbatch.

A gradient that is summed over other ranks once a step (norms over heads, key/value copies, tied
embeddings) lies in a bucket that is reduced last, after that sum.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import Work, all_gather_flat, all_reduce, reduce_scatter_flat
from hocket.runtime.data_parallel.buckets import (
    BUCKET_MB,
    FIRST_BUCKET_MB,
    bucket_sizes,
    grad_dtype,
    on_gradient,
)
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder

IN_FLIGHT = 2
"""Buckets whose reduction may be under way at once: each holds a whole gradient until it ends."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """The part of one parameter that this rank steps.

    Attributes:
        name: of the parameter.
        tensor: 1-D, a view of the parameter's values; its `.grad` is the summed gradient's part.
        start, stop: where it lies in the flattened local parameter.
    """

    name: str
    tensor: nn.Parameter
    start: int
    stop: int


@dataclasses.dataclass(eq=False)
class _Bucket:
    """Parameters that lie side by side in `flat` and travel together."""

    names: list[str]
    parameters: list[nn.Parameter]
    flat: Tensor
    dtype: torch.dtype
    late: bool
    offsets: list[int] = dataclasses.field(default_factory=list)
    pieces: list[tuple[Piece, int]] = dataclasses.field(default_factory=list)
    gradient: Tensor | None = None
    views: list[Tensor] = dataclasses.field(default_factory=list)
    missing: set[int] = dataclasses.field(default_factory=set)
    share: Tensor | None = None
    gathering: Work | None = None

    def view(self, index: int) -> Tensor:
        """The place of one parameter's gradient; the whole gradient is made at the first."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.flat, dtype=self.dtype)
            self.gradient[self.offsets[-1] :].zero_()
            self.views = [
                self.gradient[start : start + parameter.numel()].view_as(parameter)
                for start, parameter in zip(self.offsets, self.parameters, strict=False)
            ]
        return self.views[index]

    def take(self) -> Tensor:
        """The whole gradient, of which nothing is kept here."""
        assert self.gradient is not None
        whole, self.gradient = self.gradient, None
        self.views = []
        return whole

    def all_missing(self) -> None:
        self.missing = set(range(len(self.parameters)))


@dataclasses.dataclass(eq=False)
class _Reduction:
    """One bucket's reduce-scatter under way."""

    bucket: _Bucket
    whole: Tensor
    part: Tensor
    work: Work | None
    start: Any


class ShardedBuckets:
    """The gradients of one stage, summed in shares over the data ranks; and its values, gathered.

    The step is that of `Buckets`: `zero_grad`, backwards, `last_backward` before the last of
    them, `launch`, then `settle`, the sums over other axes, `wait`. Afterwards the pieces hold
    the gradient; the optimizer steps them, and `publish` makes every rank's values whole again.

    Args:
        module: whose parameters are taken over; those that need no gradient are left out. Their
            values move into flat buffers.
        late: names whose gradients are summed over other axes before they are reduced.
        axis: the data ranks that share one state.
        replicas: data ranks that hold the same share (hybrid sharding); of one rank: none.
        recorder: counts each message under the phase `step`.
        each_microbatch: reduce once a microbatch and keep only the share (ZeRO-2).
        bucket_mb, first_mb: as for `Buckets`.
    """

    def __init__(
        self,
        module: nn.Module,
        late: Collection[str],
        axis: Axis,
        replicas: Axis,
        recorder: Recorder,
        *,
        each_microbatch: bool,
        bucket_mb: float = BUCKET_MB,
        first_mb: float = FIRST_BUCKET_MB,
    ) -> None:
        self.axis = axis
        self.replicas = replicas
        self.recorder = recorder
        self.each_microbatch = each_microbatch
        self._last = False
        self._buckets: list[_Bucket] = []
        self._reducing: deque[_Reduction] = deque()
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                kind = (grad_dtype(parameter), parameter.dtype, parameter.device, name in late)
                kinds.setdefault(kind, []).append((name, parameter))
        for (dtype, _, _, is_late), found in kinds.items():
            sizes = [p.numel() * dtype.itemsize for _, p in found]
            for indices in bucket_sizes(sizes, bucket_mb, first_mb):
                self._buckets.append(self._bucket([found[i] for i in indices], dtype, is_late))
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                on_gradient(parameter, partial(self._arrived, bucket, index))
        self._wait_before_use(module)

    def _bucket(
        self, found: list[tuple[str, nn.Parameter]], dtype: torch.dtype, late: bool
    ) -> _Bucket:
        """Move parameters into one flat tensor whose length the axis divides."""
        names, parameters = [n for n, _ in found], [p for _, p in found]
        offsets = [0]
        for parameter in parameters:
            offsets.append(offsets[-1] + parameter.numel())
        share = -(-offsets[-1] // self.axis.size)
        flat = torch.zeros(
            share * self.axis.size, dtype=parameters[0].dtype, device=parameters[0].device
        )
        bucket = _Bucket(names, parameters, flat, dtype, late, offsets)
        mine = (share * self.axis.index, share * (self.axis.index + 1))
        for name, parameter, start in zip(names, parameters, offsets, strict=False):
            place = flat[start : start + parameter.numel()]
            place.copy_(parameter.detach().reshape(-1))
            parameter.data = place.view(parameter.shape)
            first, last = max(start, mine[0]), min(start + parameter.numel(), mine[1])
            if first < last:
                piece = nn.Parameter(flat[first:last])
                piece.grad_dtype = dtype
                bucket.pieces.append(
                    (Piece(name, piece, first - start, last - start), first - mine[0])
                )
        bucket.all_missing()
        return bucket

    def _wait_before_use(self, module: nn.Module) -> None:
        """A module whose parameters are on their way waits for them before it runs."""
        owner = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for child in module.modules():
            held = {id(p): owner[id(p)] for p in child._parameters.values() if id(p) in owner}
            buckets = list({id(b): b for b in held.values()}.values())
            if buckets:
                child.register_forward_pre_hook(partial(self._before_use, buckets))

    # --- what the step sees ------------------------------------------------------------------

    @property
    def pieces(self) -> Iterator[Piece]:
        """What this rank's optimizer steps."""
        return (piece for bucket in self._buckets for piece, _ in bucket.pieces)

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        assert not self._reducing, "wait() for the last step first"
        self._last = False
        for bucket in self._buckets:
            bucket.gradient = bucket.share = None
            bucket.views = []
            bucket.all_missing()
            for parameter in bucket.parameters:
                parameter.grad = None
            for piece, _ in bucket.pieces:
                piece.tensor.grad = None

    def last_backward(self) -> None:
        """The backward that begins now is the step's last."""
        self._last = True

    def launch(self) -> None:
        """Reduce what is left of every bucket that waits for nothing else."""
        for bucket in self._buckets:
            if not bucket.late and self._has_more(bucket):
                self._reduce(bucket)

    def settle(self) -> None:
        """Before gradients are summed over other axes: those still lie whole in `.grad`."""
        self.launch()

    def wait(self) -> None:
        """Wait until every piece's `.grad` holds the sum over the data ranks."""
        self.launch()
        for bucket in self._buckets:
            if bucket.late:
                self._reduce(bucket)
        while self._reducing:
            self._finish(self._reducing.popleft())
        for bucket in self._buckets:
            assert bucket.share is not None
            self._sum_replicas(bucket.share)
            for piece, start in bucket.pieces:
                piece.tensor.grad = bucket.share[start : start + piece.tensor.numel()]
        self._last = False

    def publish(self) -> None:
        """Begin to gather every rank's share of the values, the first to be used first."""
        for bucket in reversed(self._buckets):
            size = bucket.flat.numel() // self.axis.size
            mine = bucket.flat[size * self.axis.index : size * (self.axis.index + 1)]
            with self.recorder.in_phase("step"):
                bucket.gathering = all_gather_flat(bucket.flat, mine, self.axis, self.recorder)

    def arrive(self) -> None:
        """Wait for what `publish` began."""
        for bucket in reversed(self._buckets):
            _arrive(bucket)

    @torch.no_grad()
    def whole_gradients(self) -> dict[str, Tensor]:
        """Every parameter's summed gradient, gathered; for checks. Every rank calls it."""
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            assert bucket.share is not None, "wait() comes first"
            whole = torch.empty_like(bucket.flat, dtype=bucket.dtype)
            work = all_gather_flat(whole, bucket.share, self.axis, self.recorder)
            if work is not None:
                work.wait()
            for name, parameter, start in zip(
                bucket.names, bucket.parameters, bucket.offsets, strict=False
            ):
                found[name] = whole[start : start + parameter.numel()].view_as(parameter)
        return found

    # --- while backward runs -----------------------------------------------------------------

    def _has_more(self, bucket: _Bucket) -> bool:
        """Whether a bucket holds a gradient that is not reduced, or has not been reduced at all."""
        return bucket.gradient is not None or (
            bucket.share is None and not any(r.bucket is bucket for r in self._reducing)
        )

    def _arrived(self, bucket: _Bucket, index: int, parameter: Tensor) -> None:
        view = bucket.view(index)
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if bucket.late or not (self._last or self.each_microbatch):
            return
        bucket.missing.discard(index)
        if not bucket.missing:
            self._reduce(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        for index, parameter in enumerate(bucket.parameters):
            view = bucket.view(index)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = None
        whole = bucket.take()
        bucket.all_missing()
        while len(self._reducing) >= IN_FLIGHT:
            self._finish(self._reducing.popleft())
        part = whole.new_empty(whole.numel() // self.axis.size)
        start = self.recorder.mark()
        with self.recorder.in_phase("step"):
            work = reduce_scatter_flat(part, whole, self.axis, self.recorder)
        self._reducing.append(_Reduction(bucket, whole, part, work, start))

    def _finish(self, reduction: _Reduction) -> None:
        """Wait for one reduction and add what came; its whole gradient is let go."""
        if reduction.work is not None:
            reduction.work.wait()
            self.recorder.add(
                reduction.start,
                "communication",
                "reduce-scatter",
                f"reduce-scatter {self.axis.name}",
                axis=self.axis.name,
                bytes=reduction.whole.numel() * reduction.whole.element_size(),
            )
        bucket = reduction.bucket
        bucket.share = reduction.part if bucket.share is None else bucket.share.add_(reduction.part)

    def _sum_replicas(self, share: Tensor) -> None:
        with self.recorder.in_phase("step"):
            all_reduce(share, self.replicas, self.recorder)

    @staticmethod
    def _before_use(buckets: Iterable[_Bucket], module: nn.Module, args: Any) -> None:
        for bucket in buckets:
            _arrive(bucket)


def _arrive(bucket: _Bucket) -> None:
    if bucket.gathering is not None:
        bucket.gathering.wait()
        bucket.gathering = None
