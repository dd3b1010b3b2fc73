"""Buckets: gradients of replicas, summed while backward still runs.

    parameters, last to first      w9 w8 w7 | w6 w5 w4 | w3 w2 w1
    backward fills                 ======== (1)
                                              ======== (2)
    all-reduce (1)                           ---------
    all-reduce (2)                                      --------

Backward reaches the last layers first, so parameters are put into flat buckets in reverse order
and a bucket is on its way as soon as it is full (Li et al. 2020, PyTorch Distributed). Gradients
are views into the buckets: what arrives is in `.grad` without a copy. Only a step's last backward
fills buckets for good; the earlier microbatches add into them.

The sum is not divided: the loss is divided by the tokens of the global batch already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import CollectiveWork, all_reduce
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder

BUCKET_MB = 25.0
FIRST_BUCKET_MB = 1.0
"""The first bucket is small, so that communication begins early."""


def bucket_sizes(
    sizes: Sequence[int],
    bucket_mb: float = BUCKET_MB,
    first_mb: float = FIRST_BUCKET_MB,
) -> list[list[int]]:
    """Which of `sizes` (bytes, in order of parameters) share a bucket: lists of indices.

    From the last to the first; a bucket is closed when the next one would overfill it.
    """
    buckets: list[list[int]] = []
    room = 0.0
    for index in reversed(range(len(sizes))):
        if not buckets or sizes[index] > room:
            room = 1e6 * (bucket_mb if buckets else min(first_mb, bucket_mb))
            buckets.append([])
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


class _Bucket:
    """Parameters whose gradients lie side by side in `flat` and travel together."""

    def __init__(self, parameters: list[nn.Parameter], axis: Axis) -> None:
        first = parameters[0]
        self.axis = axis
        self.parameters = parameters
        total = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(total, dtype=grad_dtype(first), device=first.device)
        self.views = [
            piece.view_as(p)
            for piece, p in zip(
                torch.split(self.flat, [p.numel() for p in parameters]), parameters, strict=True
            )
        ]
        self.missing = len(parameters)
        self.launched = False
        self.work: CollectiveWork | None = None
        self.start: Any = None


class Buckets:
    """The gradients of one stage, summed over the data ranks.

    A step is `zero_grad`, backwards, `last_backward` before the last of them, `launch`, `wait`.

    Args:
        parameters: (name, parameter) pairs, in the order of use; those that need no gradient
            are left out. A parameter's `grad_dtype` (fp32 for a bf16 one, say) is kept.
        axis: the data ranks.
        others: parameter name to the ranks over which its gradient is summed, where they are not
            those of `axis`; of one rank: over none.
        recorder: counts each all-reduce under the phase `step`.
        bucket_mb: capacity of a bucket in MB (10**6 bytes); one larger parameter has a bucket of
            its own.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        axis: Axis,
        recorder: Recorder,
        *,
        bucket_mb: float = BUCKET_MB,
        others: Mapping[str, Axis] | None = None,
    ) -> None:
        self.recorder = recorder
        self._buckets: list[_Bucket] = []
        self._last = False
        kinds: dict[tuple[torch.dtype, torch.device, Axis], list[nn.Parameter]] = {}
        for name, parameter in parameters:
            if parameter.requires_grad:
                owner = (others or {}).get(name, axis)
                kind = (grad_dtype(parameter), parameter.device, owner)
                kinds.setdefault(kind, []).append(parameter)
        for kind, found in kinds.items():
            sizes = [p.numel() * kind[0].itemsize for p in found]
            for indices in bucket_sizes(sizes, bucket_mb):
                self._buckets.append(_Bucket([found[i] for i in indices], kind[-1]))
        self._handles = [
            on_gradient(parameter, partial(self._arrived, bucket, view))
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of gradients held, which is what one step sends."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        self._last = False
        for bucket in self._buckets:
            assert bucket.work is None, "wait() for the last step first"
            bucket.missing = len(bucket.parameters)
            bucket.launched = False
            for parameter in bucket.parameters:
                parameter.grad = None

    def begins(self, kind: str) -> None:
        """Parameters are whole: they need nothing before a forward or backward."""

    def ends(self, kind: str) -> None:
        """Nor after it."""

    def last_backward(self) -> None:
        """The backward that begins now is the step's last: reduce each bucket once it is full."""
        self._last = True

    def launch(self) -> None:
        """Reduce what is not on its way yet; a parameter that got no gradient counts as zero."""
        for bucket in self._buckets:
            if not bucket.launched:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.grad is None:
                        parameter.grad = view.zero_()
                self._reduce(bucket)

    def flush(self) -> None:
        """Before gradients are summed over other axes: wait for the sum over the data ranks."""
        self.wait()

    def wait(self) -> None:
        """Wait until every `.grad` holds the sum over the data ranks."""
        self.launch()
        for bucket in self._buckets:
            if bucket.work is None:
                continue
            bucket.work.wait()
            bucket.work = None
            self.recorder.add(
                bucket.start,
                "communication",
                "all-reduce",
                f"all-reduce {bucket.axis.name}",
                axis=bucket.axis.name,
                bytes=bucket.flat.numel() * bucket.flat.element_size(),
            )
        self._last = False

    def remove(self) -> None:
        """Take the hooks off the parameters; their gradients stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arrived(self, bucket: _Bucket, view: Tensor, parameter: Tensor) -> None:
        if parameter.grad is not view:
            # A step's first gradient: one copy into the bucket is cheaper than to clear the
            # bucket and add to it.
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._last:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._reduce(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        bucket.launched = True
        bucket.start = self.recorder.mark()
        with self.recorder.in_phase("step"):
            bucket.work = all_reduce(bucket.flat, bucket.axis, self.recorder, async_op=True)


def grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter's gradient is kept and summed."""
    return parameter.grad_dtype or parameter.dtype


def on_gradient(parameter: nn.Parameter, hook: Any) -> Any:
    """Call `hook` with the parameter each time a backward has added to its gradient."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
