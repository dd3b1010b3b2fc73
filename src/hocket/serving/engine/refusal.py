"""Refusal: why a model's layers cannot be served from pages, as its modules show it."""

from __future__ import annotations

from typing import Any

from torch import nn

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
    """Refuse a model whose layers keep something else than keys and values, by its modules.

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
    for child in module.modules():
        name = type(child).__name__
        if isinstance(child, Missing) or "ForCausalLM" in name:
            continue
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
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked and chunk and max_model_len is not None and max_model_len > chunk:
        raise ModelError(
            f"{kind!r} attends in chunks of {chunk} tokens in some layers, which pages follow only "
            f"in sequences that are no longer; the longest is to be {max_model_len}",
            hint=f"--max-model-len {chunk}",
        )


def no_attention(config: Any, module: nn.Module) -> ModelError:
    """What to raise for a model none of whose layers called the attention interface."""
    kind = getattr(config, "model_type", type(module).__name__)
    names = [type(m).__name__ for m in module.modules() if "Attention" in type(m).__name__]
    return ModelError(
        f"{kind!r} cannot be served: its {names[-1] if names else type(module).__name__} computes "
        "attention itself, not through transformers' attention interface, so that there are no "
        "keys and values to page"
    )
