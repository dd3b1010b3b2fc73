"""Skipped steps: a step whose loss or gradient is not finite changes nothing on any rank.

Loss and norm are sums over all ranks, so that every rank decides the same without asking. The rank
and the parameter are looked for only then: the first rank whose own loss is not finite, and else
the first that holds a gradient that is not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hocket.spec.errors import TrainingError
from hocket.training import timeline

if TYPE_CHECKING:
    from hocket.launch import RankContext
    from hocket.training.reading import LossReading


class Skips:
    """Counts skipped steps of one rank.

    Args:
        context: of this rank.
        parallel: whose gradients are searched.
        most: skipped steps in a row that are allowed.

    Attributes:
        total: steps skipped so far.
    """

    def __init__(self, context: RankContext, parallel: Any, most: int) -> None:
        self._context, self._parallel, self._most = context, parallel, most
        self._in_a_row = 0
        self.total = 0

    def skipped(self, reading: LossReading, loss: float, norm: float, *, search: bool) -> bool:
        """Whether the step that was read is one to skip. Every rank calls it for every step.

        `search`: its gradients are still there.

        Raises:
            TrainingError: so many in a row are not allowed.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self.total += 1
        place = self._place(reading.step) if search else ""
        if self._in_a_row > self._most:
            error = reading.not_finite(loss, norm)
            before = f"; {self._most} steps before it were skipped" if self._most else ""
            raise TrainingError(f"{error.message}{place}{before}", hint=error.hint)
        if self._context.rank == 0:
            text = f"step {reading.step} is skipped: loss {loss:g}, gradient norm {norm:g}{place}"
            self._context.emit({"event": "note", "text": f"{text} ({self.total} so far)"})
            self._context.emit({"event": "skipped", "step": reading.step, "place": place})
        return True

    def _place(self, step: int) -> str:
        """Rank and parameter, where rank 0 has them from all ranks."""
        own = self._parallel.own_loss
        names = self._parallel.named_stepped()
        bad = (n for n, p in names if p.grad is not None and not torch.isfinite(p.grad).all())
        mine = {
            "loss": own is not None and not bool(torch.isfinite(own)),
            "name": next(bad, None),
        }
        rows = timeline.gather_values(self._context, f"not finite/{step}", mine)
        if rows is None:
            return ""
        losses = [rank for rank, row in enumerate(rows) if row["loss"]]
        grads = [rank for rank, row in enumerate(rows) if row["name"]]
        text = f"; the loss of rank {losses[0]} is the first that is not finite" if losses else ""
        if grads:
            name = rows[grads[0]]["name"]
            text += f"; first parameter with such a gradient: {name}, on rank {grads[0]}"
        return text
