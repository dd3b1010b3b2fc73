"""Inputs: the microbatches of a step on the rank's device, made while the device still works.

B sequences of a microbatch, S tokens. On CPU a batch costs a fraction of a millisecond and is made
when it is asked for. On CUDA the loop asks for the next step's batch as soon as this one's work is
queued, and two sets of device tensors take turns:

    compute   | step n reads set 0           | step n + 1 reads set 1
    copies      step n + 1 -> set 1            step n + 2 -> set 0, behind step n
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.models.rows import Documents, documents_in, note_documents
from hocket.training.dataset import IGNORED, Batch, BatchOrder, RowDataset, TokenDataset

Microbatch = dict[str, Tensor]


class _Set:
    """Device tensors [rows, S] of one step's batch, by name.

    Attributes:
        documents: of each microbatch, where rows are packed. Those that they replace were read by
            the step behind `read`, which is over for the copies' stream by then.
        copied: behind the copies into them, on the copies' stream.
        read: behind the step that reads them, on the compute stream. Until then nothing is written
            into them; they are never freed, so the allocator cannot give them to another stream.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.documents: list[Documents | None] = []
        self.copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]


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
        self._next: int | None = None
        self._copies: Any = None
        self._sets: list[_Set] = []
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._sets = [_Set(), _Set()]
        positions = torch.arange(dataset.seq_len, device=device)
        self._positions = positions.expand(order.microbatch_size, -1).contiguous()

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of `step` (counted from 0): input_ids, labels, position_ids [B, S]."""
        if self._next != step:
            return self._split(self._batch(step))
        self._next = None
        self._sets.reverse()  # the first is the one in use
        torch.cuda.current_stream(self.device).wait_event(self._sets[0].copied)
        return self._microbatches(self._sets[0].tensors, self._sets[0].documents)

    def prefetch(self, step: int) -> None:
        """Begin to bring the batch of `step` to the device."""
        if self.device.type != "cuda":
            return
        used, free = self._sets
        used.read.record(torch.cuda.current_stream(self.device))
        batch = self._batch(step)
        rows = {name: _pinned(rows) for name, rows in _rows(batch).items()}
        documents = self._documents(batch)
        if not free.tensors:
            # The allocator may give memory that work queued on the compute stream still reads.
            free.tensors = {
                name: torch.empty_like(each, device=self.device) for name, each in rows.items()
            }
            free.read.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(free.read)
            for name, each in rows.items():
                free.tensors[name].copy_(each, non_blocking=True)
            free.documents = self._sent(documents)
            free.copied.record(self._copies)
        self._next = step

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents that do not see each other."""
        return isinstance(self.dataset, RowDataset)

    def num_tokens(self, step: int) -> int:
        """Labels of the global batch of `step` that loss falls on; every rank finds the same."""
        return self.dataset.learned(self.order.step_indices(step))

    def of(self, step: int, data_rank: int) -> list[Microbatch]:
        """As `step`, of any data rank; what was prefetched stays."""
        return self._split(self.dataset.batch(self.order.rank_indices(step, data_rank)))

    def _batch(self, step: int) -> Batch:
        return self.dataset.batch(self.order.rank_indices(step, self.data_rank))

    def held_out(self, batch: int) -> list[Microbatch]:
        """As `step`, of a data set that is gone through once: where it ends, labels are ignored."""
        indices = self.order.rank_indices(batch, self.data_rank)
        found = self.dataset.batch(indices % len(self.dataset))
        found.labels[indices >= len(self.dataset)] = IGNORED
        return self._split(found)

    def _split(self, batch: Batch) -> list[Microbatch]:
        whole = {name: self._brought(rows) for name, rows in _rows(batch).items()}
        return self._microbatches(whole, self._sent(self._documents(batch)))

    def _documents(self, batch: Batch) -> list[Documents | None]:
        """Of each microbatch, found here: on CUDA attention does not ask the device for them."""
        if batch.positions is None or self.device.type != "cuda":
            return []
        positions = torch.from_numpy(batch.positions)
        size = self.order.microbatch_size
        return [documents_in(positions[at : at + size]) for at in range(0, len(positions), size)]

    def _sent(self, documents: list[Documents | None]) -> list[Documents | None]:
        """The same with boundaries on the device."""
        return [
            each
            if each is None
            else dataclasses.replace(each, cu_seqlens=self._brought(each.cu_seqlens))
            for each in documents
        ]

    def _microbatches(
        self, whole: Mapping[str, Tensor], documents: Sequence[Documents | None]
    ) -> list[Microbatch]:
        size = self.order.microbatch_size
        found = [
            {
                "position_ids": self._positions,
                **{name: rows[first : first + size] for name, rows in whole.items()},
            }
            for first in range(0, len(whole["input_ids"]), size)
        ]
        for microbatch, each in zip(found, documents, strict=False):
            note_documents(microbatch["position_ids"], each)
        return found

    def _brought(self, rows: Tensor) -> Tensor:
        if self.device.type == "cuda":
            rows = _pinned(rows)
        return rows.to(self.device, non_blocking=True)


def _pinned(rows: Tensor) -> Tensor:
    """A copy in page-locked memory: torch keeps such memory, and gives it out again only when the
    copies from it are over."""
    return torch.empty_like(rows, pin_memory=True).copy_(rows)


def _rows(batch: Batch) -> dict[str, Tensor]:
    """What of a batch goes to the device, each [rows, S], by the name it has in a microbatch."""
    found = {"input_ids": batch.ids, "labels": batch.labels}
    if batch.positions is not None:
        found["position_ids"] = batch.positions
    return {name: torch.from_numpy(rows).contiguous() for name, rows in found.items()}
