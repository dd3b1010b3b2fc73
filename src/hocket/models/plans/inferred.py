"""Tensor plan of a model whose family has none, inferred from how its tiny proxy model computes.

Its pairs of projections (`plans.pairs`) are carried over to the layers of the real model.
What no pair holds stays whole, and like every plan the outcome is tried on two ranks before a job
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hocket.models.failure import failure_place
from hocket.models.plans.pairs import BlockNames, heads_of, pairs
from hocket.models.plans.segments import (
    GROUPS,
    KEY_VALUE_COUNTS,
    QUERY_COUNTS,
    Unsplittable,
    dotted_name,
    folded,
    linear_split,
    pattern_of,
)
from hocket.models.proxy import ProxyModel
from hocket.spec.plan import Patch, Split, TensorPlan, WeightSegment

_WIDTHS = ("all_head_size", "embed_dim", "split_size", "hidden_size", "inner_dim", "embed_size")
"""Attributes of attention modules that may hold heads x head size."""

_LEAST = 0.05
"""Share of a layer's parameters above which it is reported that a module is replicated."""


def inferred_plan(
    model: nn.Module, proxy: ProxyModel, layers: str, vocabulary: dict[str, Split]
) -> tuple[TensorPlan | None, str]:
    """A tensor plan from what the proxy model shows, and what could not be split and why.

    Args:
        model: the whole model; its device does not matter.
        proxy: its tiny proxy model.
        layers: name of the list of layers.
        vocabulary: the splits of embedding and head.
    """
    try:
        blocks, notes = pairs(proxy, layers)
    except Exception as error:  # a forward of any family may fail in its own way
        return (
            None,
            "nothing can be inferred from its tiny proxy model, which fails in "
            f"{failure_place(error)}",
        )
    splits: dict[str, Split] = {}
    patches: dict[str, tuple[Patch, ...]] = {}
    for index, layer in enumerate(model.get_submodule(layers).children()):
        held = dict(layer.named_modules())
        for pair in blocks:
            if not all(name in held for name in pair.rules):
                continue  # a layer of another kind
            try:
                found, counts = _applied(pair, held, model.config)
            except Unsplittable as error:
                notes.append(f"*.{pair.name}: {error}")
                continue
            prefix = f"{layers}.{index}"
            splits |= {dotted_name(prefix, name): split for name, split in found.items()}
            patches |= {dotted_name(prefix, name): counted for name, counted in counts.items()}
    replicated = "; ".join(f"replicated: {note}" for note in dict.fromkeys(notes))
    if not splits:
        kind = getattr(model.config, "model_type", "")
        return None, (
            f"{kind!r} has no tensor plan, and none of its blocks can be split"
            + (f" ({'; '.join(dict.fromkeys(notes))})" if notes else "")
        )
    plan = TensorPlan(splits=folded(splits | vocabulary), patches=folded(patches))
    rest = _whole(model.get_submodule(layers), layers, splits)
    return plan, "; ".join(part for part in (replicated, rest and f"replicated: {rest}") if part)


def _whole(layers: nn.Module, prefix: str, splits: Mapping[str, Split]) -> str:
    """The modules of layers that hold much of them and are in no split, as patterns."""
    found: dict[str, None] = {}
    for index, layer in enumerate(layers.children()):
        least = _LEAST * sum(p.numel() for p in layer.parameters())
        for name, module in layer.named_modules():
            own = sum(p.numel() for p in module.parameters(recurse=False))
            if own > least and dotted_name(prefix, str(index), name) not in splits:
                found[pattern_of(dotted_name("*", name))] = None
    return ", ".join(found)


def _applied(
    pair: BlockNames, held: dict[str, nn.Module], config: Any
) -> tuple[dict[str, Split], dict[str, tuple[Patch, ...]]]:
    """One block of one layer of the real model: (splits, patches), by names below the layer."""
    column = next(name for name, rule in pair.rules.items() if rule.style == "column")
    around = column.rpartition(".")[0]
    parent = held[around]
    heads = heads_of(parent, config)
    splits = {
        name: linear_split(held[name], rule, parent, config, heads)
        for name, rule in pair.rules.items()
    }
    splits |= {name: Split(style="sum_grad") for name in pair.summed}
    if pair.bare:
        whole = WeightSegment(units=heads, what="attention heads")
        dims = dict.fromkeys(pair.bare, 0)
        splits[around] = Split(style="column", segments=(whole,), dims=dims)
    if not pair.attention:
        return splits, {}
    inner = next(s.segments[0].rows for s in splits.values() if s.style == "row")
    key_value = next((_key_value_heads(s, heads) for s in splits.values()), heads)
    for split in splits.values():
        if split.style == "column" and split.dims.get("weight") is not None:
            key_value = min(key_value, _key_value_heads(split, heads))
    patches = {}
    for name in dict.fromkeys((around, pair.name)):
        counted = _counts(held[name], heads, key_value, inner)
        if counted:
            patches[name] = counted
    return splits, patches


def _key_value_heads(split: Split, heads: int) -> int:
    """Fewest heads among the segments of a column-parallel layer."""
    return min((s.units for s in split.segments if "head" in s.what), default=heads)


def _counts(module: nn.Module, heads: int, key_value: int, inner: int) -> tuple[Patch, ...]:
    """Numbers of heads, and of their features, that a module keeps as attributes."""
    wanted = [
        *((name, heads) for name in QUERY_COUNTS),
        *((n, key_value) for n in KEY_VALUE_COUNTS),
    ]
    wanted += [(name, inner) for name in _WIDTHS]
    found = [
        Patch(attribute=name, whole=count)
        for name, count in wanted
        if getattr(module, name, None) == count
    ]
    found += [
        Patch(attribute=name, whole=heads // key_value, ratio=(heads, key_value))
        for name in GROUPS
        if hasattr(module, name)
    ]
    return tuple(found)
