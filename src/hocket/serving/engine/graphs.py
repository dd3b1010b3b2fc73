"""Decode captured in CUDA graphs: a whole step of decoding rows as one launch.

A small model's step is hundreds of kernels of a few microseconds each; launched one by one, the
device waits for Python. A step in which every row adds one token has the same kernels every time,
so it is captured for some numbers of rows, and a step is padded to the next of them:

    rows        1  2  4  8  16  24  32 ...      padding writes to a block that nobody holds

What a capture cannot hold (a model that looks at values on the host, as experts may do) is run
eagerly, and the reason is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hocket.serving.engine.attention_cuda import DeviceStep

Forward = Callable[[DeviceStep, "Tensor | None"], Tensor]
"""A step's indices and the hidden state to the hidden state or logits."""


def sizes(max_rows: int) -> list[int]:
    """Numbers of rows that are captured, ascending; the last is `max_rows`."""
    found = [n for n in (1, 2, 4, 8) if n < max_rows]
    found += range(16, min(max_rows, 256), 8)
    found += range(256, max_rows, 32)
    return [*found, max_rows]


@dataclasses.dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    step: DeviceStep
    hidden: Tensor | None
    output: Tensor


class DecodeGraphs:
    """Captured steps of one stage.

    Args:
        forward: runs a step; what it allocates belongs to the graphs.
        max_rows: most rows of a step.
        max_blocks: blocks of the longest sequence.
        block_size: tokens of a block.
        spare_block: a block that no sequence holds.
        hidden: an empty [1, max_rows, H] of what comes from the stage before. None: first stage.
        device: of the stage.

    Attributes:
        reason: why steps run eagerly; empty while they do not.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        spare_block: int,
        hidden: Tensor | None,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.sizes = sizes(max_rows)
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.spare_block = spare_block
        self.hidden = hidden
        self.device = device
        self.reason = ""
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones live in its memory."""
        try:
            for rows in reversed(self.sizes):
                self._graphs[rows] = self._captured(rows)
        except RuntimeError as error:
            self._graphs.clear()
            self.reason = f"a step of this model cannot be captured: {str(error).splitlines()[0]}"
            torch.cuda.synchronize(self.device)

    def fits(self, step: DeviceStep) -> bool:
        """Whether a step is one that was captured."""
        rows = len(step.counts)
        return bool(self._graphs) and rows <= self.sizes[-1] and step.wanted.shape[0] in (0, rows)

    def run(self, step: DeviceStep, hidden: Tensor | None) -> Tensor:
        """Replay the next larger size; the result's rows are those of the step."""
        rows = len(step.counts)
        graph = self._graphs[next(size for size in self.sizes if size >= rows)]
        fixed = graph.step
        for name in ("tokens", "positions", "places", "lengths"):
            getattr(fixed, name)[:rows].copy_(getattr(step, name), non_blocking=True)
        fixed.tables[:rows, : step.tables.shape[1]].copy_(step.tables, non_blocking=True)
        # Rows of padding left from a larger step write to blocks that are someone else's now.
        fixed.places[rows:].fill_(self.spare_block * self.block_size)
        fixed.lengths[rows:].fill_(1)
        fixed.tables[rows:, 0].fill_(self.spare_block)
        if hidden is not None:
            assert graph.hidden is not None
            graph.hidden[:, :rows].copy_(hidden, non_blocking=True)
        graph.graph.replay()
        if graph.output.dim() == 3:
            return graph.output[:, :rows].clone()
        return graph.output[: step.wanted.shape[0]].clone()

    def padding(self, rows: int) -> DeviceStep:
        """A step of nothing but padding, whose tensors a captured graph reads."""
        device = self.device
        zeros = torch.zeros(rows, dtype=torch.long, device=device)
        tables = torch.full(
            (rows, self.max_blocks), self.spare_block, dtype=torch.int32, device=device
        )
        ones = torch.ones(rows, dtype=torch.int32, device=device)
        begins = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return DeviceStep(
            tokens=zeros.clone(),
            positions=zeros.clone(),
            places=zeros + self.spare_block * self.block_size,
            wanted=torch.arange(rows, device=device),
            begins=begins,
            lengths=ones,
            ends=begins.clone(),
            tables=tables,
            counts=[1] * rows,
            longest=self.max_blocks * self.block_size,
        )

    def _captured(self, rows: int) -> _Graph:
        step = self.padding(rows)
        hidden = None if self.hidden is None else self.hidden[:, :rows]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose kernels and take their workspaces
                self.forward(step, hidden)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self.forward(step, hidden)
        return _Graph(graph, step, hidden, output)
