"""TensorPlan of a Hugging Face model, from transformers' own plan, our table of families, or what
its tiny proxy model shows.

A block (an attention module, an MLP, a set of experts) is split as a whole or not at all: where
one of its parts has a style we cannot carry out, or holds parameters whose gradients nobody would
sum, the block is replicated on every rank, which is slower and never wrong; the reason is reported.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from hocket.models.plans.families import FAMILIES, KINDS_BY_NAME, ModuleRule, PlanFamily
from hocket.models.plans.inferred import inferred_plan
from hocket.models.plans.segments import (
    GROUPS,
    KEY_VALUE_COUNTS,
    QUERY_COUNTS,
    Unsplittable,
    dotted_name,
    folded,
    head_size,
    linear_split,
    pattern_of,
    query_heads,
)
from hocket.models.proxy import ProxyModel
from hocket.spec.plan import InputSlice, Patch, Split, TensorPlan, WeightSegment, matches

_UPSTREAM = {
    "colwise": ModuleRule("column"),
    "rowwise": ModuleRule("row"),
    "colwise_gather_output": ModuleRule("column", gather_output=True),
    "rowwise_split_input": ModuleRule("row", scatter_input=True),
    "replicated_with_grad_allreduce": ModuleRule("sum_grad"),
}
_EXPERT_PARAMETERS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}


@dataclasses.dataclass
class _Block:
    """One attention module, MLP or set of experts: what its plan names inside it."""

    name: str
    module: nn.Module
    rules: dict[str, ModuleRule] = dataclasses.field(default_factory=dict)
    experts: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)


def tensor_plan(
    model: nn.Module, decoder: str, proxy: ProxyModel | None = None, layers: str = ""
) -> tuple[TensorPlan | None, str]:
    """The tensor plan of a causal language model, and what could not be split and why.

    Args:
        model: the whole model; its device does not matter.
        decoder: name of the module that holds the layers.
        proxy: its proxy model, from which a plan is inferred where it has none. None: no inference.
        layers: name of the list of layers.
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
        if not upstream and proxy is not None and layers:
            return inferred_plan(model, proxy, layers, _vocabulary(model))
        if not upstream:
            return None, (
                f"neither transformers nor hocket has a tensor plan for {config.model_type!r}, "
                "and without a list of layers none can be inferred"
            )
        blocks = _blocks_of_upstream(model, upstream, decoder)

    splits: dict[str, Split] = {}
    patches: dict[str, tuple[Patch, ...]] = {}
    inputs: dict[str, tuple[InputSlice, ...]] = {}
    whole: dict[str, set[str]] = defaultdict(set)
    for block in blocks:
        try:
            splits |= _splits(block, config)
        except Unsplittable as error:
            whole[str(error)].add(pattern_of(block.name))
            continue
        found = _patches(block, config, family)
        if found:
            patches[block.name] = found
        if family is not None:
            for pattern, arguments in family.head_inputs.items():
                if matches(dotted_name(decoder, pattern), block.name):
                    inputs[block.name] = tuple(
                        InputSlice(argument=argument, dim=dim, units=config.num_attention_heads)
                        for argument, dim in arguments
                    )
    for pattern, why in (family.whole if family is not None else {}).items():
        whole[why].add(dotted_name(decoder, pattern))
    notes = [f"{', '.join(sorted(names))} replicated: {why}" for why, names in whole.items()]
    if not splits:
        return None, "; ".join(notes) or "its tensor plan matches no module"
    splits |= _vocabulary(model)
    plan = TensorPlan(splits=folded(splits), patches=folded(patches), inputs=folded(inputs))
    return plan, "; ".join(notes)


# --- which modules belong together -------------------------------------------------------------


def _blocks_of_family(model: nn.Module, decoder: str, family: PlanFamily) -> list[_Block]:
    blocks: dict[str, _Block] = {}
    for name, _ in model.named_modules():
        for pattern, rule in family.rules.items():
            if matches(dotted_name(decoder, pattern), name):
                parent = name.rpartition(".")[0]
                block = blocks.setdefault(parent, _Block(parent, model.get_submodule(parent)))
                block.rules[name] = rule
    return list(blocks.values())


def _blocks_of_upstream(
    model: nn.Module, upstream: Mapping[str, str], decoder: str
) -> list[_Block]:
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = prefix if isinstance(getattr(model, prefix, None), nn.Module) else decoder
    patterns = {dotted_name(base, pattern): style for pattern, style in upstream.items()}
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
            splits[name] = linear_split(module, rule, block.module, config)
    cut = any(s.style == "column" and not s.gather_output for s in splits.values())
    joined = any(s.style == "row" and not s.scatter_input for s in splits.values())
    if cut != joined:
        raise Unsplittable("its column-parallel layers have no row-parallel partner")
    # OPT keeps the linear layers of its MLP in the layer itself, next to norms of the whole stream.
    if cut and not block.name.rpartition(".")[2].isdigit():
        splits |= _leftovers(block, splits, config)
    return splits


def _experts(block: _Block) -> Split:
    """Stacked experts: every expert's units are split, up projections by output, down by input."""
    parameters = dict(block.module.named_parameters())
    if set(parameters) != set(block.experts):
        missing = ", ".join(sorted(set(parameters) - set(block.experts)))
        raise Unsplittable(f"no style is given for {missing or 'its experts'}")
    dims: dict[str, int] = {}
    segments: dict[str, tuple[WeightSegment, ...]] = {}
    for name, style in block.experts.items():
        if style not in _EXPERT_PARAMETERS or parameters[name].ndim != 3:
            raise Unsplittable(f"its plan uses {style} for {name}")
        dims[name] = 3 + _EXPERT_PARAMETERS[style]
        rows = int(parameters[name].shape[dims[name]])
        if style.startswith("packed") or "gate_up" in name:  # Inkling's plan does not say so
            segments[name] = (WeightSegment(units=rows // 2, what="expert units"),) * 2
        else:
            segments[name] = (WeightSegment(units=rows, what="expert units"),)
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
        full = dotted_name(block.name, name)
        if not own or full in splits:
            continue
        if name and all(p.numel() in (1, size) for p in own.values()):
            found[full] = Split(style="sum_grad")
        else:
            raise Unsplittable(f"{type(module).__name__} {name or 'itself'} has no place in a plan")
    return found


def _patches(block: _Block, config: Any, family: PlanFamily | None) -> tuple[Patch, ...]:
    """Head counts that the attention module keeps as attributes."""
    query = [r for r in block.rules.values() if r.units in ("heads", "head_triple", "qkv")]
    if not any(r.style == "column" and not r.gather_output for r in query):
        return ()
    module = block.module
    heads = query_heads(module, config)
    size = head_size(module, config)
    kv = _key_value_heads(block, config)
    found = [
        Patch(attribute=name, whole=count)
        for names, count in ((QUERY_COUNTS, heads), (KEY_VALUE_COUNTS, kv))
        for name in names
        if getattr(module, name, None) == count
    ]
    found += [
        Patch(attribute=name, whole=heads // kv, ratio=(heads, kv))
        for name in GROUPS
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
    return int(count or query_heads(block.module, config))


def _vocabulary(model: nn.Module) -> dict[str, Split]:
    """Embedding and output head by rows of the vocabulary; both or neither where they are tied."""
    names = {id(m): n for n, m in model.named_modules()}
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    splits: dict[str, Split] = {}
    if isinstance(embedding, nn.Embedding) and id(embedding) in names:
        rows = WeightSegment(units=embedding.num_embeddings, what="vocabulary rows", uneven=True)
        splits[names[id(embedding)]] = Split(
            style="vocab_embedding", segments=(rows,), dims={"weight": 0}
        )
    if type(head) is nn.Linear and id(head) in names:
        rows = WeightSegment(units=head.out_features, what="vocabulary rows", uneven=True)
        dims = {"weight": 0} if head.bias is None else {"weight": 0, "bias": 0}
        splits[names[id(head)]] = Split(style="vocab_head", segments=(rows,), dims=dims)
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    # RoBERTa's head shares its bias with the module around it, which is no linear layer.
    shared = {id(p) for m in (embedding, head) if m is not None for p in m.parameters()}
    others = (m for m in model.modules() if m is not embedding and m is not head)
    if any(id(p) in shared for m in others for p in m.parameters(recurse=False)):
        return {}
    return {} if tied and len(splits) == 1 else splits
