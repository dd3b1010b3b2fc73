"""Mixtures of experts in a table of published training runs: their shape, and how tokens travel.

shape        the catalogue's where a name and the numbers of a row agree with it, else a decoder
             made of the columns experts, top_k, moe_ffn and shared_experts
dispatcher   alltoall sends a copy of a token to each of its experts; flex (DeepEP, HybridEP)
             sends one to each node, and there one to each rank that has any of them
overlap      `EP a2a`: dispatching during the compute of another microbatch; what is left exposed
             is `OVERLAPPED`; a row that says nothing has its software's share
capacity     tokens beyond an expert's capacity are dropped: no rank has more than the mean
routing      natural: the most loaded rank has `NATURAL` times the mean; else even
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from hocket.cost.constants import Constants
from hocket.planning.csv_rows import LeftOut, number
from hocket.planning.expert_decoder import expert_decoder
from hocket.planning.problem import EXPERT_IMBALANCE
from hocket.spec.model_shape import ModelShape

OVERLAPPED = 0.2
"""Share of dispatching that stays exposed where it overlaps with compute of other microbatches: its
first and last part of a step, and the slower kernels of both."""

EXPERT_TIME, EXPERT_PASSES = 1.6e-3, 4.0
"""Seconds that a layer of experts waits for the CPU, and elements that sorting tokens moves, where
dispatching is predicted apart. Software whose rows say nothing of that has longer ones fitted,
which contain what it exposes. Fitted with `OVERLAPPED` and `GRAPHED` to published runs, families of
models left out (docs/reference/accuracy.md)."""

GRAPHED = 0.25
"""Share of the CPU's time for a layer of experts that is left where routing and preprocessing are
captured in a CUDA graph."""

NATURAL = EXPERT_IMBALANCE
"""Tokens of the most loaded expert rank over the mean, in rows whose notes say that routing was
natural; 1 where it was forced to be even, where a capacity bounded it, or where the row says
nothing."""

COLUMNS = (
    "experts", "top_k", "moe_ffn", "shared_experts", "etp", "dispatcher", "overlap", "cuda_graph",
    "attention", "peak_or_steady",
)  # fmt: skip
"""Of a table, in addition to those of dense runs."""

VOCABULARIES = ((r"grok", 131072),)
"""Of models whose rows leave it out: as published (xai-org/grok-1)."""


def made(row: Mapping[str, str]) -> ModelShape:
    """The shape of a mixture from the columns of its row.

    Raises:
        LeftOut: a number that cannot be assumed is missing.
    """
    values: dict[str, int] = {}
    for name in ("experts", "top_k", "moe_ffn", "layers", "hidden", "heads"):
        value = number(row, name)
        if not value:
            what = "the number of experts" if name == "experts" else name
            raise LeftOut(f"mixture of experts: {what} is not among the columns")
        values[name] = int(value)
    ffn = int(number(row, "ffn") or 0)
    vocab = next((n for p, n in VOCABULARIES if re.search(p, row["model"], re.I)), 131072)
    shared = int(number(row, "shared_experts") or 0)
    return expert_decoder(
        layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=int(number(row, "kv_heads") or values["heads"]),
        experts=values["experts"],
        chosen=values["top_k"],
        expert_ffn=values["moe_ffn"],
        shared_ffn=shared * values["moe_ffn"],
        dense_ffn=ffn if ffn and ffn != values["moe_ffn"] else 0,
        vocab=int(number(row, "vocab") or vocab),
        latent=row.get("attention", "").strip().lower() == "mla",
        name=row["model"],
    )


def with_dispatch(values: Constants, row: Mapping[str, str]) -> Constants:
    """Constants of a row that says how its tokens travel."""
    changes: dict[str, float] = {}
    dispatcher, overlap = row.get("dispatcher", "").lower(), row.get("overlap", "").lower()
    graph = row.get("cuda_graph", "").strip().lower()
    if dispatcher:
        changes["merged_copies"] = 2.0 if re.search("flex|deepep", dispatcher) else 0.0
    if re.search(r"\bep (a2a|all)|moe overlap", overlap) and "no ep overlap" not in overlap:
        changes["expert_exposed"] = OVERLAPPED
    elif dispatcher:
        changes["expert_exposed"] = 1.0
    if dispatcher:
        changes |= {"expert_time": EXPERT_TIME, "expert_passes": EXPERT_PASSES}
    if graph and graph != "none":
        changes["expert_time"] = changes.get("expert_time", values.expert_time) * GRAPHED
    if re.search(r"\bnatural routing\b", row.get("notes", ""), re.I):
        changes["expert_imbalance"] = NATURAL
    return dataclasses.replace(values, **changes) if changes else values
