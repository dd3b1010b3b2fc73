"""Pairs: column- and row-parallel layers that lead into one another, observed in a proxy model.

    x --+--> c1 --+
        +--> c2 --+--> softmax, activation, ... --> r --> y     one block: columns c1, c2, a row r

1  run the proxy model once, cutting autograd's graph behind each linear layer, so that the input of
   a linear layer r comes from is what comes from the layers just before it
2  a block is an r whose input comes from layers c1, c2, ... that are all fed the same x, and from
   nothing else that would have to be split or summed; y is as wide as x
3  ask autograd which rows of c1, c2, ... reach a share of r's inputs: that tells heads, groups of
   them and feed-forward units apart, fused or not, whatever they are called
4  name the kind of rows that explains what was seen

Numbers decide here, names do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.plans.families import ModuleRule
from hocket.models.plans.segments import QUERY_COUNTS, Unsplittable, computes_linear
from hocket.models.proxy import ProxyModel

KINDS = ("heads", "kv", "qkv", "head_triple", "group", "units", "pair", "pair_rows")
"""What the rows of a column-parallel layer may be made of, in the order in which it is tried."""


@dataclasses.dataclass(frozen=True)
class BlockNames:
    """One block: names below a layer.

    Attributes:
        rules: linear layer to rule.
        summed: modules between them whose parameters see some heads on each rank.
        bare: parameters of the module around the columns that are held by heads.
        attention: whether its inner features are heads.
    """

    rules: dict[str, ModuleRule]
    summed: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    attention: bool = False

    @property
    def name(self) -> str:
        """The innermost module around all of it."""
        parts = [name.split(".")[:-1] for name in self.rules]
        shared: list[str] = []
        for column in zip(*parts, strict=False):
            if len(set(column)) > 1:
                break
            shared.append(column[0])
        return ".".join(shared)


def heads_of(module: nn.Module, config: Any) -> int:
    """Query heads: as the module counts them, else as the configuration says; 0 for none."""
    for name in QUERY_COUNTS:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return int(getattr(config, "num_attention_heads", None) or 0)


def pairs(proxy: ProxyModel, layers: str) -> tuple[list[BlockNames], list[str]]:
    """The blocks of the proxy model's layers, each once, and what was found that cannot be split.

    Args:
        proxy: the tiny proxy model of the model.
        layers: name of the list of layers.
    """
    model: Any = proxy.build()
    found: dict[tuple[str, ...], BlockNames | None] = {}
    notes: dict[str, None] = {}
    for layer, calls in _watched(model, layers):
        names = {id(p): n for n, p in layer.named_parameters()}
        held = dict(layer.named_modules())
        for row in calls:
            try:
                pair = _pair(row, calls, names, held, model.config)
            except Unsplittable as error:
                notes[f"*.{row.name}: {error}"] = None
                continue
            if pair is None:
                continue
            key = tuple(sorted(pair.rules))
            # Layers that differ under one name have to agree, or neither is split.
            found[key] = pair if found.get(key, pair) == pair else None
    kept = [pair for pair in found.values() if pair is not None]
    for first in kept:
        for second in kept:
            if first is not second and set(first.rules) & set(second.rules):
                return [], [*notes, "a projection leads into two others"]
    return kept, list(notes)


@dataclasses.dataclass
class _Call:
    """One linear layer as it ran: its input, and its output as a leaf of autograd."""

    name: str
    module: nn.Module
    fed: Tensor
    output: Tensor

    @property
    def source(self) -> tuple[Any, ...]:
        """What tells its input from another tensor."""
        return (self.fed.data_ptr(), tuple(self.fed.shape), tuple(self.fed.stride()))


def _watched(model: Any, layers: str) -> Iterator[tuple[nn.Module, list[_Call]]]:
    """Run the model once: each layer with its linear layers, in the order in which they ran."""
    held = list(model.get_submodule(layers).children())
    calls: list[list[_Call]] = [[] for _ in held]

    def watch(into: list[_Call], name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            if not inputs or not isinstance(output, Tensor):
                return None
            leaf = output.detach().requires_grad_()
            into.append(_Call(name, module, inputs[0], leaf))
            return leaf.clone()  # which may be written into, as Falcon does

        return hook

    for into, layer in zip(calls, held, strict=True):
        for name, module in layer.named_modules():
            if name and computes_linear(module):
                module.register_forward_hook(watch(into, name))
    ids = torch.arange(3, 19).unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with torch.enable_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False)
    yield from zip(held, calls, strict=True)


def _pair(
    row: _Call,
    calls: list[_Call],
    names: dict[int, str],
    held: dict[str, nn.Module],
    config: Any,
) -> BlockNames | None:
    """The block that ends with `row`; None where no block does.

    Raises:
        Unsplittable: a block that cannot be split.
    """
    begun = leaves(row.fed)
    columns = [c for c in calls if id(c.output) in begun]
    others = [leaf for key, leaf in begun.items() if key not in {id(c.output) for c in columns}]
    if not columns or any(id(leaf) not in names for leaf in others):
        return None  # the stream itself reaches it: it begins a block
    inner, width = row.fed.shape[-1], row.output.shape[-1]
    if width != columns[0].fed.shape[-1]:
        return None
    if len({c.source for c in columns}) > 1:
        raise Unsplittable("its inputs are projected from different tensors")
    heads = heads_of(held[columns[0].name.rpartition(".")[0]], config)
    mixes = any(_rows(c, row, slice(1, 2)).sum() > 1 for c in columns)
    attention = mixes and heads > 0 and inner % heads == 0
    size = inner // heads if attention else 1
    used = {names[id(leaf)]: leaf for leaf in others}
    around = columns[0].name.rpartition(".")[0]
    summed, bare = _between(used, around, size, heads)
    rules = {c.name: ModuleRule("column", _kind(c, row, size, attention)) for c in columns}
    rules[row.name] = ModuleRule("row", "heads" if attention else "units")
    return BlockNames(rules, summed, bare, attention)


def _between(
    parameters: dict[str, Tensor], around: str, size: int, heads: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parameters used between columns and row, by name below the layer: (modules of norms over
    one head, bare parameters of the module `around` the columns).

    Raises:
        Unsplittable: a parameter that is neither.
    """
    summed: dict[str, None] = {}
    bare: dict[str, None] = {}
    for name, parameter in parameters.items():
        module, _, own = name.rpartition(".")
        if size > 1 and parameter.shape[0] == heads and module == around:
            bare[own] = None
        elif size > 1 and parameter.numel() in (1, size):
            summed[module] = None
        else:
            raise Unsplittable(f"{module or own} spans all that would be split")
    return tuple(summed), tuple(bare)


def leaves(tensor: Tensor) -> dict[int, Tensor]:
    """What autograd's graph of a tensor begins with, by identity."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    if tensor.grad_fn is None and tensor.requires_grad:
        return {id(tensor): tensor}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        stack += [following for following, _ in node.next_functions]
    return found


def _rows(column: _Call, row: _Call, share: slice) -> Tensor:
    """Which outputs of a column layer reach a share of the row layer's inputs: bool [rows]."""
    part = row.fed[..., share]
    weights = torch.randn(part.shape, generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad(
        (part * weights).sum(), column.output, retain_graph=True, allow_unused=True
    )
    if grad is None:
        return torch.zeros(column.output.shape[-1], dtype=torch.bool)
    return grad.reshape(-1, grad.shape[-1]).abs().sum(0) > 0


def _kind(column: _Call, row: _Call, size: int, attention: bool) -> str:
    """The kind of rows that explains what reaches the first half, and the second quarter.

    Raises:
        Unsplittable: none does.
    """
    rows, inner = column.output.shape[-1], row.fed.shape[-1]
    probes = [slice(0, inner // 2), slice(inner // 4, inner // 2)]
    seen = [_rows(column, row, share) for share in probes]
    for kind in KINDS[:5] if attention else KINDS[5:]:
        expected = [_expected(kind, rows, inner, size, share) for share in probes]
        if all(
            want is not None and bool(got.any()) and not bool((got & ~want).any())
            for got, want in zip(seen, expected, strict=True)
        ):
            return kind
    what = "heads" if attention else "units"
    raise Unsplittable(f"the rows of {column.name} do not fall into {what}")


def _expected(kind: str, rows: int, inner: int, size: int, share: slice) -> Tensor | None:
    """The rows that belong to a share of the inner features; None where the sizes do not fit."""
    start, stop = share.start, share.stop
    wanted = torch.zeros(rows, dtype=torch.bool)

    def key_value(offset: int, width: int) -> None:
        # Heads of `size` features each share one head of the keys with their neighbours.
        per = inner // width
        first, last = start // size // per, -(-(stop // size) // per)
        wanted[offset + first * size : offset + last * size] = True

    rest = rows - inner
    if kind in ("heads", "units") and rows == inner:
        wanted[start:stop] = True
    elif kind == "kv" and rows < inner and rows % size == 0 and inner % rows == 0:
        key_value(0, rows)
    elif kind == "qkv" and rest > 0 and rest % (2 * size) == 0 and inner % (rest // 2) == 0:
        wanted[start:stop] = True
        key_value(inner, rest // 2)
        key_value(inner + rest // 2, rest // 2)
    elif kind == "head_triple" and rows == 3 * inner:
        wanted[3 * start : 3 * stop] = True
    elif kind == "group" and rest > 0 and rest % (2 * size) == 0 and inner % (rest // 2) == 0:
        groups = rest // 2 // size
        per, whole = inner // size // groups, rows // groups
        wanted[start // size // per * whole : -(-(stop // size) // per) * whole] = True
    elif kind == "pair" and rows == 2 * inner:
        wanted[start:stop] = True
        wanted[inner + start : inner + stop] = True
    elif kind == "pair_rows" and rows == 2 * inner:
        wanted[2 * start : 2 * stop] = True
    else:
        return None
    return wanted
