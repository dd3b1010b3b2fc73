"""ExpertLoad: rows that each expert of a model was given, by layer; under ep and etp.

Modules count on the device what their routers sent them. At a logging interval the counts of all
ranks are summed (one all-reduce) and travel to the host with the losses of the same steps.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.models.plans.experts import named_experts
from hocket.runtime.collectives import all_reduce
from hocket.runtime.expert_parallel import ExpertParallelExperts
from hocket.runtime.parallel import Parallel
from hocket.spec.files import write_text


class ExpertLoad:
    """The counts of one rank's experts, and on rank 0 the sums since the start.

    Args:
        parallel: whose stages are looked through.
        skeleton: the whole model, by which layers are numbered equally on all ranks.
    """

    def __init__(self, parallel: Parallel, skeleton: torch.nn.Module) -> None:
        self._mesh = parallel.mesh
        held = {
            name: module
            for stage in parallel.stages
            for name, module in stage.module.named_modules()
            if isinstance(module, ExpertParallelExperts)
        }
        self._names: list[str] = []
        self._sizes: list[int] = []
        if parallel.layout.splits_experts:
            for name, module in named_experts(skeleton):
                if isinstance(count := getattr(module, "num_experts", None), int):
                    self._names.append(name)
                    self._sizes.append(count)
        self._held = [(self._names.index(name), module) for name, module in held.items()]
        self.total: list[list[int]] = [[0] * size for size in self._sizes]

    def __bool__(self) -> bool:
        return bool(self._names)

    @torch.no_grad()
    def take(self) -> Tensor | None:
        """[L, E] int64: rows of all ranks since the last call. Every rank calls it; no wait. Where
        experts are sliced over tp, each slice counts. None without experts over ranks."""
        if not self._names:
            return None
        found = torch.zeros(
            len(self._names), max(self._sizes), dtype=torch.int64, device=self._mesh.device
        )
        first = self._mesh.axis("expert").index
        for layer, module in self._held:
            if module.load is not None:
                count = module.num_experts
                found[layer, first * count : (first + 1) * count] = module.load
                module.load = None
        with self._mesh.recorder.in_phase("other"):
            all_reduce(found, self._mesh.axis("world"), self._mesh.recorder)
        return found

    def add(self, counts: list[list[int]]) -> float:
        """Add what was read; returns the imbalance of these counts (`imbalance`)."""
        for layer, row in enumerate(counts):
            size = self._sizes[layer]
            self.total[layer] = [a + b for a, b in zip(self.total[layer], row[:size], strict=True)]
        return imbalance([row[:size] for row, size in zip(counts, self._sizes, strict=True)])

    def write(self, path: Path) -> None:
        """Write the sums: `{"layers": [name], "load": [[rows of each expert]]}`."""
        found: dict[str, Any] = {"layers": self._names, "load": self.total}
        write_text(path, json.dumps(found))


def imbalance(counts: list[list[int]]) -> float:
    """Rows of the most loaded expert over the mean, averaged over layers; 1 is even."""
    rows = [max(row) * len(row) / sum(row) for row in counts if sum(row)]
    return sum(rows) / len(rows) if rows else 1.0
