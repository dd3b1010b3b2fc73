"""Reading: loss and gradient norm of a step, read without making the device wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hocket.spec.errors import TrainingError


class Reading:
    """Loss and gradient norm of one step, on their way from the device.

    Attributes:
        step, lr: of the step. learned: tokens of its global batch that loss falls on.
    """

    def __init__(self, step: int, lr: float, loss: Tensor, norm: Tensor, learned: int) -> None:
        self.step = step
        self.learned = learned
        self.lr = lr
        self._event: Any = None
        values = torch.stack([loss.detach().float(), norm.detach().float()])
        if values.is_cuda:
            self._values = torch.empty(2, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values

    def values(self) -> tuple[float, float]:
        """(loss, norm), once the device is there.

        Raises:
            TrainingError: one of them is not finite.
        """
        if self._event is not None:
            self._event.synchronize()
        loss, norm = self._values.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {self.step}: the loss is {loss:g} and the gradient's norm {norm:g} "
                f"at learning rate {self.lr:.3g}",
                hint=f"a lower --lr (such as {self.lr / 4:.1g}), more --warmup, or --clip 1",
            )
        return loss, norm
