"""Dimensions: the numbers of a configuration that a layout must divide, read without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hocket.models import registry
from hocket.spec.errors import ModelError

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "emb_dim"),
    "num_layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
    ),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "expert_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "tied": ("tie_word_embeddings",),
    "taps": (
        "linear_conv_kernel_dim", "short_conv_kernel_size", "mamba_d_conv", "conv_L_cache",
        "conv_kernel_size", "conv_kernel",
    ),
}  # fmt: skip
MOST_LAYERS, MOST_SIZE = 100_000, 2**31 - 1
"""Of a model, and of each of its dimensions: a layer is named, and built on the meta device."""
_KINDS = ("layer_types", "layers_block_type")
"""A list of what each layer is, which says how many there are where nothing else does."""
_CONVOLVED = ("linear", "conv", "mamba", "hybrid", "recurrent")
"""Parts of the names of layers that hold a convolution along the sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes that decide which layouts fit a model.

    Attributes:
        hidden_size, num_layers, head_dim, vocab_size: as they are called.
        num_heads: of attention; 0 for a model without it, whose state is recurrent.
        num_key_value_heads: fewer than `num_heads` under grouped-query attention.
        intermediate_size: units of one feed-forward block (of one expert, where there are some).
        max_positions: longest sequence the model has positions for, None if unbounded.
        num_experts: 0 for a dense model.
        expert_size: units of one expert, of a family whose layers without experts have others; 0:
            `intermediate_size`.
        tied: whether the output head shares the embedding's values.
        handed_width: earlier inputs that a convolution along the sequence reads, one less than its
            taps; 0: no layer has one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    num_experts: int
    tied: bool
    handed_width: int = 0
    expert_size: int = 0


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    """Read the dimensions of a Hugging Face configuration dictionary.

    What the dictionary leaves out is taken from the class defaults of the installed transformers.

    Raises:
        ModelError: a number that is needed is neither given nor has a default, or is not a
            whole number of at least 1.
    """
    model_type = str(config.get("model_type", ""))
    known = registry.defaults(model_type)

    def find(noun: str) -> Any:
        for source in (config, known.values):
            for name in _NAMES[noun]:
                for key in (name, known.aliases.get(name, name)):
                    if source.get(key) is not None:
                        return source[key]
        return None

    def need(noun: str) -> int:
        value = find(noun)
        if value is None and noun == "num_layers":
            lists = (config.get(name) for name in _KINDS)
            value = next((len(kinds) for kinds in lists if isinstance(kinds, list)), None)
        if value is None:
            raise ModelError(
                f"the configuration of {model_type!r} has no {_NAMES[noun][0]}, "
                "and transformers has no default for it"
            )
        most = MOST_LAYERS if noun == "num_layers" else MOST_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelError(
                f"{_NAMES[noun][0]} is {value!r} in the model's configuration; "
                f"it must be a whole number of at least 1 and at most {most:,}"
            )
        return value

    hidden = need("hidden_size")
    heads = need("num_heads") if find("num_heads") is not None else 0
    kv = find("num_key_value_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv = 1  # Falcon and GPT-BigCode say it with a switch
    positions = find("max_positions")
    if isinstance(positions, int) and positions < 1:
        raise ModelError(
            f"{_NAMES['max_positions'][0]} is {positions} in the model's configuration; "
            "it must be at least 1"
        )
    feed_forward, expert = find("intermediate_size"), find("expert_size")
    return Dimensions(
        hidden_size=hidden,
        num_layers=need("num_layers"),
        num_heads=heads,
        num_key_value_heads=kv if isinstance(kv, int) and kv > 0 else heads,
        head_dim=find("head_dim") or (hidden // heads if heads else 0),
        intermediate_size=feed_forward if isinstance(feed_forward, int) else 4 * hidden,
        vocab_size=need("vocab_size"),
        max_positions=positions if isinstance(positions, int) and model_type != "bloom" else None,
        num_experts=find("num_experts") or _nested_experts(config),
        tied=bool(find("tied")),
        handed_width=_handed_width(config, find("taps")),
        expert_size=expert if isinstance(expert, int) else 0,
    )


def _handed_width(config: Mapping[str, Any], taps: Any) -> int:
    """A configuration that lists its layers may have none of those that its class has."""
    lists = [config[name] for name in _KINDS if isinstance(config.get(name), list)]
    kinds = [str(kind) for kinds in lists for kind in kinds]
    none = bool(kinds) and not any(word in kind for kind in kinds for word in _CONVOLVED)
    return 0 if none or not isinstance(taps, int) else max(0, taps - 1)


def _nested_experts(config: Mapping[str, Any]) -> int:
    """DBRX keeps the numbers of its feed-forward blocks in a dictionary of their own."""
    inner = config.get("ffn_config")
    count = inner.get("moe_num_experts") if isinstance(inner, Mapping) else None
    return count if isinstance(count, int) else 0
