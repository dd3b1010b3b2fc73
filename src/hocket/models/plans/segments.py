"""Segments of a linear layer's rows: which belong to one head or unit, and stay together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hocket.models.plans.families import ModuleRule
from hocket.spec.plan import Split, WeightSegment

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUPS = ("num_key_value_groups",)

LINEAR_BY_NAME = ("FalconLinear",)
"""Classes with a forward of their own that computes what a linear layer does."""


class Unsplittable(Exception):
    """A block that has to be replicated; the text says why."""


def computes_linear(module: nn.Module) -> bool:
    """Whether a module computes a product with its weight and nothing else."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or isinstance(module, Conv1D) or type(module).__name__ in LINEAR_BY_NAME


def linear_split(
    module: nn.Module, rule: ModuleRule, parent: nn.Module, config: Any, heads: int | None = None
) -> Split:
    """How a linear layer is split by a rule.

    Args:
        module: the layer.
        rule: its style and the kind of its units.
        parent: the attention module or MLP around it, which may know the size of a head.
        config: of the model.
        heads: query heads. None: as the configuration says.

    Raises:
        Unsplittable: the layer is no plain product, or its rows do not fall into such units.
    """
    if not computes_linear(module):
        raise Unsplittable(f"{type(module).__name__} is not a plain linear layer")
    transposed = isinstance(module, Conv1D)
    weight: Any = module.weight
    shape = tuple(weight.shape)
    outer, inner = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if rule.style == "column":
        dims = {"weight": 1 if transposed else 0}
        if module.bias is not None:
            dims["bias"] = 0
        rows = outer
    else:
        dims = {"weight": 0 if transposed else 1}
        rows = inner
    kind = rule.units
    if rule.gather_output or rule.scatter_input:
        kind = "units"  # the module itself sees the whole tensor: any rows may go anywhere
    size = head_size(parent, config)
    count = query_heads(parent, config) if heads is None else heads
    return Split(
        style=rule.style,
        segments=segments_of(kind, rows, size, count),
        dims=dims,
        gather_output=rule.gather_output,
        scatter_input=rule.scatter_input,
    )


def segments_of(kind: str, rows: int, size: int, heads: int) -> tuple[WeightSegment, ...]:
    """The segments of `rows` rows of one kind (`plans.families`), for heads of `size`.

    Raises:
        Unsplittable: they are no whole number of such units.
    """
    if kind not in ("pair", "pair_rows", "units") and not (size and heads):
        raise Unsplittable("its heads vary from layer to layer, and it does not keep their number")
    if kind in ("heads", "head_triple"):
        if rows % heads:
            raise Unsplittable(f"{rows} rows are not a multiple of {heads} heads")
        return (WeightSegment(units=heads, size=rows // heads, what="attention heads"),)
    if kind == "kv":
        if rows % size:
            raise Unsplittable(f"{rows} rows are not a multiple of the head size {size}")
        return (key_value(rows // size, size, heads),)
    if kind == "qkv":
        rest = rows - heads * size
        if rest <= 0 or rest % (2 * size):
            raise Unsplittable(f"{rows} rows are not query, key and value heads of {size}")
        query = WeightSegment(units=heads, size=size, what="attention heads")
        return (query, *([key_value(rest // 2 // size, size, heads)] * 2))
    if kind == "group":
        groups = (rows - heads * size) // (2 * size)
        if groups <= 0 or rows % groups or heads % groups:
            raise Unsplittable(f"{rows} rows are not groups of query heads, a key and a value")
        return (WeightSegment(units=groups, size=rows // groups, what="groups of attention heads"),)
    if kind in ("pair", "pair_rows"):
        if rows % 2:
            raise Unsplittable(f"{rows} rows are not two halves")
        if kind == "pair_rows":  # gate and up alternate row by row
            return (WeightSegment(units=rows // 2, size=2, what="feed-forward units"),)
        return (WeightSegment(units=rows // 2, what="feed-forward units"),) * 2
    return (WeightSegment(units=rows, what="feed-forward units"),)


def key_value(units: int, size: int, heads: int) -> WeightSegment:
    """Key/value heads, which several ranks may hold where they are fewer than the queries."""
    return WeightSegment(units=units, size=size, what="key/value heads", copies=units < heads)


def head_size(module: nn.Module, config: Any) -> int:
    """Size of one attention head: as the module keeps it, else as the configuration says; 0 where
    it says one for each layer."""
    for name in ("head_dim", "head_size", "attention_head_size"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    heads = query_heads(module, config)
    return int(_said(config, "head_dim") or (config.hidden_size // heads if heads else 0))


def query_heads(module: nn.Module, config: Any) -> int:
    """Query heads: as the configuration says, or the module where it says one for each layer."""
    said = _said(config, "num_attention_heads")
    kept = (getattr(module, name, None) for name in QUERY_COUNTS)
    return int(said or next((n for n in kept if isinstance(n, int) and n > 0), 0))


def _said(config: Any, name: str) -> Any:
    """What a configuration says; None where layers differ in it, which it then refuses to say."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


# --- names -------------------------------------------------------------------------------------


def dotted_name(*parts: str) -> str:
    """The dotted name of parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def pattern_of(name: str) -> str:
    """The pattern of all modules that differ from one by their number only."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def folded(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern for modules that only differ by their number and are treated equally."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        groups[pattern_of(name)][name] = value
    found: dict[str, Any] = {}
    for pattern, members in groups.items():
        first = next(iter(members.values()))
        if all(value == first for value in members.values()):
            found[pattern] = first
        else:
            found |= members
    return found
