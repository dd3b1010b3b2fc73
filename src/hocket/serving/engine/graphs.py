"""Decode captured in CUDA graphs: a whole step of decoding rows as one launch.

A small model's step is hundreds of kernels of a few microseconds each; launched one by one, the
device waits for Python. A step in which every row adds one token has the same kernels every time,
so it is captured for some numbers of rows, and a step is padded to the next of them:

    rows        1  2  4  8  16  32  64  96  128 ...  512      padding writes to a spare block

The sizes are powers of two, then steps of 32 and of 64: a size costs start-up time and a little
memory, padding costs what the rows cost. A graph reads its indices where `DeviceTables.copied` puts
them, so that a replay is one copy and one launch. It makes the logits of all rows; which of them
are wanted is picked afterwards, so that any step of decoding rows fits: those whose rows ask for
log-probabilities, have penalties, or began in the prefix cache, too.

Over tensor and context ranks the collectives are captured with the rest. NCCL must have made the
communicators before (`StageRunner.warm_up`), every rank must capture the same sizes in the same
order, and no other collective of these groups may run meanwhile: the ranks capture together, on
one stream.

What a capture cannot hold (a model that looks at values on the host, as experts may do) is run
eagerly, on all ranks, and the reason is kept. Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.serving.engine.device_step import Changes, DeviceStep, DeviceTables, HostStep

Forward = Callable[[DeviceStep, "Tensor | None"], Tensor]
"""A step's indices and the hidden state to the hidden state or logits of all rows."""

LARGEST = 512
"""Rows above which a step is not captured: the device has enough to do with each kernel."""
_WARM = 2
"""Runs before a capture: libraries choose kernels and take their workspaces."""


def captured_rows(max_num_seqs: int) -> list[int]:
    """Numbers of rows that are captured, ascending; the last is the smaller of `max_num_seqs` and
    `LARGEST`."""
    last = min(max_num_seqs, LARGEST)
    found = [1 << k for k in range(7)] + [*range(96, 257, 32), *range(320, LARGEST, 64)]
    return [*(n for n in found if n < last), last]


class GraphDevice(Protocol):
    """Streams and graphs of a device: CUDA's, or what a test or a rehearsal puts in their place."""

    def begin(self) -> Any:
        """A pool of memory that all graphs share."""

    def warm(self) -> contextlib.AbstractContextManager[None]:
        """Within, work runs on the stream of captures, and has run at the end."""

    def capture(self, pool: Any) -> contextlib.AbstractContextManager[Any]:
        """Within, work is captured, on the same stream; yields the graph, which can `replay`."""

    def failed(self) -> None:
        """A capture was given up."""


class CudaDevice:
    """CUDA's own, on one side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> Any:
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warm(self) -> Iterator[None]:
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def capture(self, pool: Any) -> Iterator[Any]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog thread asks for events meanwhile, which is not forbidden it.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            yield graph

    def failed(self) -> None:
        torch.cuda.synchronize(self.device)


@dataclasses.dataclass(slots=True)
class _Graph:
    graph: Any
    output: Tensor


class DecodeGraphs:
    """Captured decode steps of one stage.

    Args:
        forward: runs a step.
        tables: of the stage, through which steps reach the device.
        max_num_seqs: most rows of a step.
        hidden: an empty [1, max_num_seqs, H] of what comes from the stage before. None: first
            stage.
        unknown: whether steps may have tokens that only the device knows.
        device: streams and graphs.
        agree: given whether this rank captured a size, whether all ranks did: otherwise one would
            replay collectives that another runs eagerly, and warm up sizes that another left out.

    Attributes:
        reason: why steps run eagerly; empty while they do not.
        replays: steps that were replayed.
    """

    def __init__(
        self,
        forward: Forward,
        tables: DeviceTables,
        *,
        max_num_seqs: int,
        hidden: Tensor | None,
        unknown: bool,
        device: GraphDevice,
        agree: Callable[[bool], bool] = lambda captured: captured,
    ) -> None:
        self.forward, self.tables = forward, tables
        self.agree = agree
        self.sizes = captured_rows(max_num_seqs)
        self.hidden = hidden
        self.unknown = unknown
        self.device = device
        self.reason = ""
        self.replays = 0
        self._pool: Any = None
        self._graphs: dict[int, _Graph] = {}

    def capture(self, wanted: list[int] | None = None) -> None:
        """Capture sizes, the largest first, so that the smaller ones live in its memory.

        Args:
            wanted: sizes. None: all.
        """
        if self._pool is None:
            self._pool = self.device.begin()
        for rows in sorted(self.sizes if wanted is None else wanted, reverse=True):
            reason = "a step of this model cannot be captured by another rank"
            try:
                self._graphs[rows] = self._captured(rows)
                captured = True
            except RuntimeError as error:
                captured = False
                first = (str(error).splitlines() or [type(error).__name__])[0]
                reason = f"a step of this model cannot be captured: {first}"
                self.device.failed()
            if not self.agree(captured):
                self.give_up(reason)
                return

    @property
    def captured(self) -> list[int]:
        """Sizes that can be replayed, ascending."""
        return sorted(self._graphs)

    def give_up(self, reason: str) -> None:
        """Run all steps eagerly from now on."""
        self._graphs.clear()
        self.reason = reason

    def fits(self, step: HostStep, widest: int = 0) -> bool:
        return step.decode and self._size(max(step.rows, widest)) is not None

    def _size(self, rows: int) -> int | None:
        return next((n for n in self.sizes if n >= rows > 0 and n in self._graphs), None)

    def run(
        self, step: HostStep, changes: Changes, hidden: Tensor | None, widest: int = 0
    ) -> Tensor:
        """Replay the next larger size; hidden state [1, R, H], or logits of the wanted rows.

        Args:
            widest: rows of the data rank that has most, whose collectives are the same.
        """
        rows = step.rows
        size = self._size(max(rows, widest))
        assert size is not None
        graph = self._graphs[size]
        step.pad(size, self.tables.max_num_seqs, self.tables.spare_place)
        columns = self.tables.copied(step, changes)
        if hidden is not None:
            assert self.hidden is not None
            self.hidden[:, :rows].copy_(hidden, non_blocking=True)
        graph.graph.replay()
        self.replays += 1
        # Copies: the next replay of any size writes over what this one made.
        if graph.output.dim() == 3:
            return graph.output[:, :rows].clone()
        if len(step.wanted) == rows:
            return graph.output[:rows].clone()
        return graph.output.index_select(0, columns.wanted)

    def _captured(self, rows: int) -> _Graph:
        step = HostStep.padding(rows, self.tables.max_num_seqs, self.tables.spare_place)
        self.tables.copied(step, ([], []))
        with self.device.warm():
            for _ in range(_WARM):
                self._step(rows, step)
        with self.device.capture(self._pool) as graph:
            output = self._step(rows, step)
        return _Graph(graph, output)

    def _step(self, rows: int, step: HostStep) -> Tensor:
        made = self.tables.step_of(
            self.tables.columns(rows), step, unknown=self.unknown, width=self.tables.max_blocks
        )
        made.wanted = None
        return self.forward(made, None if self.hidden is None else self.hidden[:, :rows])
