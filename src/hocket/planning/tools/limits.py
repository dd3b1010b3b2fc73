"""Limits: what a piece of software can run of all layouts, as rules over columns of layouts.

The same rules keep a search inside the software (`Problem.legal`) and reject, by name, a layout
whose flags are asked for (`tools.emit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hocket.cost.layout_batch import NAMES, SCHEDULES, Layouts
from hocket.cost.terms import has_latent
from hocket.spec import recompute
from hocket.spec.layout import AXES, Layout
from hocket.spec.model_shape import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the flags of a training step depend on, apart from the layout.

    Attributes:
        model: as it was asked for; `hub_id`: its name on the Hugging Face Hub, where known.
        model_type: of its Hugging Face configuration; empty where not known.
        layers, heads, kv_heads, experts: of the model; 0 experts where it is dense.
        seq_len: tokens of a sequence. global_batch: sequences of a step.
        precision: of matrix products.
        gpus_per_node: of a node of the cluster.
        capability: CUDA compute capability, None on other devices.
        half_of_layers: whether `selective` was estimated as every second layer recomputed
            (torchtitan 0.2), not as attention cores alone (Megatron).
        latent: whether the model has latent attention (MLA).
        predictions: layers for multi-token prediction.
    """

    model: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    seq_len: int
    global_batch: int
    precision: str
    hub_id: str | None = None
    model_type: str = ""
    gpus_per_node: int = 8
    capability: tuple[int, int] | None = None
    half_of_layers: bool = False
    latent: bool = False
    predictions: int = 0

    @classmethod
    def of(cls, shape: ModelShape, **rest: object) -> Facts:
        return cls(
            layers=len(shape.layers), heads=shape.heads, kv_heads=shape.kv_heads,
            experts=shape.experts, latent=has_latent(shape),
            predictions=shape.prediction_layers, **rest,  # type: ignore[arg-type]
        )  # fmt: skip


Broken = Callable[[Layouts, Facts], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ToolRule:
    """Layouts that the software rejects or silently changes.

    Attributes:
        why: the rule; fields of a layout and of `Facts` in braces.
        broken: [r] bool, the rows that break it.
    """

    why: str
    broken: Broken


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """As `ToolRule`, of fields that are no columns (rank order, offload): one layout at a time."""

    why: str
    broken: Callable[[Layout, Facts], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """What one version of one piece of software can run.

    Attributes:
        software: its name and version.
        axes: mesh axes (and `ep`) that may exceed 1.
        schedules, zero, recompute, sequence_parallel, precisions, offload: values it can run.
        orders: rank orders, the fastest-varying axis first; an axis of degree 1 does not count.
        context: exchanges of keys and values over cp.
        shard: whether fewer than all data ranks can share one ZeRO state.
        any_split: whether stages may hold unequal numbers of layers, and which.
        predictions: whether it trains layers for multi-token prediction.
        rules, layout_rules: everything else.
    """

    software: str
    axes: tuple[str, ...] = (*AXES, "ep")
    schedules: tuple[str, ...] = tuple(NAMES)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    orders: tuple[tuple[str, ...], ...] = (Layout().order,)
    offload: tuple[str, ...] = ("none",)
    context: tuple[str, ...] = ("ring", "ulysses")
    shard: bool = True
    any_split: bool = True
    predictions: bool = False
    rules: tuple[ToolRule, ...] = ()
    layout_rules: tuple[LayoutRule, ...] = ()

    def allowed(self, rows: Layouts, facts: Facts) -> np.ndarray:
        """[r] bool: the rows that the software can run."""
        keep = np.ones(len(rows), dtype=bool)
        for rule in self._all_rules():
            keep &= ~rule.broken(rows, facts)
        return keep

    def order(self, layout: Layout) -> bool:
        """Whether ranks can be in the order of a layout."""
        split = [axis for axis in layout.order if layout.degree(axis) > 1]
        return any(split == [axis for axis in order if axis in split] for order in self.orders)

    def reasons(
        self, layout: Layout, rows: Layouts, facts: Facts, context: str = ""
    ) -> Iterator[str]:
        """Why the software cannot run one layout; nothing where it can.

        Args:
            layout: with its pipeline split in numbers.
            rows: the same layout as one row.
            context: how it exchanges keys and values over cp.
        """
        values = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
        values |= {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}
        for rule in self._all_rules():
            if rule.broken(rows, facts)[0]:
                yield rule.why.format(**values)
        for one in self.layout_rules:
            if one.broken(layout, facts):
                yield one.why.format(**values)
        if facts.precision not in self.precisions:
            yield f"precision {facts.precision}: it has {', '.join(self.precisions)}"
        if not self.order(layout):
            known = " and ".join("-".join(order) for order in self.orders)
            yield f"rank order {'-'.join(layout.order)}: it has {known}"
        if layout.offload not in self.offload:
            yield f"offload {layout.offload}: it has {', '.join(self.offload)}"
        if layout.cp > 1 and context and context not in self.context:
            yield f"cp {layout.cp} by {context}: it exchanges by {' or '.join(self.context)}"
        if layout.data_parallel != "processes":
            yield f"data_parallel {layout.data_parallel}: it runs a process for each GPU"
        if (
            isinstance(layout.pipeline_split, tuple)
            and len(set(layout.pipeline_split)) > 1
            and not self.any_split
        ):
            yield (
                f"layers per stage {'-'.join(map(str, layout.pipeline_split))}: it cannot be given "
                "them, and "
                "splits evenly"
            )

    def _all_rules(self) -> Iterator[ToolRule]:
        numbers = {SCHEDULES.index(NAMES[name]) for name in self.schedules}
        for axis in (*AXES, "ep"):
            if axis not in self.axes:
                yield ToolRule(f"{axis} {{{axis}}}: it has no {_NAMES[axis]}", _above_one(axis))
        known = ", ".join(self.schedules)
        yield ToolRule(
            f"schedule {{schedule}}: it has {known}",
            lambda at, _: (at.pp > 1) & ~np.isin(at.schedule, list(numbers)),
        )
        yield ToolRule(
            f"zero {{zero}}: it has ZeRO stages {', '.join(map(str, self.zero))}",
            lambda at, _: (at.dp * at.cp > 1) & ~np.isin(at.zero, self.zero),
        )
        # Of modules any combination.
        bits = 0
        for name in self.recompute:
            bits |= recompute.code(name)
        yield ToolRule(
            f"recompute {{recompute}}: it has {', '.join(self.recompute)}",
            lambda at, _: (at.recompute.astype(int) & ~bits) != 0,
        )
        yield ToolRule(
            "sequence_parallel {sequence_parallel} with tp {tp}: it is always "
            + ("on" if True in self.sequence_parallel else "off"),
            lambda at, _: (
                (at.tp > 1)
                & ~np.isin(at.sequence_parallel, np.array(self.sequence_parallel, dtype=float))
            ),
        )
        if not self.shard:
            yield ToolRule(
                "shard {shard} of dp {dp}: its state is shared by all data ranks",
                lambda at, _: (at.zero > 0) & (at.shard != at.dp),
            )
        if not self.any_split:
            yield ToolRule(
                "{layers} layers over pp {pp} x {virtual_stages} stages: it splits evenly",
                lambda at, facts: (
                    (at.pp > 1) & ((facts.layers % (at.pp * at.virtual) != 0) | (at.lighter > 0))
                ),
            )
        yield from self.rules


_NAMES = {
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
}


def _above_one(axis: str) -> Broken:
    return lambda at, _: getattr(at, axis) > 1


def is_schedule(at: Layouts, name: str) -> np.ndarray:
    """[r] bool: the rows of a pipeline with that schedule."""
    found: np.ndarray = (at.pp > 1) & (at.schedule == SCHEDULES.index(NAMES[name]))
    return found


def division(limits: Sequence[ToolLimits]) -> str:
    """How layers are split over stages where all of this software must be able to."""
    return "balanced" if all(limit.any_split for limit in limits) else "even"
