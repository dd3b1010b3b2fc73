"""Bytes that the experts of one layer make and drop in a server's step, at their peak.

    rows [S, H] copied for each choice     up [S, n]        gate [S, ..]          largest together
                                           or, later        weighted, in order    [S, H] of each

as transformers computes stacked experts (`grouped_mm_experts_forward`), on one rank. Over ranks the
tokens of all of them are gathered first, of large steps dispatched (`runtime.expert_parallel`), on
average equally many to each; then rows of other ranks' experts are masked in a copy.

Legend: T tokens of a rank, k choices of each, S rows of experts, H hidden, n columns of the first
matrix (of gate and up together).
"""

from __future__ import annotations

from hocket.cost.local import divided
from hocket.spec.expert_dispatch import GATHERED_ROWS, ROWS_AT_ONCE
from hocket.spec.layout import Layout
from hocket.spec.model_shape import BlockShape

INDEX_BYTES = 8
"""Of a choice, of its expert sorted, of the row it comes from and of the row it returns to."""

HELD_INDICES = 2 * INDEX_BYTES + 4
"""Bytes of a row's indices while its experts compute: two of those, and the expert as it is
counted."""

OWN_GATE = 2.5
"""Entries, relative to n, that a gate of experts with biases has at its peak: gpt-oss clamps both
halves and computes three more of the size of one. Elsewhere gate and result, each half of n."""


def expert_bytes(
    block: BlockShape, layout: Layout, tokens: int, *, hidden: int, width: int, weight: int
) -> float:
    """At the peak of a block's experts, on one rank; 0 where it has no stacked experts.

    Args:
        layout: of one replica. tokens: T. hidden: H. width: bytes of an activation. weight: of a
            routing weight, and so of a weighted output.
    """
    stacked = [p for p in block.products if p.groups > 1]
    first = [p for p in stacked if p.k == hidden]
    if not first:
        return 0.0
    choices = max(p.count for p in stacked)
    columns = max(divided(p.split, p.n, p.k, layout.expert_tp)[0] for p in first)
    biased = any(w.name == f"{first[0].name}.{own}" for w in block.weights for own in _BIASES)
    own, rows, over = _rows(layout, tokens, choices, row=hidden * width, weight=weight)
    inner = hidden + columns * (2 + OWN_GATE if biased else 2)
    final = hidden * (2 * width + 2 * max(width, weight) + biased * width) + INDEX_BYTES
    router = next((p.n for p in block.products if p.k == hidden and p.n == first[0].groups), 0)
    chosen = tokens * (choices * (INDEX_BYTES + weight) + router * width)
    return own + over + chosen + rows * (max(inner * width, final) + HELD_INDICES + weight)


_BIASES = ("gate_up_proj_bias", "up_proj_bias")


def _rows(
    layout: Layout, tokens: int, choices: float, *, row: int, weight: int
) -> tuple[float, float, float]:
    """(bytes of gathered or dispatched tokens, rows computed at once, bytes of what rows before
    these came to)."""
    if layout.ep == 1:
        return 0.0, tokens * choices, 0.0
    shared = layout.tp if layout.etp is not None else 1  # tensor ranks, of which each takes a part
    here = -(-tokens // shared)
    part = here * row if shared > 1 else 0
    if (layout.ep - 1) * tokens * choices > GATHERED_ROWS:
        rows = here * choices
        sent = rows * row if shared > 1 else 0  # of a part: as rehearsals count them
        return part + sent + rows * (row + INDEX_BYTES), rows, 0.0
    whole, own = float(layout.ep * here), float(part)
    if shared == layout.ep and layout.etp == 1:
        whole, own = float(tokens), 0.0  # which have all tokens: nothing is gathered
    else:
        own += whole * (row + choices * (weight + 4))
    most = min(whole, max(whole // layout.ep, -(-ROWS_AT_ONCE // choices)))
    own += whole * choices * INDEX_BYTES
    return own, most * choices, (whole - most) * row
