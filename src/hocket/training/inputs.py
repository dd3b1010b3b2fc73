"""Inputs: the microbatches of a step on the rank's device, made while the device still works.

B sequences of a microbatch, S tokens. On CPU a batch costs a fraction of a millisecond and is made
when it is asked for. On CUDA the copy leaves from pinned memory without being waited for, and the
loop asks for the next step's batch as soon as this one's work is queued.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.training.dataset import IGNORED, Batch, BatchOrder, TokenDataset

Microbatch = dict[str, Tensor]


class Inputs:
    """Microbatches of one data rank.

    Args:
        dataset: where the samples come from.
        order: global batch, data ranks, microbatches.
        data_rank: index on the data axis.
        device: where the tensors go.
    """

    def __init__(
        self, dataset: TokenDataset, order: BatchOrder, data_rank: int, device: torch.device
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.data_rank = data_rank
        self.device = device
        self._next: tuple[int, list[Microbatch]] | None = None
        positions = torch.arange(dataset.seq_len, device=device)
        self._positions = positions.expand(order.microbatch_size, -1).contiguous()

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` (counted from 0): input_ids, labels, position_ids [B, S]."""
        if self._next is not None and self._next[0] == step:
            found = self._next[1]
            self._next = None
            return found
        return self._make(step)

    def prefetch(self, step: int) -> None:
        """Begin to bring the batch of `step` to the device."""
        if self.device.type == "cuda":
            self._next = (step, self._make(step))

    def num_tokens(self, step: int) -> int:
        """Labels of the global batch of `step` that loss falls on; every rank finds the same."""
        return self.dataset.learned(self.order.step_indices(step))

    def _make(self, step: int) -> list[Microbatch]:
        return self._split(self.dataset.batch(self.order.rank_indices(step, self.data_rank)))

    def held_out(self, batch: int) -> list[Microbatch]:
        """As `step`, of a data set that is gone through once: where it ends, labels are ignored."""
        indices = self.order.rank_indices(batch, self.data_rank)
        found = self.dataset.batch(indices % len(self.dataset))
        found.labels[indices >= len(self.dataset)] = IGNORED
        return self._split(found)

    def _split(self, batch: Batch) -> list[Microbatch]:
        size = self.order.microbatch_size
        found = {"input_ids": batch.ids, "labels": batch.labels}
        if batch.positions is not None:
            found["position_ids"] = batch.positions
        whole = {name: self._brought(torch.from_numpy(rows)) for name, rows in found.items()}
        return [
            {
                "position_ids": self._positions,
                **{name: rows[first : first + size] for name, rows in whole.items()},
            }
            for first in range(0, len(batch.ids), size)
        ]

    def _brought(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True)
