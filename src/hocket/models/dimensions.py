"""Dimensions: the numbers of a configuration that a layout must divide, read without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hocket.models import registry
from hocket.spec.errors import ModelError
from hocket.spec.legality import MOST_LAYERS

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
MOST_SIZE = 2**31 - 1
"""Of each dimension of a model."""
MOST_POSITIONS = 2**63 - 1
"""A server bounds its requests itself."""
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

    def find(noun: str) -> tuple[str, Any]:
        for source in (config, known.values):
            for name in _NAMES[noun]:
                for key in (name, known.aliases.get(name, name)):
                    if source.get(key) is not None:
                        return key, source[key]
        return _NAMES[noun][0], None

    def need(noun: str) -> int:
        key, value = find(noun)
        if value is None and noun == "num_layers":
            lists = (config.get(name) for name in _KINDS)
            value = next((len(kinds) for kinds in lists if isinstance(kinds, list)), None)
        if value is None:
            raise ModelError(
                f"the configuration of {model_type!r} has no {key}, "
                "and transformers has no default for it"
            )
        return _whole(key, value, most=MOST_LAYERS if noun == "num_layers" else MOST_SIZE)

    def optional(noun: str, least: int = 0, most: int = MOST_SIZE) -> int | None:
        """None: absent, or a list with a number for each layer."""
        key, value = find(noun)
        return _whole(key, value, least, most) if isinstance(value, int | float | str) else None

    hidden = need("hidden_size")
    heads = need("num_heads") if find("num_heads")[1] is not None else 0
    kv = optional("num_key_value_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv = 1  # Falcon and GPT-BigCode say it with a switch
    feed_forward = optional("intermediate_size")
    positions = optional("max_positions", 1, MOST_POSITIONS)
    return Dimensions(
        hidden_size=hidden,
        num_layers=need("num_layers"),
        num_heads=heads,
        num_key_value_heads=kv or heads,
        head_dim=optional("head_dim") or (hidden // heads if heads else 0),
        intermediate_size=4 * hidden if feed_forward is None else feed_forward,
        vocab_size=need("vocab_size"),
        max_positions=None if model_type == "bloom" else positions,
        num_experts=optional("num_experts") or _nested_experts(config),
        tied=bool(find("tied")[1]),
        handed_width=_handed_width(config, optional("taps")),
        expert_size=optional("expert_size") or 0,
    )


def stated_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that a configuration itself says a model was made for.

    Raises:
        ModelError: as `dimensions`.
    """
    stated = (key for key in ("max_position_embeddings", "n_positions") if config.get(key))
    return next((_whole(key, config[key], most=MOST_POSITIONS) for key in stated), None)


def _whole(key: str, value: Any, least: int = 1, most: int = MOST_SIZE) -> int:
    """The value of a configuration's key. Raises ModelError where it is not such a number."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ModelError(
        f"{key} is {value!r} in the model's configuration; "
        f"it must be a whole number of at least {least} and at most {most:,}"
    )


def _handed_width(config: Mapping[str, Any], taps: int | None) -> int:
    """A configuration that lists its layers may have none of those that its class has."""
    lists = [config[name] for name in _KINDS if isinstance(config.get(name), list)]
    kinds = [str(kind) for kinds in lists for kind in kinds]
    none = bool(kinds) and not any(word in kind for kind in kinds for word in _CONVOLVED)
    return 0 if none or taps is None else max(0, taps - 1)


def _nested_experts(config: Mapping[str, Any]) -> int:
    """DBRX keeps the numbers of its feed-forward blocks in a dictionary of their own."""
    inner = config.get("ffn_config")
    count = inner.get("moe_num_experts") if isinstance(inner, Mapping) else None
    return 0 if count is None else _whole("moe_num_experts", count, 0)
