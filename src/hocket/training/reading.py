"""Reading: loss and gradient norm of a step, kept on the device and read once a logging interval.

    step n      values on the device, an event for the time
    ...
    step n + k  one copy of k rows to pinned memory, begun behind the step's work
                read when the next step's work is queued: the device never waits for the host

A step whose loss or norm is not finite is skipped by the optimizer on the device
(`LossReading.skip`), so a late read reports it before anything was spoiled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.spec.errors import TrainingError

ON_CUDA = 10
"""Steps between reads of a CUDA device, where no interval is given."""


def interval(given: int | None, device: torch.device) -> int:
    """Steps between reads: as given, else 1 on CPU, where a read costs nothing, and 10 on CUDA."""
    if given is not None:
        return given
    return ON_CUDA if device.type == "cuda" else 1


def mark(device: torch.device) -> Any:
    """This moment in the device's work: seconds, or a CUDA event."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed(start: Any, end: Any) -> float:
    """Seconds between two marks that the device has passed."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3


class LossReading:
    """Loss and gradient norm of one step.

    Attributes:
        step, lr: of the step. learned: tokens of its global batch that loss falls on.
        values: [2] fp32 on the device: loss, norm.
        skipped: on CPU, whether the optimizer passed over the step.
        end: a `mark` behind the step's work, set by the loop.
    """

    def __init__(self, step: int, lr: float, loss: Tensor, norm: Tensor, learned: int) -> None:
        self.step = step
        self.learned = learned
        self.lr = lr
        self.values = torch.stack([loss.detach().float(), norm.detach().float()])
        self.end: Any = None
        self.skipped = False

    def skip(self) -> Tensor:
        """1.0 where loss or norm is not finite, else 0.0: a scalar on the device, the same on
        every rank, since both are sums over all of them."""
        # Infinity and NaN less themselves are NaN: three kernels, where `isfinite` makes it seven.
        total = (self.values - self.values).sum()
        return torch.ne(total, 0, out=torch.empty_like(total))

    def not_finite(self, loss: float, norm: float) -> TrainingError:
        """What to raise where one of the two, as read, is not finite."""
        return TrainingError(
            f"step {self.step}: the loss is {loss:g} and the gradient's norm {norm:g} "
            f"at learning rate {self.lr:.3g}",
            hint=f"a lower --lr (such as {self.lr / 4:.1g}), more --warmup, or --max-grad-norm 1",
        )


class Readings:
    """Some steps' readings on their way to the host. Made behind the last step's work.

    Attributes:
        load: [L, E] rows of each expert in these steps, as it was given; None: there are none.
    """

    def __init__(self, readings: Sequence[LossReading], load: Tensor | None = None) -> None:
        self.load = load
        self._readings = list(readings)
        self._event: Any = None
        values = torch.stack([reading.values for reading in readings])
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            if load is not None:
                self.load = torch.empty(load.shape, dtype=load.dtype, pin_memory=True)
                self.load.copy_(load, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values

    def rows(self) -> Iterator[tuple[LossReading, float, float]]:
        """(reading, loss, norm) of each step, once the device is there: one wait for all."""
        if self._event is not None:
            self._event.synchronize()
        for reading, (loss, norm) in zip(self._readings, self._values.tolist(), strict=True):
            yield reading, loss, norm
