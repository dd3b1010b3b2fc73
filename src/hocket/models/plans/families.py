"""Tensor plans of our own: for families that carry none, and better ones for some that do.

Patterns are relative to the module that holds the layers. `ModuleRule.units`: what is not cut:

    heads       query heads                         kv        key/value heads
    head_triple one head's query, key and value     qkv       all query, then key, then value heads
    pair        two stacked halves (gate, then up)  units     single feed-forward units
    pair_rows   gate and up, row by row             group     query heads, their key, their value

Fused projections are split segment by segment, so that every rank holds whole heads and the
module's own forward goes on working on its local counts; transformers' own plans all-gather the
activations of such layers (Phi-3, GLM) or have none (GPT-2, BLOOM).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ModuleRule:
    """One module's style and the kind of unit its split dim is made of."""

    style: str
    units: str = "units"
    gather_output: bool = False
    scatter_input: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFamily:
    """A tensor plan by patterns.

    Attributes:
        rules: module pattern to rule.
        head_inputs: attention module pattern to (argument, dim) of what carries all heads.
        widths: attributes of the attention module that hold heads x head size.
        config_counts: its forward reads head counts from `self.config`.
        unsupported: configuration keys and the value that no split can follow.
        whole: pattern of a block that has no rules, to why it has none.
    """

    rules: Mapping[str, ModuleRule]
    head_inputs: Mapping[str, tuple[tuple[str, int], ...]] = dataclasses.field(default_factory=dict)
    widths: tuple[str, ...] = ()
    config_counts: bool = False
    unsupported: Mapping[str, object] = dataclasses.field(default_factory=dict)
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _attention(path: str, output: str, **projections: str) -> dict[str, ModuleRule]:
    rules = {f"{path}.{name}": ModuleRule("column", units) for name, units in projections.items()}
    return rules | {f"{path}.{output}": ModuleRule("row", "heads")}


def _feed_forward(path: str, up: str, down: str, units: str = "units") -> dict[str, ModuleRule]:
    return {f"{path}.{up}": ModuleRule("column", units), f"{path}.{down}": ModuleRule("row")}


_SEPARATE = {"q_proj": "heads", "k_proj": "kv", "v_proj": "kv"}

_GPT2 = PlanFamily(
    rules=_attention("h.*.attn", "c_proj", c_attn="qkv")
    | _feed_forward("h.*.mlp", "c_fc", "c_proj"),
    widths=("split_size",),
    unsupported={"add_cross_attention": True},
)
_OPT = PlanFamily(
    rules=_attention("layers.*.self_attn", "out_proj", **_SEPARATE)
    | _feed_forward("layers.*", "fc1", "fc2"),
)
_BLOOM = PlanFamily(
    rules=_attention("h.*.self_attention", "dense", query_key_value="head_triple")
    | _feed_forward("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
    head_inputs={"h.*.self_attention": (("alibi", 0),)},
    unsupported={"slow_but_exact": True},
)
_PHI3 = PlanFamily(
    rules=_attention("layers.*.self_attn", "o_proj", qkv_proj="qkv")
    | _feed_forward("layers.*.mlp", "gate_up_proj", "down_proj", "pair"),
    config_counts=True,
)
_GLM = PlanFamily(
    rules=_attention("layers.*.self_attn", "o_proj", **_SEPARATE)
    | _feed_forward("layers.*.mlp", "gate_up_proj", "down_proj", "pair"),
)
_GPTJ = PlanFamily(
    rules=_attention("h.*.attn", "out_proj", q_proj="heads", k_proj="heads", v_proj="heads")
    | _feed_forward("h.*.mlp", "fc_in", "fc_out"),
)
_GPT_NEO = PlanFamily(
    rules=_attention(
        "h.*.attn.attention", "out_proj", q_proj="heads", k_proj="heads", v_proj="heads"
    )
    | _feed_forward("h.*.mlp", "c_fc", "c_proj"),
)
_STABLELM = PlanFamily(
    rules=_attention("layers.*.self_attn", "o_proj", **_SEPARATE)
    | {
        "layers.*.mlp.gate_proj": ModuleRule("column"),
        "layers.*.mlp.up_proj": ModuleRule("column"),
        "layers.*.mlp.down_proj": ModuleRule("row"),
    },
    unsupported={"qk_layernorm": True},
)
_GEMMA3N = PlanFamily(
    rules=_attention("layers.*.self_attn", "o_proj", **_SEPARATE),
    whole={
        "layers.*.mlp": "what it lets through depends on the mean and deviation of all its units"
    },
)
_CODEGEN = PlanFamily(
    rules=_feed_forward("h.*.mlp", "fc_in", "fc_out"),
    whole={"h.*.attn": "its code cuts its projection into four parts, whatever it holds"},
)
_TROCR = PlanFamily(
    rules=_feed_forward("layers.*", "fc1", "fc2"),
    whole={
        "layers.*.self_attn": "its code gives its heads' output the width of its input",
        "layers.*.encoder_attn": "its code gives its heads' output the width of its input",
    },
)
_MPT = PlanFamily(
    rules=_attention("blocks.*.attn", "out_proj", Wqkv="qkv")
    | _feed_forward("blocks.*.ffn", "up_proj", "down_proj"),
    head_inputs={"blocks.*.attn": (("position_bias", 0),)},
)

FAMILIES: Mapping[str, PlanFamily] = {
    "gpt2": _GPT2,
    "opt": _OPT,
    "bloom": _BLOOM,
    "phi3": _PHI3,
    "glm": _GLM,
    "glm4": _GLM,
    "gptj": _GPTJ,
    "gpt_neo": _GPT_NEO,
    "stablelm": _STABLELM,
    "mpt": _MPT,
    "gemma3n_text": _GEMMA3N,
    "codegen": _CODEGEN,
    "trocr": _TROCR,
}

KINDS_BY_NAME: Mapping[str, str] = {
    "q_proj": "heads",
    "k_proj": "kv",
    "v_proj": "kv",
    "o_proj": "heads",
    "out_proj": "heads",
    "dense": "heads",
    "query_key_value": "head_triple",
    "qkv_proj": "qkv",
    "gate_up_proj": "pair",
}
"""Last part of a module's name to its units, where transformers' own plan names the style only."""
