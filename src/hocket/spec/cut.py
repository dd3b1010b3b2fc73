"""The cut: how many layers each pipeline stage holds.

A cut is a tuple of layers per stage. It is given by hand, asked for as `even` or as `light-ends`
(the first and the last stage one layer fewer, as of Llama 3 405B: Grattafiori et al. 2024, section
3.3.2; Megatron-Core's --account-for-embedding-in-pipeline-split and
--account-for-loss-in-pipeline-split), or chosen so that the slowest stage is as fast as it can be
(`balanced`). Costs are in any one unit; only their
ratios matter: the runtime and the planner take those of `matmul_cost`, a token's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hocket.spec import legality
from hocket.spec.errors import LayoutError, unknown
from hocket.spec.layout import CUTS, divisors

Cut = tuple[int, ...]

MOVED = 1000.0
"""Multiply-adds in the time in which a GPU moves one element of an activation through a layer: a
matmul writes it, kernels between matmuls read and write it, the next matmul reads it, and each of
these takes an H100 (989 TFLOP/s, 3.35 TB/s) 295, an A100 (312 TFLOP/s, 2.04 TB/s) 153. Narrow
matmuls, such as those of many small experts, so take longer than their multiply-adds show."""


def matmul_cost(n: float, k: float, rows: float = 1.0, *, cuda: bool) -> float:
    """Time of one token in a matmul [rows, k] x [k, n] and the kernels around it, in multiply-adds.

    Args:
        rows: of the matmul, for each token; of one expert, the share of tokens that it gets.
        cuda: on a GPU. On a CPU, whose matmuls are slow, moving data is left out.
    """
    return rows * (n * k + cuda * MOVED * (n + k))


def choose_cut(
    cut: str | Sequence[int],
    num_layers: int,
    num_stages: int,
    *,
    layer_costs: Sequence[float] | None = None,
    before_cost: float = 0.0,
    after_cost: float = 0.0,
) -> Cut:
    """Layers per stage.

    Args:
        cut: `balanced`, `even`, `light-ends`, or layers per stage by hand.
        num_layers: of the model.
        num_stages: pp x virtual stages.
        layer_costs: one per layer. None: all equal to 1.
        before_cost: of what the first stage holds besides layers (embedding: a lookup, near 0).
        after_cost: of what the last stage holds besides layers (norm, output head, loss).

    Raises:
        LayoutError: the layers do not divide, do not suffice, or do not add up.
    """
    if not isinstance(cut, str):
        by_hand = tuple(cut)
        text = "-".join(map(str, by_hand))
        if len(by_hand) != num_stages:
            raise LayoutError(
                f"the cut {text} names {len(by_hand)} stages, the layout has {num_stages}",
                hint=_hint(num_layers, num_stages),
            )
        if sum(by_hand) != num_layers:
            raise LayoutError(
                f"the cut {text} places {sum(by_hand)} layers, the model has {num_layers}",
                hint=_hint(num_layers, num_stages),
            )
        return by_hand
    if cut not in CUTS:
        message, hint = unknown("pipeline_split", cut, CUTS)
        raise LayoutError(message, hint=hint)
    if cut == "light-ends":
        return _light_ends(num_layers, num_stages)
    if not legality.stages(num_layers, num_stages):
        raise LayoutError(
            f"{num_layers} layers do not fill {num_stages} stages; each needs at least one",
            hint=f"pp{num_layers}" if num_layers > 1 else "pp1",
        )
    if cut == "even":
        return _even(num_layers, num_stages)
    costs = [1.0] * num_layers if layer_costs is None else list(layer_costs)
    assert len(costs) == num_layers, (len(costs), num_layers)
    if before_cost == 0 and num_stages > 1 and len(set(costs)) == 1:
        return _balanced_equal(num_layers, num_stages, costs[0], after_cost)
    return _balanced(costs, num_stages, before_cost, after_cost)


def stage_layers(cut: Sequence[int], stage: int) -> range:
    """The indices of the layers that `stage` holds."""
    first = sum(cut[:stage])
    return range(first, first + cut[stage])


def _hint(num_layers: int, num_stages: int) -> str:
    if num_stages > num_layers:
        return f"pp{num_layers}"
    return "pipeline_split=" + "-".join(map(str, _spread(num_layers, num_stages)))


def _spread(num_layers: int, num_stages: int) -> Cut:
    """As even as it goes, the first stages taking one more."""
    each, rest = divmod(num_layers, num_stages)
    return tuple(each + (s < rest) for s in range(num_stages))


def _even(num_layers: int, num_stages: int) -> Cut:
    if not legality.even_stages(num_layers, num_stages):
        near = sorted(divisors(num_layers), key=lambda n: abs(n - num_stages))[:2]
        raise LayoutError(
            f"{num_layers} layers do not divide over {num_stages} stages; "
            f"stages that divide them: {', '.join(map(str, divisors(num_layers)))}",
            hint=" or ".join(f"pp{n}" for n in sorted(near))
            + f", or {_hint(num_layers, num_stages)}",
        )
    return (num_layers // num_stages,) * num_stages


def _light_ends(num_layers: int, num_stages: int) -> Cut:
    if not legality.light_ends(num_layers, num_stages):
        fitting = [n for n in divisors(num_layers + 2) if n > 1]
        near = min(fitting, key=lambda n: abs(n - num_stages))
        raise LayoutError(
            f"{num_layers} layers cannot be cut into {num_stages} stages of which the first and "
            f"the last have one layer fewer; {', '.join(map(str, fitting))} stages can",
            hint=f"pp{near}, or {_hint(num_layers, num_stages)}",
        )
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)


def _balanced_equal(num_layers: int, num_stages: int, cost: float, after: float) -> Cut:
    """`_balanced` where all layers cost the same and the first stage holds nothing more.

    What the last stage does not hold is then spread evenly over the others.
    """
    found: list[tuple[tuple[float, float], Cut]] = []
    for last in range(1, num_layers - num_stages + 2):
        others = _spread(num_layers - last, num_stages - 1)
        stages = [cost * n for n in others] + [cost * last + after]
        key = round(max(stages), 9), round(sum(c**2 for c in stages), 9)
        found.append((key, (*others, last)))
        if stages[-1] > max(stages[:-1]):
            break  # from here on the last stage alone decides
    return min(found, key=lambda item: item[0])[1]


def _balanced(costs: list[float], num_stages: int, before: float, after: float) -> Cut:
    """The cut whose dearest stage is cheapest; among those, the one of least squares.

    Exact, by dynamic programming over (stages, layers): best[k] is for the first k layers.
    """
    num_layers = len(costs)
    prefix = [0.0, *accumulate(costs)]
    best: list[tuple[float, float, Cut] | None] = [
        (before + prefix[k], (before + prefix[k]) ** 2, (k,)) if k else None
        for k in range(num_layers + 1)
    ]
    if num_stages == 1:
        return (num_layers,)
    for stage in range(1, num_stages):
        extra = after if stage == num_stages - 1 else 0.0
        new: list[tuple[float, float, Cut] | None] = [None] * (num_layers + 1)
        for k in range(stage + 1, num_layers + 1):
            for j in range(stage, k):
                head = best[j]
                if head is None:
                    continue
                cost = prefix[k] - prefix[j] + extra
                found = (max(head[0], cost), head[1] + cost**2, (*head[2], k - j))
                # Equal within rounding: fewer layers late, where the loss is on top.
                now = new[k]
                if now is None or (round(found[0], 9), round(found[1], 9)) <= (
                    round(now[0], 9),
                    round(now[1], 9),
                ):
                    new[k] = found
        best = new
    chosen = best[num_layers]
    assert chosen is not None
    return chosen[2]
