"""Operations: what each collective copies into its slot, and what it makes of all slots.

Letters: n ranks, C bytes of a slot, P bytes of one rank's piece, L bytes of a chunk.

    all-reduce       slots hold the same L bytes of each rank's tensor
                     one phase: every rank sums all n slots (n L read each)
                     two phases: rank r sums the r-th part of all slots into its own, then every
                     rank copies n parts (2 L read each); worth its second wait for many ranks
    broadcast        the root's slot holds L bytes
    all-gather       slots hold L bytes of each rank's piece
    reduce-scatter,  slots hold L <= C / n bytes of each of the n pieces, one after the other
    all-to-all,
    scatter, gather  the same, with one slot written (scatter) or one reader (gather)

Sums run over ranks in the order 0..n-1 on every rank, so all hold the same bits. Half precision
is summed in fp32 and rounded once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hocket.runtime.shm.segment import ShmSegment

_move = ctypes.memmove
_Reducer = Callable[..., Any]

# name -> how two arrays become one; `avg` is a sum divided at the end
NUMPY_OPS: dict[str, _Reducer] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
TORCH_OPS: dict[str, _Reducer] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
HALF = (torch.bfloat16, torch.float16)
NUMPY_TYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
# Below this a second wait costs more than reading all slots; bytes times ranks squared.
TWO_PHASE_BYTES = 1 << 20


class ShmReduction:
    """Reads one chunk of several slots and leaves their reduction in private or shared memory."""

    def __init__(self, dtype: torch.dtype, op: str, num_ranks: int) -> None:
        self.dtype, self.op, self.n = dtype, op, num_ranks
        self.itemsize = dtype.itemsize
        if dtype in HALF:
            known = op in TORCH_OPS
        else:
            real = op in ("sum", "avg", "product") or not dtype.is_complex
            integer = not (dtype.is_floating_point or dtype.is_complex)
            known = dtype in NUMPY_TYPES and (integer if op[0] == "b" else real)
            known = known and (op != "avg" or not integer)
        if not known:
            raise ValueError(f"shm cannot reduce {dtype} by {op}")

    def __call__(self, segment: ShmSegment, offsets: Sequence[int], out: Any) -> None:
        """Reduce what lies at each of `offsets` (bytes in the segment) into the bytes `out`.

        `out` (uint8) says how many bytes there are; it may be one of the parts itself.
        """
        nbytes = len(out)
        if self.dtype in HALF:
            self._half(segment, offsets, out)
            return
        kind = NUMPY_TYPES[self.dtype]
        parts = [segment.bytes[o : o + nbytes].view(kind) for o in offsets]
        target = out.view(kind)
        reduce = NUMPY_OPS[self.op]
        with np.errstate(all="ignore"):  # infinities are the caller's to judge
            self._sum(parts, target, reduce, kind)

    def _sum(self, parts: list[Any], target: Any, reduce: _Reducer, kind: Any) -> None:
        if len(parts) == 1:
            target[:] = parts[0]
            return
        # Where `out` is a part that is read later, the sum needs a place of its own until then.
        late = any(np.may_share_memory(target, part) for part in parts[2:])
        total = reduce(parts[0], parts[1]) if late else reduce(parts[0], parts[1], out=target)
        for part in parts[2:]:
            reduce(total, part, out=total)
        if self.op == "avg":
            total *= kind(1 / self.n)
        if late:
            target[:] = total

    def _half(self, segment: ShmSegment, offsets: Sequence[int], out: Any) -> None:
        nbytes = len(out)
        parts = [torch.from_numpy(segment.bytes[o : o + nbytes]).view(self.dtype) for o in offsets]
        total = parts[0].float()
        for part in parts[1:]:
            TORCH_OPS[self.op](total, part.float(), out=total)
        if self.op == "avg":
            total.mul_(1 / self.n)
        torch.from_numpy(out).view(self.dtype).copy_(total)


def as_bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


class Operation:
    """One collective of one rank, as chunks. Subclasses say what is copied.

    Attributes:
        code: number of the kind of collective; `size`: bytes that all ranks must agree on.
        waits: whether this rank has to wait for the others at all.
        keep: tensors that must outlive the operation; `after` is called at its end.
    """

    code: ClassVar[int] = 0
    name: ClassVar[str] = "barrier"
    two_phases = False
    waits = True

    def __init__(self, num_chunks: int, size: int) -> None:
        self.num_chunks = num_chunks
        self.size = size
        self.first = 0
        self.num_posted = self.num_reduced = self.num_finished = 0
        self.done = False
        self.keep: Any = None
        self.after: Callable[[], None] | None = None

    @staticmethod
    def names() -> dict[int, str]:
        """The kinds of collectives by their codes."""
        kinds = [Operation]
        for kind in kinds:  # grows while it is walked
            kinds += kind.__subclasses__()
        return {kind.code: kind.name for kind in kinds}

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        """Put this rank's part of a chunk into its slot."""

    def middle(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        """Between the two phases: all slots are filled."""

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        """All slots are filled (and reduced): take what is this rank's."""

    def close(self) -> None:
        if self.after is not None:
            self.after()
        self.keep = self.after = None
        self.done = True


def _chunks(nbytes: int, length: int) -> int:
    return max(1, -(-nbytes // length))


class AllReduce(Operation):
    """Reduce a contiguous tensor in place on every rank."""

    code = 1
    name = "all-reduce"

    def __init__(self, segment: ShmSegment, tensor: Tensor, op: str) -> None:
        self.bytes = as_bytes(tensor)
        self.address = tensor.data_ptr()
        self.nbytes = len(self.bytes)
        n = segment.num_ranks
        self.reduction = ShmReduction(tensor.dtype, op, n)
        self.length = segment.slot_size // 16 * 16
        super().__init__(_chunks(self.nbytes, self.length), self.nbytes)
        self.two_phases = n > 2 and min(self.nbytes, self.length) * n * n > TWO_PHASE_BYTES
        self.keep = tensor

    def _span(self, chunk: int) -> tuple[int, int]:
        start = chunk * self.length
        return start, min(self.length, self.nbytes - start)

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start, nbytes = self._span(chunk)
        _move(segment.base + segment.slot(cell, segment.rank), self.address + start, nbytes)

    def _part(self, nbytes: int, rank: int, num_ranks: int) -> tuple[int, int]:
        """Begin and end of the part that `rank` reduces, in whole elements of 16 bytes."""
        share = -(-nbytes // num_ranks)
        share = -(-share // 16) * 16
        return min(rank * share, nbytes), min((rank + 1) * share, nbytes)

    def middle(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        _, nbytes = self._span(chunk)
        begin, end = self._part(nbytes, segment.rank, segment.num_ranks)
        if begin == end:
            return
        offsets = [segment.slot(cell, r) + begin for r in range(segment.num_ranks)]
        mine = offsets[segment.rank]
        self.reduction(segment, offsets, segment.bytes[mine : mine + end - begin])

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start, nbytes = self._span(chunk)
        if not nbytes:
            return
        n = segment.num_ranks
        if not self.two_phases:
            offsets = [segment.slot(cell, r) for r in range(n)]
            self.reduction(segment, offsets, self.bytes[start : start + nbytes])
            return
        for rank in range(n):
            begin, end = self._part(nbytes, rank, n)
            source = segment.base + segment.slot(cell, rank) + begin
            _move(self.address + start + begin, source, end - begin)


class Broadcast(Operation):
    """The root's contiguous tensor to everyone."""

    code = 2
    name = "broadcast"

    def __init__(self, segment: ShmSegment, tensor: Tensor, root: int) -> None:
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel() * tensor.element_size()
        self.root = root
        self.length = segment.slot_size
        super().__init__(_chunks(self.nbytes, self.length), self.nbytes)
        self.waits = segment.rank != root
        self.keep = tensor

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        if segment.rank == self.root:
            start = chunk * self.length
            nbytes = min(self.length, self.nbytes - start)
            _move(segment.base + segment.slot(cell, self.root), self.address + start, nbytes)

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        if segment.rank != self.root:
            start = chunk * self.length
            nbytes = min(self.length, self.nbytes - start)
            _move(self.address + start, segment.base + segment.slot(cell, self.root), nbytes)


class Reduce(Operation):
    """The reduction of contiguous tensors, on the root alone."""

    code = 3
    name = "reduce"

    def __init__(self, segment: ShmSegment, tensor: Tensor, op: str, root: int) -> None:
        self.bytes = as_bytes(tensor)
        self.address = tensor.data_ptr()
        self.nbytes = len(self.bytes)
        self.reduction = ShmReduction(tensor.dtype, op, segment.num_ranks)
        self.length = segment.slot_size
        super().__init__(_chunks(self.nbytes, self.length), self.nbytes)
        self.waits = segment.rank == root
        self.keep = tensor

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start = chunk * self.length
        nbytes = min(self.length, self.nbytes - start)
        _move(segment.base + segment.slot(cell, segment.rank), self.address + start, nbytes)

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start = chunk * self.length
        nbytes = min(self.length, self.nbytes - start)
        if self.waits and nbytes:
            offsets = [segment.slot(cell, r) for r in range(segment.num_ranks)]
            self.reduction(segment, offsets, self.bytes[start : start + nbytes])


class AllGather(Operation):
    """Every rank's piece to everyone.

    `inputs` is this rank's contiguous piece, `outputs` one contiguous tensor (or view) a rank.
    Pieces may differ in size where every rank knows all sizes from its `outputs`.
    """

    code = 4
    name = "all-gather"

    def __init__(self, segment: ShmSegment, outputs: Sequence[Tensor], piece: Tensor) -> None:
        nbytes = piece.numel() * piece.element_size()
        self.piece = piece.data_ptr(), nbytes
        self.outputs = [(t.data_ptr(), t.numel() * t.element_size()) for t in outputs]
        largest = max((size for _, size in self.outputs), default=nbytes)
        self.length = segment.slot_size
        super().__init__(_chunks(largest, self.length), largest)
        self.keep = (outputs, piece)

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        address, nbytes = self.piece
        start = chunk * self.length
        nbytes = min(self.length, nbytes - start)
        if nbytes > 0:
            _move(segment.base + segment.slot(cell, segment.rank), address + start, nbytes)

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start = chunk * self.length
        for rank, (address, nbytes) in enumerate(self.outputs):
            nbytes = min(self.length, nbytes - start)
            if nbytes > 0:
                _move(address + start, segment.base + segment.slot(cell, rank), nbytes)


class Gather(AllGather):
    """Every rank's piece to the root, which alone has `outputs`."""

    code = 5
    name = "gather"

    def __init__(
        self, segment: ShmSegment, outputs: Sequence[Tensor], piece: Tensor, root: int
    ) -> None:
        super().__init__(segment, outputs, piece)
        self.waits = segment.rank == root


class AllToAll(Operation):
    """A piece of P bytes from every rank to every rank; `pieces` and `outputs` are by rank."""

    code = 6
    name = "all-to-all"

    def __init__(
        self,
        segment: ShmSegment,
        outputs: Sequence[Tensor],
        pieces: Sequence[Tensor] | None,
        *,
        op: str | None = None,
        root: int = -1,
    ) -> None:
        n = segment.num_ranks
        first = outputs[0]
        self.nbytes = first.numel() * first.element_size()
        self.pieces = [t.data_ptr() for t in pieces or ()]
        self.outputs = [t.data_ptr() for t in outputs]
        self.reduction = ShmReduction(first.dtype, op, n) if op is not None else None
        self.bytes: Any = as_bytes(first) if op is not None else None
        self.root = root
        self.length = segment.slot_size // n // 16 * 16
        super().__init__(_chunks(self.nbytes, self.length), self.nbytes)
        self.keep = (outputs, pieces)

    def post(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        if self.root not in (-1, segment.rank):
            return
        start = chunk * self.length
        nbytes = min(self.length, self.nbytes - start)
        slot = segment.base + segment.slot(cell, segment.rank)
        for rank, address in enumerate(self.pieces):
            _move(slot + rank * self.length, address + start, nbytes)

    def finish(self, segment: ShmSegment, cell: int, chunk: int) -> None:
        start = chunk * self.length
        nbytes = min(self.length, self.nbytes - start)
        mine = segment.rank * self.length
        if self.reduction is not None:
            if nbytes:
                offsets = [segment.slot(cell, r) + mine for r in range(segment.num_ranks)]
                self.reduction(segment, offsets, self.bytes[start : start + nbytes])
            return
        sources = range(segment.num_ranks) if self.root < 0 else (self.root,)
        for address, rank in zip(self.outputs, sources, strict=True):
            _move(address + start, segment.base + segment.slot(cell, rank) + mine, nbytes)


class ReduceScatter(AllToAll):
    """As all-to-all, and the n pieces that arrive become one by reduction: `outputs[0]`."""

    code = 7
    name = "reduce-scatter"


class Scatter(AllToAll):
    """Only the root has pieces to give, one for each rank's `outputs[0]`."""

    code = 8
    name = "scatter"
