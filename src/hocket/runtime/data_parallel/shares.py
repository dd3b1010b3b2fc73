"""Shares: gradients summed over the data ranks such that each rank keeps 1/n of the sum.

What all stages of ZeRO have in common: a bucket's whole gradient fills while backward runs, is
reduce-scattered, and freed; what comes is added to the share, which the pieces are given.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import (
    CollectiveWork,
    all_gather_flat,
    all_reduce,
    reduce_scatter_flat,
)
from hocket.runtime.data_parallel.buckets import on_gradient
from hocket.runtime.data_parallel.flat import Bucket, FlatShard
from hocket.runtime.record import Recorder


@dataclasses.dataclass(eq=False)
class BucketReduction:
    """One bucket's reduce-scatter under way."""

    bucket: Bucket
    whole: Tensor
    part: Tensor
    work: CollectiveWork | None
    start: Any


class Shares(abc.ABC):
    """The gradients of one stage, summed in shares over the data ranks.

    The step is that of `Buckets`: `zero_grad`, backwards, `last_backward` before the last of
    them, `launch`, then `flush`, the sums over other axes, `wait`. Afterwards the pieces hold
    the gradient; the optimizer steps them, then `begin_unshard` is called.

    Args:
        buckets: of which those with pieces to step are in order of the module.
        recorder: counts each message under the phase `step`.
        in_flight: buckets whose reduction may be under way at once: each holds a whole gradient
            until it ends.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        recorder: Recorder,
        *,
        in_flight: int,
    ) -> None:
        self.recorder = recorder
        self._in_flight = in_flight
        self._last = False
        self._buckets = list(buckets)
        self._reducing: deque[BucketReduction] = deque()
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                on_gradient(parameter, partial(self._arrived, bucket, index))

    # --- what the step sees ------------------------------------------------------------------

    @property
    def pieces(self) -> Iterator[FlatShard]:
        """What this rank's optimizer steps."""
        return (piece for bucket in self._buckets for piece, _ in bucket.pieces)

    def held(self) -> list[Tensor]:
        """Tensors that hold values in addition to parameters and pieces."""
        return []

    def buffers(self) -> list[Tensor]:
        """Whole gradients and parameters, as far as they have memory now."""
        each = [(bucket.flat, bucket.gradient, bucket.share) for bucket in self._buckets]
        return [tensor for row in each for tensor in row if tensor is not None]

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

    def begins(self, kind: str) -> None:
        """A forward or backward of the stage begins: `kind` is that of its action."""
        # What the microbatch before left under way holds whole gradients: they are freed before
        # activations are made in addition.
        while self._reducing:
            self._finish(self._reducing.popleft())

    def ends(self, kind: str) -> None:  # noqa: B027  nothing to do where all is resident
        """It is over."""

    def last_backward(self) -> None:
        """The backward that begins now is the step's last."""
        self._last = True

    def launch(self) -> None:
        """Reduce what is left of every bucket that waits for nothing else."""
        for bucket in self._buckets:
            if not bucket.late and self._has_more(bucket):
                self._reduce(bucket)

    def flush(self) -> None:
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
            self._sum_replicas(bucket, bucket.share)
        self._to_host()
        for bucket in self._buckets:
            assert bucket.share is not None
            for piece, start in bucket.pieces:
                piece.tensor.grad = bucket.share[start : start + piece.tensor.numel()]
        self._last = False

    def _to_host(self) -> None:
        """Where the host steps the shares, bring their gradients there: many copies, one wait."""
        waits: Any = None
        for bucket in self._buckets:
            share = bucket.share
            if share is None or share.device == bucket.mine.device:
                continue
            if bucket.landing is None:  # kept: pinning is slow, and waits for the device
                bucket.landing = torch.empty_like(share, device="cpu", pin_memory=share.is_cuda)
            bucket.share = bucket.landing.copy_(share, non_blocking=True)
            waits = waits or torch.cuda.Event()  # type: ignore[no-untyped-call]
        if waits is not None:
            waits.record()
            waits.synchronize()

    @abc.abstractmethod
    def begin_unshard(self) -> None:
        """The optimizer has stepped the pieces: begin to tell the other ranks, if they need it."""

    @abc.abstractmethod
    def unshard(self) -> None:
        """Make every parameter whole, for readers and writers outside of a step."""

    def reshard(self) -> None:  # noqa: B027  parameters that are always whole need nothing
        """Those are done."""

    @torch.no_grad()
    def whole_gradients(self) -> dict[str, Tensor]:
        """Every parameter's summed gradient, gathered; for checks. Every rank calls it."""
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            assert bucket.share is not None, "wait() comes first"
            whole = torch.empty_like(bucket.flat, dtype=bucket.dtype)
            share = bucket.share.to(whole.device)
            work = all_gather_flat(whole, share, bucket.axis, self.recorder)
            if work is not None:
                work.wait()
            for name, parameter, start in zip(
                bucket.names, bucket.parameters, bucket.offsets, strict=False
            ):
                found[name] = whole[start : start + parameter.numel()].view(parameter.shape)
        return found

    # --- while backward runs -----------------------------------------------------------------

    def _arrived(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        view = bucket.view(index)
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self._filled(bucket, index)

    def _filled(self, bucket: Bucket, index: int) -> None:  # noqa: B027  as `ends`
        """One more gradient of a bucket is in its place."""

    def _has_more(self, bucket: Bucket) -> bool:
        """Whether a bucket holds a gradient that is not reduced, or has not been reduced at all."""
        return bucket.gradient is not None or (
            bucket.share is None and not any(r.bucket is bucket for r in self._reducing)
        )

    def _reduce(self, bucket: Bucket) -> None:
        for index, parameter in enumerate(bucket.parameters):
            view = bucket.view(index)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = None
        whole = bucket.take()
        bucket.all_missing()
        while len(self._reducing) >= self._in_flight:
            self._finish(self._reducing.popleft())
        part = whole.new_empty(whole.numel() // bucket.axis.size)
        start = self.recorder.mark()
        with self.recorder.in_phase("step"), self.recorder.waiting():
            work = reduce_scatter_flat(part, whole, bucket.axis, self.recorder)
        self._reducing.append(BucketReduction(bucket, whole, part, work, start))

    def _finish(self, reduction: BucketReduction) -> None:
        """Wait for one reduction and add what came; its whole gradient is freed."""
        axis = reduction.bucket.axis
        if reduction.work is not None:
            with self.recorder.waiting():
                reduction.work.wait()
            self.recorder.add(
                reduction.start,
                "communication",
                "reduce-scatter",
                f"reduce-scatter {axis.name}",
                axis=axis.name,
                bytes=reduction.whole.numel() * reduction.whole.element_size(),
            )
        bucket = reduction.bucket
        bucket.share = reduction.part if bucket.share is None else bucket.share.add_(reduction.part)

    def _sum_replicas(self, bucket: Bucket, share: Tensor) -> None:
        with self.recorder.in_phase("step"):
            all_reduce(share, bucket.replicas, self.recorder)
