"""Refusal: why a model's layers cannot be served from pages, as its modules show it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hocket.models.recurrent import mixers
from hocket.runtime.pipeline.cut import Missing
from hocket.spec.errors import ModelError

_RECURRENT = "keeps a recurrent state of each sequence"
_KEEPS = {
    "Mamba": _RECURRENT,
    "SSM": _RECURRENT,
    "Rwkv": _RECURRENT,
    "Recurrent": _RECURRENT,
    "xLSTM": _RECURRENT,
    "DeltaNet": _RECURRENT,
    "DeltaAttention": _RECURRENT,
    "LinearAttention": _RECURRENT,
    "LightningAttention": _RECURRENT,
    "ShortConv": "keeps a convolution's last inputs of each sequence",
    "Indexer": "keeps an index of its own, by which it chooses keys",
}
"""Part of a module's class name to what such a module keeps besides keys and values."""


def refuse(config: Any, module: nn.Module, max_model_len: int | None = None) -> None:
    """Refuse a model whose layers keep something else than keys and values, or states that
    `models.recurrent` can set, by its modules.

    Args:
        config: the model's configuration.
        module: the model or one stage of it; its device does not matter.
        max_model_len: tokens of the longest sequence to be served. None: not looked at.

    Raises:
        ModelError: with the class of the layer and what it keeps.
    """
    kind = getattr(config, "model_type", type(module).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{kind!r} is an encoder and a decoder; hocket serves models of one stack of layers"
        )
    served = tuple(mixers(module))
    family = type(module).__name__.partition("For")[0]
    for path, child in module.named_modules():
        name = type(child).__name__
        if isinstance(child, Missing) or "ForCausalLM" in name or "Norm" in name:
            continue
        if any(f"{one}.".startswith(f"{path}.") or path.startswith(f"{one}.") for one in served):
            continue  # recurrent states have slots of their own (`engine.states`)
        if name == f"{family}Attention":
            continue  # that of KimiLinear, say, is no linear attention
        for part, what in _KEEPS.items():
            if part in name:
                raise ModelError(
                    f"{kind!r} cannot be served: its {name} {what}, and pages hold keys and "
                    "values only"
                )
        if isinstance(child, nn.Conv1d):
            raise ModelError(
                f"{kind!r} cannot be served: it has a {name} along the sequence, whose last "
                "inputs would have to be kept, and pages hold keys and values only"
            )
    if max_model_len is not None:
        _refuse_lengths(config, kind, max_model_len)


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest sequence that `refuse` accepts; None: any."""
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    bounds = [chunk if chunked and chunk else None, _rotary_bound(config)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _refuse_lengths(config: Any, kind: str, max_model_len: int) -> None:
    """Refuse lengths beyond which a model treats a sequence as pages do not follow."""
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked and chunk and max_model_len > chunk:
        raise ModelError(
            f"{kind!r} attends in chunks of {chunk} tokens in some layers, which pages follow only "
            f"in sequences that are no longer; the longest is {max_model_len}",
            hint=f"--max-model-len {chunk}",
        )
    bound = _rotary_bound(config)
    if bound is not None and max_model_len > bound:
        raise ModelError(
            f"{kind!r} turns to other rotary frequencies in sequences of more than {bound} tokens, "
            "at once for all that are computed together and not for keys that are cached; the "
            f"longest is to be {max_model_len}",
            hint=f"--max-model-len {bound}",
        )


def _rotary_bound(config: Any) -> int | None:
    """Tokens up to which rotary frequencies stay what they are; None: they always do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    bounds: list[int] = []
    for each in (parameters, *parameters.values()):
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind == "longrope":
            bounds.append(int(each["original_max_position_embeddings"]))
        elif kind == "dynamic":
            bounds.append(int(config.max_position_embeddings))
    return min(bounds, default=None)


def no_attention(config: Any, module: nn.Module) -> ModelError:
    """What to raise for a model none of whose layers called the attention interface."""
    kind = getattr(config, "model_type", type(module).__name__)
    names = [type(m).__name__ for m in module.modules() if "Attention" in type(m).__name__]
    return ModelError(
        f"{kind!r} cannot be served: its {names[-1] if names else type(module).__name__} computes "
        "attention itself, not through transformers' attention interface, so that there are no "
        "keys and values to page"
    )
