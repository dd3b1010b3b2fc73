"""What one part costs operation by operation, as PyTorch runs it without a compiler.

Attention is a flash kernel here too; scores and probabilities are there where a family computes
them itself. What attention costs without a flash kernel is in the view `core`.
"""

from __future__ import annotations

import collections

from hocket.models.trace.graph import INSIDE, OUTSIDE, WHOLE, Graph
from hocket.models.trace.record import TracedOp
from hocket.spec.model_shape import MemoryBound, Saved


def saved(graph: Graph) -> list[Saved]:
    """Bytes that autograd held, tensor by tensor: each by the name of its value."""
    found = []
    traced = graph.part.traced
    experts = {op.path for op in graph.part.forward if op.kind == "product" and op.groups > 1}
    for value, size in graph.part.saved.items():
        known = graph.values[value]
        if value not in graph.maker and value not in graph.given:
            if known.by_position or (known.by_token and (known.floating or known.square)):
                found.append(_table(graph, value, size))
            continue
        if traced.prime and not known.by_token:
            continue
        split = graph.labels.get(value, OUTSIDE)
        if split == OUTSIDE and value in graph.maker and graph.maker[value].path in experts:
            split = WHOLE
        bytes_ = size / known.numel * known.per_token if traced.prime else size / traced.tokens
        found.append(
            Saved(
                name=graph.value_name(value),
                bytes=bytes_,
                split=split,
                square=traced.prime and known.square,
                view="eager",
            )
        )
    return found


def uneven(graph: Graph) -> bool:
    """Whether autograd held what grows with the rows and not with their tokens: sequences that are
    padded to whole chunks, or a state of each."""
    traced = graph.part.traced
    return any(
        value in graph.maker
        and graph.values[value].numel % traced.rows == 0
        and not graph.values[value].by_token
        for value in graph.part.saved
    )


def backward(graph: Graph) -> list[Saved]:
    """Bytes at the peak of the part's backward beyond what autograd held when it began: gradients
    that are there at once, less saved tensors that are freed by then. Of one traced size alone:
    where a recurrence is written out, each step adds to gradients of whole sequences."""
    part, traced = graph.part, graph.part.traced
    if traced.prime or not part.backward:
        return []
    last: dict[int, int] = {}
    for at, op in enumerate(part.backward):
        _follow_backward(graph, op)
        last |= dict.fromkeys((ref.value for ref in (*op.ins, *op.outs)), at)
    freed: dict[int, list[int]] = collections.defaultdict(list)
    for value, at in last.items():
        freed[at].append(value)
    own = {value for value in part.saved if value in graph.maker or value in graph.given}
    alive = set(own)
    live: dict[str, int] = collections.defaultdict(int)
    peak: dict[str, int] = {}

    def add(value: int, sign: int) -> None:
        known = graph.values[value]
        label = graph.labels.get(value, OUTSIDE)
        live[label] += sign * part.saved.get(value, known.numel * known.itemsize)

    for at, op in enumerate(part.backward):
        for value in {ref.value for ref in op.outs} - alive - part.weight_gradients:
            alive.add(value)
            add(value, 1)
        if sum(live.values()) > sum(peak.values()):
            peak = dict(live)
        for value in alive.intersection(freed[at]):
            alive.remove(value)
            add(value, -1)
    return [
        Saved(name=f"backward {label}", bytes=size / traced.tokens, split=label, view="backward")
        for label, size in peak.items()
    ]


def _table(graph: Graph, value: int, size: int) -> Saved:
    """What all blocks share: a mask, or what there is for each position. That is traced of one
    sequence, and made of each row in training: positions are."""
    known, traced = graph.values[value], graph.part.traced
    each = traced.tokens if known.by_token else traced.sequence
    square = traced.prime and known.square
    same_kind = [key for key, one in graph.values.items() if one.by_position == known.by_position]
    return Saved(
        name=f"{'table' if known.by_position else 'mask'} {same_kind.index(value)}",
        bytes=size / known.numel * known.per_token if square else size / each,
        split=WHOLE,
        square=square,
        view="shared",
    )


def eager_elements(graph: Graph) -> list[MemoryBound]:
    """Elements moved by all operations but products and attention."""
    amounts: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    for at, ops in ((0, graph.part.forward), (1, graph.part.backward)):
        for op in ops:
            if at:
                _follow_backward(graph, op)
            if op.kind != "pointwise" or not (at or _carries(graph, op)):
                continue
            refs = [r for r in (*op.ins, *op.outs) if r.value in graph.values]
            sizes = [(r, graph.values[r.value]) for r in refs if graph.values[r.value].by_token]
            if not sizes or any(value.square for _, value in sizes):
                continue
            label = graph.side([r.value for r, _ in sizes])
            total = sum(
                min(ref.numel, value.numel) / value.numel * value.per_token * value.itemsize / 2
                for ref, value in sizes
            )
            amounts[label][at] += total
            amounts[label][2 + at] += 1
    return [
        MemoryBound(
            name="operations",
            forward=row[0],
            backward=row[1],
            split=label,
            kernels=int(row[2]),
            backward_kernels=int(row[3]),
            view="eager",
        )
        for label, row in amounts.items()
    ]


def _follow_backward(graph: Graph, op: TracedOp) -> None:
    if op.kind == "product":
        ahead = graph.splits.product(op.weight)
        label = {"row": INSIDE}.get(ahead, OUTSIDE)
    else:
        label = graph.side([ref.value for ref in op.ins])
    for ref in op.outs:
        graph.labels.setdefault(ref.value, label)


def _carries(graph: Graph, op: TracedOp) -> bool:
    return any(ref.value in graph.carrying for ref in (*op.ins, *op.outs))
