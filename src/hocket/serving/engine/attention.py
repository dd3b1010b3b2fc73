"""Paged attention as an attention implementation of transformers.

The model's own attention modules call `module_attention` instead of a kernel of their own. It knows
neither sequences nor caches: the runner sets an `Attending` for the time of one forward, which
writes the new keys and values into the cache and attends from them. No mask is built.

Legend: T tokens of the step, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch import Tensor, nn

from hocket.models.latent import LatentHeads, given_heads
from hocket.models.skeleton import register_attention
from hocket.spec.errors import ModelError

NAME = "hocket_paged"
"""The attention implementation to build a skeleton with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What one attention layer asks for besides query, key and value.

    Attributes:
        scaling: of the scores.
        window: tokens that a query sees, itself included. None: all before it.
        softcap: scores are bent to `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: [A], a score of nothing next to the others (attention sinks).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Attending(Protocol):
    """What attends during one forward."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Query [1, A, T, D], key and value [1, K, T, D]; returns [1, T, A, D of the value]."""


class LatentAttending(Attending, Protocol):
    """What also attends in layers whose latent vectors are cached."""

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """As `attend`, to the latent vectors (`heads.taken`) and those before them."""


_active: Attending | None = None


@contextmanager
def attending(step: Attending) -> Iterator[None]:
    """Within, attention layers hand their queries, keys and values to `step`."""
    global _active  # noqa: PLW0603  the models' own code stands between the runner and its layers
    before, _active = _active, step
    try:
        yield
    finally:
        _active = before


def active() -> Attending | None:
    """What attends now, within `attending`: while the engine runs a model."""
    return _active


_IGNORED = frozenset(
    {
        "position_ids", "position_embeddings", "past_key_values", "past_key_value", "use_cache",
        "output_attentions", "output_hidden_states", "return_dict", "cache_position",
        "output_router_logits", "logits_to_keep", "is_causal", "layer_idx", "head_mask",
        "attention_mask", "max_length_q", "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k",
        "target_dtype", "deterministic", "num_items_in_batch", "token_type_ids",
    }
)  # fmt: skip
"""Keyword arguments that say nothing about the result, or nothing that is not known already."""


def module_attention(  # noqa: PLR0917  as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What an attention module calls: [1, T, A, D] and no weights.

    Raises:
        ModelError: the module asks for something that a paged cache does not follow (a position
            bias, a mask of its own, attention to later tokens).
    """
    assert _active is not None, "paged attention runs inside a StageRunner"
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # Qwen2-MoE makes masks of its window and hands none on; EXAONE 4 hands on None in some layers.
    window = others.pop("sliding_window", getattr(module, "sliding_window", None))
    if others or attention_mask is not None:
        _refuse(module, attention_mask, others)
    options = Options(scaling, window or None, softcap or None, s_aux)
    latent = given_heads(module)
    if latent is not None:
        both = cast("LatentAttending", _active)
        return both.attend_latent(latent, query, options), None
    return _active.attend(module, query, key, value, options), None


def _refuse(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise ModelError(f"{kind} makes an attention mask of its own, which pages do not follow")
    if others.get("is_causal") is False:
        raise ModelError(f"{kind} attends to later tokens too; it cannot be served token by token")
    strange = [k for k, v in others.items() if k not in _IGNORED and v is not None]
    if strange:
        raise ModelError(
            f"{kind} hands {', '.join(sorted(strange))} to its attention, which pages do not follow"
        )


register_attention(NAME, module_attention)
