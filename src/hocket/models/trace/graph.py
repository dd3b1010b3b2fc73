"""The graph of one part read for a plan: where values lie, what is a copy, what is one kernel.

Kernels of the fused view:

    product, attention    one each
    norm                  a module that divides by a root
    loss                  what follows the logits
    region                other operations that feed one another without a tensor that one of the
                          above reads

Copies and casts are no kernels: an operation writes its tensor as its reader needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hocket.models.trace.record import COPIES, NORMS, TracedOp, TracedPart, Value

INSIDE, OUTSIDE, VOCAB, WHOLE = "inside", "outside", "vocab", "whole"


@dataclasses.dataclass(frozen=True)
class Splits:
    """How tensor parallelism treats weights: name to `column`, `row`, `vocab`, `outside`, `expert`.

    `gathers` are weights of products whose output, split by column, is gathered again, or whose
    whole input each rank takes its part of, split by row; `experts` the modules of stacked
    experts; `up` the stacked weights that are split by output.
    """

    weights: Mapping[str, str]
    gathers: frozenset[str] = frozenset()
    up: frozenset[str] = frozenset()

    def product(self, weight: str) -> str:
        """How the product with a weight is split."""
        split = self.weights.get(weight, OUTSIDE)
        if split == "expert":
            return "column" if weight in self.up else "row"
        return split

    def label(self, weight: str) -> str:
        """Where the output of a product with a weight lies."""
        split = self.product(weight)
        if split == "column" and weight not in self.gathers:
            return INSIDE
        return VOCAB if split == VOCAB else OUTSIDE


class Graph:
    """One part, with what each of its values is.

    Args:
        part: its operations.
        values: every value that was seen.
        splits: of the model's weights.
        window: how far back attention looks in this block.
        kv_heads: of the model's configuration.
        leaves: paths of modules without children, which may be norms.
        linear: paths of linear layers.
    """

    def __init__(
        self,
        part: TracedPart,
        values: Mapping[int, Value],
        splits: Splits,
        *,
        window: int | None = None,
        kv_heads: int = 0,
        leaves: frozenset[str] = frozenset(),
        linear: frozenset[str] = frozenset(),
    ) -> None:
        self.part, self.values, self.splits = part, values, splits
        self.window, self.kv_heads, self.linear = window, kv_heads, linear
        self.norms = {op.path for op in part.forward if op.name in NORMS and op.path in leaves}
        self.given = {ref.value for ref in part.inputs}
        self.returned = {ref.value for ref in part.outputs}
        self.carrying = set(self.given)
        self.labels: dict[int, str] = {}
        self.alias: dict[int, int] = {}
        self.maker: dict[int, TracedOp] = {}
        self.named: dict[int, str] = {}
        self._follow(part.forward)
        self.units = self._units()
        self.anchored = {
            source
            for unit in self.units
            if unit[0].kind != "pointwise" or unit[0].path in {*self.norms, "loss"}
            for op in unit
            for ref in op.ins
            if (source := self.source(ref.value)) in self.values
        }

    def _follow(self, ops: Iterable[TracedOp]) -> None:
        """Where each value lies, what it is a copy of, and whether it carries a gradient."""
        for op in ops:
            sources = [ref.value for ref in op.ins]
            carries = bool(op.weight) or any(v in self.carrying for v in sources)
            label = self._label(op, sources)
            for ref in op.outs:
                value = self.values[ref.value]
                self.labels[ref.value] = label
                self.maker.setdefault(ref.value, op)
                if carries and value.floating:
                    self.carrying.add(ref.value)
            if op.name in COPIES and len(op.outs) == 1 and op.path not in self.norms:
                copied = [v for v in sources if v in self.carrying and v != op.outs[0].value]
                if copied:
                    self.alias[op.outs[0].value] = copied[-1]

    def _label(self, op: TracedOp, sources: list[int]) -> str:
        if op.kind == "product":
            return self.splits.label(op.weight)
        found = {self.labels.get(v, OUTSIDE) for v in sources if v in self.carrying}
        for label in (VOCAB, INSIDE):
            if label in found:
                return label
        return OUTSIDE

    def source(self, value: int) -> int:
        """The value that a copy was made of."""
        while value in self.alias:
            value = self.alias[value]
        return value

    def activation(self, value: int) -> bool:
        return (
            value in self.carrying
            and value in self.values
            and (self.values[value].by_token and not self.values[value].square)
        )

    def _units(self) -> list[list[TracedOp]]:
        """Operations grouped into the kernels of the fused view, in order."""
        groups: dict[object, list[TracedOp]] = {}
        regions: list[TracedOp] = []
        read: set[int] = set(self.returned)
        for op in self.part.forward:
            if op.path == "loss":
                groups.setdefault("loss", []).append(op)
            elif op.kind != "pointwise":
                groups[id(op)] = [op]
            elif op.path in self.norms:
                groups.setdefault(op.path, []).append(op)
            elif self._has_cost(op) and op.outs[0].value not in self.alias:
                regions.append(op)
                continue
            else:
                continue
            read |= {self.source(ref.value) for ref in op.ins}
        leader: dict[int, int] = {}

        def find(index: int) -> int:
            while leader[index] != index:
                index = leader[index]
            return index

        made: dict[int, int] = {}
        for index, op in enumerate(regions):
            leader[index] = index
            for ref in op.ins:
                value = self.source(ref.value)
                if value in made and (value not in read or value == op.outs[0].value):
                    leader[find(index)] = find(made[value])
            for ref in op.outs:
                made[ref.value] = index
        for index, op in enumerate(regions):
            groups.setdefault(("region", find(index)), []).append(op)
        return list(groups.values())

    def _has_cost(self, op: TracedOp) -> bool:
        """Whether an operation works on every token's activations, not on scores or tables."""
        touched = [self.values[r.value] for r in (*op.ins, *op.outs) if r.value in self.values]
        if any(value.square for value in touched):
            return False
        return any(self.activation(ref.value) for ref in op.outs)

    def edges(self, unit: list[TracedOp]) -> tuple[dict[int, float], dict[int, float]]:
        """Activations that a kernel reads from memory and writes to it: value to elements.

        Of a value of which it reads views only, the views count.
        """
        made = {ref.value for op in unit for ref in op.outs}
        inside = {id(op) for op in unit}
        later = {
            self.source(ref.value)
            for op in self.part.forward
            if id(op) not in inside
            for ref in op.ins
        }
        views: dict[int, dict[tuple[int, int], float]] = {}
        for op in unit:
            for ref in op.ins:
                value = self.source(ref.value)
                if ref.value in made or value in made or not self.activation(value):
                    continue
                whole = self.elements(value)
                share = min(1.0, ref.numel / self.values[value].numel)
                if value != ref.value:  # a copy was read: all of what it was made of
                    views.setdefault(value, {})[0, self.values[value].numel] = whole
                else:
                    views.setdefault(value, {})[ref.offset, ref.numel] = whole * share
        tokens = self.part.traced.tokens
        reads = {v: min(self.elements(v), _union(found, tokens)) for v, found in views.items()}
        writes = {
            ref.value: self.elements(ref.value)
            for op in unit
            for ref in op.outs
            if self.activation(ref.value) and ref.value in later | self.returned
        }
        return reads, writes

    def elements(self, value: int) -> float:
        known = self.values[value]
        return known.per_token * known.itemsize / 2

    def side(self, values: Iterable[int]) -> str:
        found = {self.labels.get(v, OUTSIDE) for v in values}
        if VOCAB in found:
            return VOCAB
        # Where a kernel has both sides it is the split one's: it works on what a rank has.
        return INSIDE if INSIDE in found else OUTSIDE

    def unit_name(self, unit: list[TracedOp]) -> str:
        if unit[0].path == "loss":
            return "loss"
        paths = [op.path for op in unit]
        if unit[0].kind == "product":
            return short(paths[0]) or short(unit[0].weight)
        common = paths[0].split(".")
        for path in paths[1:]:
            parts = path.split(".")
            while common != parts[: len(common)]:
                common.pop()
        return short(".".join(common)) or unit[-1].name.strip("_")

    def value_name(self, value: int) -> str:
        if value in self.given:
            return "input"
        op = self.maker.get(value)
        if op is None:
            return ""
        if value not in self.named:
            name = f"{short(op.path)}:{op.name}"
            count = sum(known.partition("#")[0] == name for known in self.named.values())
            self.named[value] = f"{name}#{count + 1}" if count else name
        return self.named[value]


def _union(views: Mapping[tuple[int, int], float], tokens: int) -> float:
    """Elements of views of one value, those inside another (halves of heads) not counted twice."""
    taken: dict[tuple[int, int], float] = {}
    for (offset, numel), size in sorted(views.items(), key=lambda item: -item[0][1]):
        within = any(at <= offset < at + whole / tokens for at, whole in taken)
        if not within:
            taken[offset, numel] = size
    return sum(taken.values())


def short(path: str) -> str:
    """A module's name inside its block: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    parts = path.split(".")
    for at in range(len(parts) - 1, -1, -1):
        if parts[at].isdigit():
            return ".".join(parts[at + 1 :])
    return path
