"""the tiny proxy model of a configuration: the same architecture at sizes that run in milliseconds.

Switches stay as they are (layer types, ties, biases, parallel residuals, grouping of heads); sizes
shrink. What holds for its structure, which modules run in which order and what a cut does
to gradients, holds for the real model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import transformers
from torch import nn

from hocket.models import skeleton
from hocket.models.failure import failure_place, raise_if_exhausted
from hocket.spec.errors import ModelError

NUM_LAYERS = 4
VOCABULARY = 128

GAIN = 1.5
"""Standard deviation of a random matrix's entries, times the root of its number of inputs."""

OFFSET = 0.3
"""Standard deviation of what is added to the initial value of norms and biases."""

_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "emb_dim")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks",
    "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "num_decoder_attention_heads", "num_encoder_attention_heads",
)  # fmt: skip
_KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES = {
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_HEADS, 4),
    "head_dim": 16, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "rotary_dim": 8, "original_max_position_embeddings": 32,
    **dict.fromkeys(_POSITIONS, 128),  # those of a served prompt that four context ranks split
    "d_head": 16, "d_inner": 96, "dim_head": 16, "dim_ff": 96, "expert_ffn_hidden_size": 32,
    "pronunciation_embed_dim": 16, "shape_embed_dim": 16,
    "qk_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "o_lora_rank": 16, "index_head_dim": 16, "hc_lowrank": 16,
    "dff": 96, "intermediate_size_mlp": 96,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_d_ssm": 128,
}  # fmt: skip
_AT_MOST = {
    **dict.fromkeys(_EXPERTS, 4),
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "sliding_window": 8,
    "attention_window_size": 8, "decoder_start_token_id": 0, "zero_expert_num": 2,
    "shape_vocab_size": 128, "pronunciation_vocab_size": 128, "ngram_vocab_size_base": 128,
    "prompt_length": 8, "prompt_types": 4,
    # Plain PyTorch computes whole chunks of a recurrence, however short the sequence.
    "chunk_size": 8, "mamba_chunk_size": 8,
    "mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "index_n_heads": 4,
}  # fmt: skip
_NESTED = {"head_dim": 16, "num_heads": 4, "ffn_hidden_size": 96, "moe_num_experts": 4}
"""Sizes inside dictionaries of the configuration."""
_LEFT_OUT = object()
# Some families derive the head size and refuse one, or want it to follow other widths.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": _LEFT_OUT},
    {"num_key_value_heads": _LEFT_OUT},
    {"layer_types": _LEFT_OUT},
    {"mamba_n_heads": 8, "mamba_d_head": 16, "head_dim": _LEFT_OUT},
    {"mamba_headdim": 16, "hybrid_layer_ids": _LEFT_OUT},
    {"num_heads": 8, "head_dim": 16},
    {"head_dim": 32},
    {"head_dim": 8},
)
_LARGEST = 5_000_000
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TAKING = "num_kv_shared_layers"
_RESIDUAL_WIDTHS = ("word_embed_proj_dim", "embedding_size")


@dataclasses.dataclass(frozen=True)
class ProxyModel:
    """A tiny configuration and, for each of its layers, the layer of the real model it is like."""

    config: transformers.PreTrainedConfig
    layers: tuple[int, ...]

    def build(self, *, seed: int = 0, attention: str = "sdpa") -> nn.Module:
        """The proxy model with random weights, on CPU in fp32, in evaluation mode (no dropout)."""
        model = skeleton.build_skeleton(self.config, attention=attention, dropout=0.0, device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with torch.no_grad():
                # What a family's own initialisation leaves out would be whatever the memory held.
                for parameter in model.parameters():
                    parameter.normal_(std=0.02)
            model.initialize_weights()  # type: ignore[operator]
            model.tie_weights()  # type: ignore[operator]
            with torch.no_grad():
                # Norms at one and biases at zero would hide a norm applied twice.
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model.eval()


def spread_weights(model: nn.Module, seed: int) -> None:
    """Scale random weights so that logits differ by whole units and every parameter matters.

    Initial values make almost uniform logits, hide a norm that is left out (its weight is one) and
    a bias that is added twice (it is zero). Matrices get entries of the standard deviation that
    keeps the size of their input; vectors move away from their initial value, and so do buffers
    that are saved as biases (such as those of routers).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(draw(parameter), alpha=OFFSET)
                continue
            own = float(parameter.std())
            inputs = parameter.shape[-1] if parameter.dim() == 2 else max(parameter.shape[-2:])
            wanted = GAIN / math.sqrt(inputs)
            if own > 0:
                parameter.mul_(wanted / own)
            else:
                parameter.copy_(draw(parameter) * wanted)
        saved = set(model.state_dict())
        for name, buffer in model.named_buffers():
            if name in saved and "bias" in name.rsplit(".", 1)[-1] and buffer.is_floating_point():
                buffer.add_(draw(buffer), alpha=OFFSET)


def proxy_of(config: transformers.PreTrainedConfig) -> ProxyModel:
    """the tiny proxy model of a configuration.

    Raises:
        ModelError: no set of tiny sizes makes a model that transformers builds and runs.
    """
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(
            f"{config.model_type!r} is made of several models (its configuration holds "
            f"{', '.join(sorted(config.sub_configs)) or 'others'}), not of one list of layers"
        )
    layers = _layers(config)
    error: Exception | None = None
    for changes in _VARIANTS:
        values = _shrink(config.to_dict(), layers, int(config.num_hidden_layers))
        values |= {key: value for key, value in changes.items() if key in values}
        values = {key: value for key, value in values.items() if value is not _LEFT_OUT}
        try:
            proxy = ProxyModel(
                skeleton.config_of({**values, "model_type": config.model_type}, dropout=0.0), layers
            )
            size = sum(p.numel() for p in skeleton.build_skeleton(proxy.config).parameters())
            if size > _LARGEST:
                raise ModelError(f"{size:,} parameters are left at sizes it names in its own way")
            _run(proxy)
        except Exception as failure:  # each family refuses sizes, or fails on them, in its own way
            raise_if_exhausted(failure)
            error = error or failure
            continue
        return proxy
    assert error is not None  # every number of layers failed
    reason = (
        error.message if isinstance(error, ModelError) else f"it fails in {failure_place(error)}"
    )
    raise ModelError(f"no tiny proxy model of {config.model_type!r} can be made: {reason}")


def switched_proxy(
    values: Mapping[str, Any], switches: Mapping[str, Any]
) -> tuple[ProxyModel, dict[str, Any]]:
    """The proxy model of a configuration with as many of the switches as its class takes together,
    and these switches. Raises ModelError: there is none without them either."""

    def switched(some: Mapping[str, Any]) -> ProxyModel | None:
        try:
            return proxy_of(skeleton.config_of({**values, **some}, dropout=0.0))
        except Exception as error:  # a combination that the class rejects, each in its own way
            raise_if_exhausted(error)
            return None

    if switches and (found := switched(switches)) is not None:
        return found, dict(switches)
    taken: dict[str, Any] = {}
    found = proxy_of(skeleton.config_of(dict(values), dropout=0.0))
    for name, value in switches.items():
        if (more := switched({**taken, name: value})) is not None:
            found, taken = more, {**taken, name: value}
    return found, taken


def _run(proxy: ProxyModel) -> None:
    with torch.no_grad():
        proxy.build()(input_ids=torch.arange(3, 19).unsqueeze(0), use_cache=False)


def _layers(config: transformers.PreTrainedConfig) -> tuple[int, ...]:
    """Layers of the proxy model: the first four, or two of each kind (they may share a block); of
    layers that take keys and values from earlier ones, one that does and one that does not."""
    total = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    if not kinds or len(kinds) < total:
        return tuple(range(min(total, NUM_LAYERS)))
    taking = range(total - int(getattr(config, _TAKING, None) or 0), total)
    chosen: list[int] = []
    for kind in dict.fromkeys(kinds[:total]):
        same_kind = [i for i in range(total) if kinds[i] == kind]
        second = next((i for i in same_kind if i in taking), None)
        chosen += same_kind[:2] if second is None else dict.fromkeys((same_kind[0], second))
    chosen += [i for i in range(total) if i not in chosen][: max(0, NUM_LAYERS - len(chosen))]
    return tuple(sorted(chosen))


def _shrink(
    whole: dict[str, Any], layers: tuple[int, ...], total: int | None = None
) -> dict[str, Any]:
    """The values at tiny sizes; `total` layers where no value says how many."""
    total = next((whole[name] for name in _LAYERS if isinstance(whole.get(name), int)), total)
    hidden = next((whole[name] for name in _HIDDEN if isinstance(whole.get(name), int)), None)
    heads = next((whole[name] for name in _HEADS if isinstance(whole.get(name), int)), None)
    tiny: dict[str, Any] = {}
    for key, value in copy.deepcopy(whole).items():
        if key in ("transformers_version", "dtype", "architectures"):
            continue
        if key in _LAYERS and isinstance(value, int):
            value = len(layers)
        elif key in _VOCABULARIES and isinstance(value, int):
            value = VOCABULARY
        elif key in _TOKENS and value is not None:
            value = _TOKENS[key]
        elif key in _KEY_VALUE and isinstance(value, int):
            value = 4 if value == heads else 1 if value == 1 else 2
        elif key in _RESIDUAL_WIDTHS and isinstance(value, int):
            value = 64 if value == hidden else 32
        elif isinstance(value, int) and not isinstance(value, bool):
            value = _SIZES.get(key, min(value, _AT_MOST.get(key, value)))
            if key not in _SIZES and hidden:
                value = _in_proportion(key, value, hidden, heads)
        elif isinstance(value, list) and len(value) == total and key != "architectures":
            own = [value[i] for i in layers]  # one entry a layer
            value = [_SIZES.get(key, v) if type(v) is int else v for v in own]
        elif _by_layer(value):
            value = {layers.index(int(k)): v for k, v in value.items() if int(k) in layers}
        elif isinstance(value, dict) and "model_type" in value:
            value = _shrink(value, tuple(range(2)))  # a model inside the model
        elif isinstance(value, dict):
            value = _shrink_nested(value)
        tiny[key] = value
    if isinstance(whole.get("max_window_layers"), int):
        tiny["max_window_layers"] = min(whole["max_window_layers"], len(layers))
    if total is not None and isinstance(whole.get(_TAKING), int):
        tiny[_TAKING] = sum(1 for i in layers if i >= total - whole[_TAKING])
    for key, value in tiny.items():
        if _by_layer(value):
            tiny[key] = {i: _of_layer(own, whole, tiny) for i, own in value.items()}
    return tiny


def _by_layer(value: Any) -> bool:
    """Whether a value of a configuration says what differs in some layers, by their number."""
    return isinstance(value, dict) and bool(value) and all(str(k).isdigit() for k in value)


def _count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _of_layer(own: Any, whole: dict[str, Any], tiny: dict[str, Any]) -> Any:
    """One layer's own sizes: twice or half of the others' where they are so in the whole."""
    if not isinstance(own, dict):
        return own
    found = dict(own)
    for key, value in own.items():
        others, size = whole.get(key), tiny.get(key)
        if not (_count(value) and _count(others) and _count(size)):
            continue
        more, less = max(value, others), min(value, others)
        times = more // less if more % less == 0 and (more // less).bit_count() == 1 else 1
        found[key] = size * times if value >= others else max(1, size // times)
    return found


def _in_proportion(key: str, value: int, hidden: int, heads: int | None) -> int:
    """Widths that families derive from the hidden size in their own configuration."""
    if heads and key.endswith("head_dim") and (value * heads) % hidden == 0:
        return value * heads // hidden * (64 // 4)
    if key.endswith(("_size", "_dim", "_width")) and value >= hidden and value % hidden == 0:
        return value // hidden * 64
    return value


def _shrink_nested(parameters: dict[str, Any]) -> dict[str, Any]:
    """A dictionary inside the configuration: sizes of its own, and rotary parameters for heads of
    16, of which lists of factors, one for each pair, are cut."""
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, dict):
            value = _shrink_nested(value)
        elif isinstance(value, int) and not isinstance(value, bool) and key in _NESTED:
            value = min(value, _NESTED[key])
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            share = float(parameters.get("partial_rotary_factor") or 1.0)
            value = value[: int(16 * share) // 2]
        elif key == "original_max_position_embeddings":
            value = 32
        found[key] = value
    return found
