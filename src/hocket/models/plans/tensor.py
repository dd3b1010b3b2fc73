"""TensorPlan of a Hugging Face model, from transformers' own plan or our table of families.

A block (an attention module, an MLP, a set of experts) is split as a whole or not at all: where
one of its parts has a style we cannot carry out, or holds parameters whose gradients nobody would
sum, the block is held whole on every rank, which is slower and never wrong, and the reason is told.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hocket.models.plans.families import FAMILIES, KINDS_BY_NAME, Family, Rule
from hocket.spec.plan import InputSlice, Patch, Segment, Split, TensorPlan, matches

_UPSTREAM = {
    "colwise": Rule("column"),
    "rowwise": Rule("row"),
    "colwise_gather_output": Rule("column", gather_output=True),
    "rowwise_split_input": Rule("row", scatter_input=True),
    "replicated_with_grad_allreduce": Rule("sum_grad"),
}
_EXPERT_PARAMETERS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups",)


class Unsplittable(Exception):
    """A block that has to be held whole; the text says why."""


@dataclasses.dataclass
class _Block:
    """One attention module, MLP or set of experts: what its plan names inside it."""

    name: str
    module: nn.Module
    rules: dict[str, Rule] = dataclasses.field(default_factory=dict)
    experts: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)


def tensor_plan(model: nn.Module, decoder: str) -> tuple[TensorPlan | None, str]:
    """The tensor plan of a causal language model, and what could not be split and why.

    Args:
        model: the whole model; its device does not matter.
        decoder: name of the module that holds the layers.
    """
    config: Any = model.config
    family = FAMILIES.get(config.model_type)
    if family is not None:
        for key, value in family.unsupported.items():
            if getattr(config, key, None) == value:
                return None, f"{config.model_type} with {key}={value} cannot be split by heads"
        blocks = _blocks_of_family(model, decoder, family)
    else:
        upstream = getattr(config, "base_model_tp_plan", None)
        if not upstream:
            return None, (
                f"neither transformers nor hocket has a tensor plan for {config.model_type!r}"
            )
        blocks = _blocks_of_upstream(model, upstream)

    splits: dict[str, Split] = {}
    patches: dict[str, tuple[Patch, ...]] = {}
    inputs: dict[str, tuple[InputSlice, ...]] = {}
    whole: dict[str, set[str]] = defaultdict(set)
    for block in blocks:
        try:
            splits |= _splits(block, config)
        except Unsplittable as error:
            whole[str(error)].add(_pattern(block.name))
            continue
        found = _patches(block, config, family)
        if found:
            patches[block.name] = found
        if family is not None:
            for pattern, arguments in family.head_inputs.items():
                if matches(_join(decoder, pattern), block.name):
                    inputs[block.name] = tuple(
                        InputSlice(argument=argument, dim=dim, units=config.num_attention_heads)
                        for argument, dim in arguments
                    )
    notes = [f"{', '.join(sorted(names))} held whole: {why}" for why, names in whole.items()]
    if not splits:
        return None, "; ".join(notes) or "its tensor plan matches no module"
    splits |= _vocabulary(model)
    plan = TensorPlan(splits=_folded(splits), patches=_folded(patches), inputs=_folded(inputs))
    return plan, "; ".join(notes)


# --- which modules belong together -------------------------------------------------------------


def _blocks_of_family(model: nn.Module, decoder: str, family: Family) -> list[_Block]:
    blocks: dict[str, _Block] = {}
    for name, _ in model.named_modules():
        for pattern, rule in family.rules.items():
            if matches(_join(decoder, pattern), name):
                parent = name.rpartition(".")[0]
                block = blocks.setdefault(parent, _Block(parent, model.get_submodule(parent)))
                block.rules[name] = rule
    return list(blocks.values())


def _blocks_of_upstream(model: nn.Module, upstream: Mapping[str, str]) -> list[_Block]:
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = prefix if isinstance(getattr(model, prefix, None), nn.Module) else ""
    patterns = {_join(base, pattern): style for pattern, style in upstream.items()}
    blocks: dict[str, _Block] = {}

    def block(name: str) -> _Block:
        return blocks.setdefault(name, _Block(name, model.get_submodule(name)))

    modules = dict(model.named_modules())
    expert_sets = {
        name
        for name in modules
        for pattern, style in patterns.items()
        if style == "moe_tp_experts" and matches(pattern, name)
    }
    for name in modules:
        for pattern, style in patterns.items():
            if name in expert_sets or not matches(pattern, name):
                continue
            parent = name.rpartition(".")[0]
            if style in _UPSTREAM:
                rule = _UPSTREAM[style]
                kind = KINDS_BY_NAME.get(name.rpartition(".")[2], "units")
                block(parent).rules[name] = dataclasses.replace(rule, units=kind)
            elif style != "replicate":
                block(parent).unknown.append(style)
    for name in expert_sets:
        for parameter, _ in modules[name].named_parameters(recurse=False):
            for pattern, style in patterns.items():
                if matches(pattern, f"{name}.{parameter}"):
                    block(name).experts[parameter] = style
        block(name)
    # Bare parameters of an attention module (sinks) and styles of whole modules (`local_params`).
    for pattern, style in patterns.items():
        if style == "moe_tp_experts":
            continue
        for name in list(blocks):
            if style not in _UPSTREAM and matches(pattern, name):
                blocks[name].unknown.append(style)
    return [b for b in blocks.values() if b.rules or b.experts or b.unknown]


# --- how one block is split --------------------------------------------------------------------


def _splits(block: _Block, config: Any) -> dict[str, Split]:
    if block.unknown:
        raise Unsplittable(f"its plan uses {', '.join(sorted(set(block.unknown)))}")
    if block.experts or not block.rules:
        return {block.name: _experts(block)}
    splits: dict[str, Split] = {}
    for name, rule in block.rules.items():
        module = block.module.get_submodule(name[len(block.name) :].lstrip("."))
        if rule.style == "sum_grad":
            splits[name] = Split(style="sum_grad")
        else:
            splits[name] = _linear(name, module, rule, block.module, config)
    cut = any(s.style == "column" and not s.gather_output for s in splits.values())
    joined = any(s.style == "row" and not s.scatter_input for s in splits.values())
    if cut != joined:
        raise Unsplittable("its column-parallel layers have no row-parallel partner")
    # OPT keeps the linear layers of its MLP in the layer itself, beside norms of the whole stream.
    if cut and not block.name.rpartition(".")[2].isdigit():
        splits |= _leftovers(block, splits, config)
    return splits


def _linear(name: str, module: nn.Module, rule: Rule, parent: nn.Module, config: Any) -> Split:
    transposed = isinstance(module, Conv1D)
    if not transposed and type(module).forward is not nn.Linear.forward:
        raise Unsplittable(f"{type(module).__name__} is no plain linear layer")
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
    return Split(
        style=rule.style,
        segments=_segments(kind, rows, parent, config),
        dims=dims,
        gather_output=rule.gather_output,
        scatter_input=rule.scatter_input,
    )


def _segments(kind: str, rows: int, parent: nn.Module, config: Any) -> tuple[Segment, ...]:
    heads = int(config.num_attention_heads)
    size = head_size(parent, config)
    if kind in ("heads", "head_triple"):
        if rows % heads:
            raise Unsplittable(f"{rows} rows are no whole number for each of {heads} heads")
        return (Segment(units=heads, size=rows // heads, what="attention heads"),)
    if kind == "kv":
        if rows % size:
            raise Unsplittable(f"{rows} rows are no whole number of heads of {size}")
        return (_key_value(rows // size, size, heads),)
    if kind == "qkv":
        rest = rows - heads * size
        if rest <= 0 or rest % (2 * size):
            raise Unsplittable(f"{rows} rows are not query, key and value heads of {size}")
        query = Segment(units=heads, size=size, what="attention heads")
        return (query, *([_key_value(rest // 2 // size, size, heads)] * 2))
    if kind == "pair":
        if rows % 2:
            raise Unsplittable(f"{rows} rows are not two halves")
        return (Segment(units=rows // 2, what="feed-forward units"),) * 2
    return (Segment(units=rows, what="feed-forward units"),)


def _key_value(units: int, size: int, heads: int) -> Segment:
    return Segment(units=units, size=size, what="key/value heads", copies=units < heads)


def _experts(block: _Block) -> Split:
    """Stacked experts: every expert's units are split, up projections by output, down by input."""
    parameters = dict(block.module.named_parameters())
    if set(parameters) != set(block.experts):
        missing = ", ".join(sorted(set(parameters) - set(block.experts)))
        raise Unsplittable(f"no style is given for {missing or 'its experts'}")
    dims: dict[str, int] = {}
    segments: dict[str, tuple[Segment, ...]] = {}
    for name, style in block.experts.items():
        if style not in _EXPERT_PARAMETERS or parameters[name].ndim != 3:
            raise Unsplittable(f"its plan uses {style} for {name}")
        dims[name] = 3 + _EXPERT_PARAMETERS[style]
        rows = int(parameters[name].shape[dims[name]])
        if style.startswith("packed"):
            segments[name] = (Segment(units=rows // 2, what="expert units"),) * 2
        elif "gate_up" in name:  # gate and up alternate row by row
            segments[name] = (Segment(units=rows // 2, size=2, what="expert units"),)
        else:
            segments[name] = (Segment(units=rows, what="expert units"),)
    return Split(style="experts", dims=dims, parameter_segments=segments)


def _leftovers(block: _Block, splits: Mapping[str, Split], config: Any) -> dict[str, Split]:
    """Parameters inside a split block that no rule names: norms of single heads sum gradients.

    Raises:
        Unsplittable: a parameter that spans heads or units; each rank would need its slice.
    """
    found: dict[str, Split] = {}
    size = head_size(block.module, config)
    for name, module in block.module.named_modules():
        own = dict(module.named_parameters(recurse=False))
        full = _join(block.name, name)
        if not own or full in splits:
            continue
        if name and all(p.numel() in (1, size) for p in own.values()):
            found[full] = Split(style="sum_grad")
        else:
            raise Unsplittable(f"{type(module).__name__} {name or 'itself'} has no place in a plan")
    return found


def _patches(block: _Block, config: Any, family: Family | None) -> tuple[Patch, ...]:
    """Head counts that the attention module keeps as attributes."""
    query = [r for r in block.rules.values() if r.units in ("heads", "head_triple", "qkv")]
    if not any(r.style == "column" and not r.gather_output for r in query):
        return ()
    module = block.module
    heads = int(config.num_attention_heads)
    size = head_size(module, config)
    kv = _key_value_heads(block, config)
    found = [
        Patch(attribute=name, whole=count)
        for names, count in ((_QUERY_COUNTS, heads), (_KEY_VALUE_COUNTS, kv))
        for name in names
        if getattr(module, name, None) == count
    ]
    found += [
        Patch(attribute=name, whole=heads // kv, ratio=(heads, kv))
        for name in _GROUPS
        if hasattr(module, name)
    ]
    if family is not None:
        found += [
            Patch(attribute=name, whole=heads * size)
            for name in family.widths
            if hasattr(module, name)
        ]
        if family.config_counts:
            found.append(Patch(attribute="num_attention_heads", whole=heads, on_config=True))
            found.append(Patch(attribute="num_key_value_heads", whole=kv, on_config=True))
    return tuple(found)


def _key_value_heads(block: _Block, config: Any) -> int:
    size = head_size(block.module, config)
    for name, rule in block.rules.items():
        if rule.units == "kv":
            linear: Any = block.module.get_submodule(name[len(block.name) :].lstrip("."))
            return int(linear.weight.shape[0]) // size
    count = getattr(config, "num_key_value_heads", None)
    return int(count or config.num_attention_heads)


def _vocabulary(model: nn.Module) -> dict[str, Split]:
    """Embedding and output head by rows of the vocabulary; both or neither where they are tied."""
    names = {id(m): n for n, m in model.named_modules()}
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    splits: dict[str, Split] = {}
    if isinstance(embedding, nn.Embedding) and id(embedding) in names:
        rows = Segment(units=embedding.num_embeddings, what="vocabulary rows", uneven=True)
        splits[names[id(embedding)]] = Split(
            style="vocab_embedding", segments=(rows,), dims={"weight": 0}
        )
    if type(head) is nn.Linear and id(head) in names:
        rows = Segment(units=head.out_features, what="vocabulary rows", uneven=True)
        dims = {"weight": 0} if head.bias is None else {"weight": 0, "bias": 0}
        splits[names[id(head)]] = Split(style="vocab_head", segments=(rows,), dims=dims)
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    return {} if tied and len(splits) == 1 else splits


# --- names -------------------------------------------------------------------------------------


def head_size(module: nn.Module, config: Any) -> int:
    """Size of one attention head: as the module keeps it, else as the configuration says."""
    for name in ("head_dim", "head_size", "attention_head_size"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _folded(values: Mapping[str, Any]) -> dict[str, Any]:
    """One pattern for modules that only differ by their number and are treated alike."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        groups[_pattern(name)][name] = value
    folded: dict[str, Any] = {}
    for pattern, members in groups.items():
        first = next(iter(members.values()))
        if all(value == first for value in members.values()):
            folded[pattern] = first
        else:
            folded |= members
    return folded


def unmatched(model: nn.Module, plan: TensorPlan) -> Iterator[str]:
    """Patterns of a plan that fit no module: a fault of the plan."""
    names = [name for name, _ in model.named_modules()]
    for pattern in (*plan.splits, *plan.patches, *plan.inputs):
        if not any(matches(pattern, name) for name in names):
            yield pattern
