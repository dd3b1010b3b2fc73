"""Text part: the language model inside a multimodal checkpoint, as a model of its own.

    config.json with text_config                    -> the configuration of a causal language model
    model.language_model.X, language_model.model.X  -> model.X
    visual, vision_tower, multi_modal_projector ... -> not loaded

A Qwen-VL's rotary positions have three parts (time, height, width), which are equal for text: then
they are those of Qwen (Wang et al. 2024, "Qwen2-VL", section 2.1). Never imports torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hocket.models import registry
from hocket.spec.files import parse_json

_SAME = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text types without a causal class, by the type that computes the same for text."""
_POSITIONS = ("mrope_section", "mrope_interleaved")
_ROTARY = ("rope_parameters", "rope_scaling")
_TEXT = (
    (re.compile(r"(?:model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?"), "model."),
    (re.compile(r"(?=lm_head\.|model\.(?:embed_tokens|layers|norm)\.)"), ""),
)
"""Beginnings of the text model's tensors, as they are stored, and as they are called."""


def text_config(outer: Mapping[str, Any], tensors: Iterable[str] = ()) -> dict[str, Any] | None:
    """The configuration of the language model inside; None where there is none that is known.

    Args:
        outer: the checkpoint's configuration.
        tensors: names of its tensors, where they are at hand: whether there is an output head.
    """
    outside = str(outer.get("model_type"))
    inner = outer.get("text_config")
    if not isinstance(inner, Mapping):
        if f"{outside}_text" not in _SAME or "hidden_size" not in outer:
            return None
        inner = {**outer, "model_type": f"{outside}_text"}  # of before there were text_configs
    kind = str(inner.get("model_type") or f"{outside}_text")
    same = _SAME.get(kind, kind)
    architecture = registry.causal_classes().get(same)
    known = registry.causal_classes().get(outside)
    other = known is not None and not known.endswith("ForConditionalGeneration")
    if architecture is None or architecture.endswith("ForConditionalGeneration"):
        return None
    if other and known != architecture:
        return None
    found: dict[str, Any] = dict(inner)
    if same != kind:
        found = {**_plain(registry.defaults(kind).values), **found}
        for name in _ROTARY:
            if isinstance(found.get(name), Mapping):
                found[name] = {
                    key: "default" if value == "mrope" else value
                    for key, value in found[name].items()
                    if key not in _POSITIONS
                }
    for name in ("architectures", "vision_config", "auto_map"):
        found.pop(name, None)
    tied = outer.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    if tied is None:
        tied = registry.defaults(outside).values.get("tie_word_embeddings", True)
    names = list(tensors)
    if names:
        tied = not any(stored_as(name) == "lm_head.weight" for name in names)
    return {**found, "model_type": same, "tie_word_embeddings": bool(tied)}


def stored_as(name: str) -> str | None:
    """The text model's name of a tensor of the checkpoint, None of another part's."""
    for beginning, plain in _TEXT:
        if match := beginning.match(name):
            return plain + name[match.end() :]
    return None


def is_multimodal(directory: Path) -> bool:
    """Whether a directory's weights are those of a multimodal model with a language model inside.

    False where its configuration cannot be read.
    """
    try:
        outer = parse_json((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(outer, dict) and _inside(outer)


def _inside(outer: Mapping[str, Any]) -> bool:
    model_type = outer.get("model_type")
    known = registry.causal_classes().get(str(model_type))
    alone = known is not None and not known.endswith("ForConditionalGeneration")
    nested = isinstance(outer.get("text_config"), Mapping)
    return text_config(outer) is not None and (nested or not alone)


@functools.cache
def left_out(directory: Path | None) -> str:
    """What of a multimodal directory's weights is not loaded, and its share of the bytes; empty
    where all of it is."""
    from hocket.models.weight_headers import headers

    if directory is None or not is_multimodal(directory):
        return ""
    sizes: dict[str, int] = {}
    total = 0
    for name, file in headers(directory).items():
        size = file.entries[name].num_bytes
        total += size
        if stored_as(name) is None:
            part = name.removeprefix("model.").partition(".")[0]
            sizes[part] = sizes.get(part, 0) + size
    if not sizes:
        return ""
    share = sum(sizes.values()) / total
    return f"{', '.join(sorted(sizes))} ({share:.1%} of the bytes)"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Class defaults that are values of a configuration."""
    kinds = (bool, int, float, str)
    return {k: v for k, v in values.items() if isinstance(v, kinds) and k != "model_type"}
