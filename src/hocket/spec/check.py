"""CheckReport: how far a layout's run lies from one process, and what still counts as equal.

The tolerances, in fp32 with parameters and optimizer state realigned from the reference after
each step: the loss within 1e-5; each gradient within the larger of 1e-4 of its own largest entry
and 1e-7 of the largest gradient of the model (some gradients are truly zero); each value after
the optimizer step within 0.2 of the learning rate; the norm of the gradient within 1e-4 of itself;
the weights at the start bit for bit; and the blocks that the ranks hold must cover every entry of
every parameter.

Adam divides by the gradient's own size: where that is as small as the rounding of a sum (1e-8, say)
an entry moves by a learning rate in either direction, however right both gradients are. For such
an entry what its own difference of gradient explains is allowed on top (`value_limit`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hocket.spec.files import parse_json
from hocket.spec.placement import TensorBlock

LOSS = 1e-5
OWN_GRADIENT = 1e-4
MODEL_GRADIENT = 1e-7
VALUE = 0.2
NORM = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """The loss and the gradient's global norm of one step, on one process and on the layout (of
    the ranks, the one farthest from it).
    """

    step: int
    reference_loss: float
    loss: float
    reference_norm: float = 0.0
    norm: float = 0.0

    @property
    def difference(self) -> float:
        return abs(self.loss - self.reference_loss)

    @property
    def ok(self) -> bool:
        return (
            self.difference <= LOSS
            and abs(self.norm - self.reference_norm) <= NORM * self.reference_norm
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """One parameter in its global shape, over all ranks that hold a part of it.

    Attributes:
        step: 1, 2, ...; the differences are those of this step alone.
        gradient: largest difference of its gradient, before clipping.
        largest_gradient: largest entry of the reference's gradient.
        gradient_limit: what is allowed.
        value: difference of its value after the optimizer step, of the entry where it comes
            nearest to, or goes farthest over, what is allowed.
        value_limit: what is allowed for that entry.
        start: largest difference of its value before the first step.
        ranks: how many ranks hold a part of it.
        covered: whether those parts together are all of it.
        worst_rank: where the gradient differs most.
    """

    step: int
    name: str
    shape: tuple[int, ...]
    gradient: float
    largest_gradient: float
    gradient_limit: float
    value: float
    value_limit: float
    start: float = 0.0
    ranks: int = 1
    covered: bool = True
    worst_rank: int = 0

    @property
    def ok(self) -> bool:
        return (
            self.gradient <= self.gradient_limit  # written so that NaN is not ok
            and self.value <= self.value_limit
            and self.start <= 0
            and self.covered
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The outcome of a check. JSON form with an exact inverse."""

    model: str
    layout: str
    world_size: int
    learning_rate: float
    steps: tuple[StepRow, ...]
    rows: tuple[ParameterRow, ...]

    @property
    def ok(self) -> bool:
        return not self.failures and bool(self.steps) and bool(self.rows)

    @property
    def worst_ratio(self) -> float:
        """The largest difference relative to what is allowed, over losses, gradients and values;
        1 and less is equal, a difference that is no number is infinite.
        """
        ratios = [s.difference / LOSS for s in self.steps]
        ratios += [r.gradient / r.gradient_limit for r in self.rows if r.gradient_limit > 0]
        ratios += [r.value / r.value_limit for r in self.rows if r.value_limit > 0]
        return max((math.inf if math.isnan(r) else r for r in ratios), default=0.0)

    @property
    def failures(self) -> list[str]:
        """One line for everything that is out of tolerance."""
        found = [
            f"step {s.step}: loss {s.loss:.7g} and gradient norm {s.norm:.7g}, "
            f"one process has {s.reference_loss:.7g} and {s.reference_norm:.7g}"
            for s in self.steps
            if not s.ok
        ]
        for row in self.rows:
            if not row.covered:
                found.append(f"{row.name}: the ranks do not hold all of it")
            elif not row.start <= 0:
                found.append(f"{row.name}: differs by {row.start:.2g} before the first step")
            elif not row.ok:
                found.append(
                    f"step {row.step}: {row.name}: gradient differs by {row.gradient:.2g} "
                    f"(limit {row.gradient_limit:.2g}, worst on rank {row.worst_rank}), "
                    f"value by {row.value:.2g} (limit {row.value_limit:.2g})"
                )
        return found

    def worst(self) -> list[ParameterRow]:
        """One row per parameter: the step in which it came nearest to, or farthest over, a limit.

        Ordered as the model names its parameters.
        """

        def strain(row: ParameterRow) -> float:
            parts = [
                (row.gradient / row.gradient_limit) if row.gradient_limit else row.gradient,
                (row.value / row.value_limit) if row.value_limit else row.value,
            ]
            return float("inf") if any(map(math.isnan, parts)) or not row.ok else max(parts)

        best: dict[str, ParameterRow] = {}
        for row in self.rows:
            if row.name not in best or strain(row) > strain(best[row.name]):
                best[row.name] = row
        return list(best.values())

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "ok": self.ok})

    @classmethod
    def from_json(cls, text: str) -> CheckReport:
        """The inverse of `to_json`."""
        data: dict[str, Any] = parse_json(text)
        data.pop("ok", None)
        data["steps"] = tuple(StepRow(**s) for s in data["steps"])
        data["rows"] = tuple(
            ParameterRow(**{**r, "shape": tuple(r["shape"])}) for r in data["rows"]
        )
        return cls(**data)


def gradient_limit(largest: float, model_largest: float) -> float:
    """What a gradient may differ by: its largest entry, the model's largest entry."""
    return max(OWN_GRADIENT * largest, MODEL_GRADIENT * model_largest)


def value_limit(learning_rate: float) -> float:
    """What a value may differ by after the optimizer step, besides what is explained.

    AdamW moves an entry by lr x m / (sqrt(v) + eps), and a change d of its gradient changes that
    by at most about 2 x lr x d / (sqrt(v) + eps): the part that d explains.
    """
    return VALUE * learning_rate


def covers(shape: Sequence[int], blocks: Iterable[TensorBlock]) -> bool:
    """Whether boxes together hold every entry of a tensor; they may overlap.

    The boxes' edges cut the tensor into a coarse grid whose cells are each held or not, so the
    cost depends on the number of boxes and not on the size of the tensor.
    """
    boxes = {(b.start, b.size) for b in blocks}
    if 0 in shape:
        return True
    edges = [
        sorted({0, n, *(s[d] for s, _ in boxes), *(s[d] + e[d] for s, e in boxes)})
        for d, n in enumerate(shape)
    ]
    for cell in itertools.product(*(e[:-1] for e in edges)):
        if not any(
            all(s <= c < s + e for c, s, e in zip(cell, start, size, strict=True))
            for start, size in boxes
        ):
            return False
    return True


def merged_report(
    known: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    *,
    model: str,
    layout: str,
    lr: float,
) -> CheckReport:
    """One report of what every rank found, over the reference's parameters in their order.

    Args:
        known: of the reference: `shapes` by name, and per step `losses`, `norms` and `largest`
            gradient by name.
        ranks: of each rank: per step `losses`, `norms`, `gradient` and `value` (difference and
            limit) by name; `start`, the `owners` of its names and their `blocks`.
        model, layout, lr: what was checked.
    """
    held: dict[str, list[tuple[int, str]]] = {name: [] for name in known["shapes"]}
    for rank, found in enumerate(ranks):
        for name, owner in found["owners"].items():
            held.setdefault(owner, []).append((rank, name))
    covered = {
        name: covers(known["shapes"].get(name, ()), _blocks(ranks, parts)) and bool(parts)
        for name, parts in held.items()
    }
    steps, rows = [], []
    for index, loss in enumerate(known["losses"]):
        losses = [found["losses"][index] for found in ranks]
        far = max(losses, key=lambda value: _or_inf(abs(value - loss)))
        norm = known["norms"][index]
        steps.append(
            StepRow(
                step=index + 1,
                reference_loss=loss,
                loss=far,
                reference_norm=norm,
                norm=max(
                    (found["norms"][index] for found in ranks), key=lambda n: _or_inf(abs(n - norm))
                ),
            )
        )
        largest = known["largest"][index]
        model_largest = max(largest.values(), default=0.0)
        for name, parts in held.items():
            gradients = [(ranks[r]["gradient"][index][n], r) for r, n in parts]
            gradient, worst_rank = max(gradients, key=lambda g: _or_inf(g[0]), default=(0.0, 0))
            values = [ranks[r]["value"][index][n] for r, n in parts]
            value, allowed = max(
                values,
                key=lambda v: _or_inf(v[0] / v[1]),
                default=(0.0, value_limit(lr)),
            )
            rows.append(
                ParameterRow(
                    step=index + 1,
                    name=name,
                    shape=tuple(known["shapes"].get(name, ())),
                    gradient=gradient,
                    largest_gradient=largest.get(name, 0.0),
                    gradient_limit=gradient_limit(largest.get(name, 0.0), model_largest),
                    value=value,
                    value_limit=allowed,
                    start=max((ranks[r]["start"][n] for r, n in parts), key=_or_inf, default=0.0),
                    ranks=len({r for r, _ in parts}),
                    covered=covered[name],
                    worst_rank=worst_rank,
                )
            )
    return CheckReport(
        model=model,
        layout=layout,
        world_size=len(ranks),
        learning_rate=lr,
        steps=tuple(steps),
        rows=tuple(rows),
    )


def _blocks(ranks: Sequence[Mapping[str, Any]], parts: list[tuple[int, str]]) -> list[TensorBlock]:
    return [
        TensorBlock(
            start=tuple(block["start"]),
            local=tuple(block["local"]),
            size=tuple(block["size"]),
        )
        for rank, name in parts
        for block in ranks[rank]["blocks"][name]
    ]


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
