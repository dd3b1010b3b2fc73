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

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from hocket.runtime.collectives import all_gather_flat
from hocket.runtime.data_parallel.buckets import (
    BUCKET_MB,
    bucket_sizes,
    grad_dtype,
)
from hocket.runtime.data_parallel.flat import Bucket, Owners, bucket_of
from hocket.runtime.data_parallel.shares import Shares
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder

IN_FLIGHT = 2
"""Buckets whose reduction may be under way at once."""


class ShardedBuckets(Shares):
    """The gradients of one stage, summed in shares over the data ranks; and its values, gathered.

    Args:
        module: whose parameters are taken over; those that need no gradient are left out. Their
            values move into flat buffers.
        late: names whose gradients are summed over other axes before they are reduced.
        axis: the data ranks that share one state.
        replicas: data ranks that hold the same share (hybrid sharding); of one rank: none.
        recorder: as for `Shares`.
        others: parameter name to the ranks that share its state where they are not those of `axis`.
        each_microbatch: reduce once a microbatch and keep only the share (ZeRO-2).
        bucket_mb: as for `Buckets`.
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
        others: Mapping[str, Axis] | None = None,
    ) -> None:
        self.each_microbatch = each_microbatch
        owners = Owners(axis, replicas, others or {})
        buckets = list(_buckets(module, late, owners, bucket_mb))
        super().__init__(buckets, recorder, in_flight=IN_FLIGHT)
        self._wait_before_use(module)

    def _wait_before_use(self, module: nn.Module) -> None:
        """A module whose parameters are on their way waits for them before it runs."""
        owner = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        for child in module.modules():
            held = {id(p): owner[id(p)] for p in child._parameters.values() if id(p) in owner}
            buckets = list({id(b): b for b in held.values()}.values())
            if buckets:
                child.register_forward_pre_hook(partial(self._before_use, buckets))

    def begin_unshard(self) -> None:
        """Begin to gather every rank's share of the values, the first to be used first."""
        for bucket in reversed(self._buckets):
            _arrive(bucket)  # of a reader before, of modules that did not run
            with self.recorder.in_phase("step"):
                bucket.gathering = all_gather_flat(
                    bucket.flat, bucket.mine, bucket.axis, self.recorder
                )

    def unshard(self) -> None:
        """Wait for what `begin_unshard` began."""
        for bucket in reversed(self._buckets):
            _arrive(bucket)

    def wait(self) -> None:
        super().wait()
        for bucket in self._buckets:
            _arrive(bucket)  # of modules that did not run: the optimizer writes what is gathered

    def _filled(self, bucket: Bucket, index: int) -> None:
        if bucket.late or not (self._last or self.each_microbatch):
            return
        bucket.missing.discard(index)
        if not bucket.missing:
            self._reduce(bucket)

    @staticmethod
    def _before_use(buckets: Iterable[Bucket], module: nn.Module, args: Any) -> None:
        for bucket in buckets:
            _arrive(bucket)


def _buckets(
    module: nn.Module, late: Collection[str], owners: Owners, bucket_mb: float
) -> Iterator[Bucket]:
    """Parameters in buckets, from the last to the first: of one dtype each, and late or not."""
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            owned = owners.of(name)
            kind = (grad_dtype(parameter), parameter.dtype, parameter.device, name in late, *owned)
            kinds.setdefault(kind, []).append((name, parameter))
    for (dtype, _, _, is_late, axis, replicas), found in kinds.items():
        sizes = [p.numel() * dtype.itemsize for _, p in found]
        for indices in bucket_sizes(sizes, bucket_mb):
            yield bucket_of(
                [found[i] for i in indices], dtype, axis, replicas=replicas, late=is_late
            )


def _arrive(bucket: Bucket) -> None:
    if bucket.gathering is not None:
        bucket.gathering.wait()
        bucket.gathering = None
