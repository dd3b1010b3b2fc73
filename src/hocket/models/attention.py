"""Attention on CUDA in training: windows, documents, soft caps and sinks without S x S numbers.

transformers' `sdpa` leaves a plain causal layer to the kernel, and builds a boolean mask
[B, 1, S, S] for sliding windows and for packed documents. No flash kernel takes a mask. It also
finds out whether rows are packed by reading positions back from the device, for every microbatch.

Here the mask function of `sdpa` gives, on CUDA, the boundaries of the sequences instead, and its
attention function runs them through PyTorch's variable-length flash attention
(`torch.nn.attention.varlen`), where that takes the layer (`spec.attention_kernel`):

    rows are whole, no window           no mask: scaled_dot_product_attention(is_causal=True)
    rows are packed, or a window        boundaries  ->  flash_varlen(cu_seq, window=w)
        that it does not take           boundaries  ->  flex attention (`models.flex_attention`)
        nor flex attention              boundaries  ->  a mask made from them on the device
    padding, prefixes, chunks           as transformers does it

Families with soft caps or attention sinks (Gemma 2, gpt-oss) have no `sdpa` in transformers: their
own code multiplies out S x S scores. On CUDA they become `hocket_flex`, an implementation whose
masks are always boundaries, and whose kernel is flex attention; where that does not take a layer,
the family's own code runs with a mask made from the boundaries.

Tensors that are not on CUDA take transformers' own path, bit for bit.

Boundaries travel as the attention mask of the model does: an int32 tensor of three dimensions,
[N + 1, window, S + longest], which is one of N + 1 numbers expanded; the sizes are its other two
numbers. It survives recomputation, offloading and compilation, and costs nothing. Its last
dimension is larger than any sequence, so code that takes it for a mask fails instead of computing.

Not executed on a GPU yet; on a CPU, tests put a reference in the kernel's place.

Legend: B rows, S tokens, N sequences in them, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.models import flex_attention
from hocket.models.attention_layers import FLEX
from hocket.models.flash_varlen import flash_varlen
from hocket.models.rows import mask_documents
from hocket.spec.attention_kernel import AttentionKernel, AttentionLayer, attention_kernel

_UNLIKE: frozenset[str] = frozenset({"doge"})
"""Model types that compute with the mask themselves before attention gets it."""

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

Mask = Tensor | None


def boundaries(cu_seqlens: Tensor, *, window: int | None, longest: int, length: int) -> Tensor:
    """Sequences of a batch as an attention mask.

    Args:
        cu_seqlens: [N + 1] int32 on the device, first token of each sequence in B * S, and B * S.
        window: tokens that a query sees, itself included. None: all before it.
        longest: an upper bound of the sequences' lengths.
        length: S, of a row.
    """
    seen = longest if window is None else min(window, longest)
    return cu_seqlens.view(-1, 1, 1).expand(-1, seen, length + longest)


def dense_mask(mask: Tensor, rows: int, length: int) -> Tensor:
    """Boundaries as the mask [B, 1, S, S] that they stand for, computed where they are."""
    cu_seqlens, window, _ = _parts(mask, length)
    token = torch.arange(rows * length, device=mask.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, token, right=True).view(rows, length)
    at = torch.arange(length, device=mask.device)
    distance = at.unsqueeze(1) - at
    visible = (distance >= 0) & (distance < window)
    return (visible & (sequence.unsqueeze(2) == sequence.unsqueeze(1))).unsqueeze(1)


def _parts(mask: Tensor, length: int) -> tuple[Tensor, int, int]:
    """cu_seqlens, window and longest of boundaries."""
    return mask[:, 0, 0], mask.shape[1], mask.shape[2] - length


def _on_cuda(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def capability_of(device: torch.device) -> tuple[int, int]:
    """The device's compute capability; a property of it, not a read of its memory."""
    return torch.cuda.get_device_capability(device)


def _varlen(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, window: int,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Query [B * S, A, D], key and value [B * S, K, D] to [B * S, A, D]."""
    return flash_varlen(
        query, key, value, (cu_seqlens, cu_seqlens), (longest, longest), scale=scale,
        window=None if window >= longest else window,
    )  # fmt: skip


_BLOCKS: Any = WeakTensorKeyDictionary()
"""Boundaries to their block mask: one for each kind of layer and forward of the model."""


def _block_mask(mask: Tensor, rows: int, length: int) -> Any:
    """The block mask of boundaries. Within a graph it is part of the graph."""
    noting = not torch.compiler.is_compiling()
    if noting and mask in _BLOCKS:
        return _BLOCKS[mask]
    cu_seqlens, window, _ = _parts(mask, length)
    lowest = flex_attention.lowest_keys(cu_seqlens, window=window, rows=rows, length=length)
    made = flex_attention.block_mask(lowest)
    if noting:
        _BLOCKS[mask] = made
    return made


def _flex(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `flex_attention.flex_attend`, by the generated kernel."""
    compiling = torch.compiler.is_compiling()
    attend = flex_attention.flex_attend if compiling else flex_attention.compiled_flex_attend()
    return attend(query, key, value, mask, scale, softcap, sinks)


def _flex_of(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Flex attention of [B, A, S, D] with boundaries: [B, S, A, E], as transformers wants it."""
    blocks = _block_mask(mask, query.shape[0], query.shape[2])
    out = _flex(query, key, value, blocks, scale, softcap, sinks)
    return out.transpose(1, 2).contiguous(), None


def _choice(
    query: Tensor, value: Tensor, implementation: str, options: dict[str, Any]
) -> AttentionKernel:
    """The kernel of tensors [B, A, S, D] with boundaries."""
    layer = AttentionLayer(
        key_size=query.shape[-1], value_size=value.shape[-1], packed=True,
        implementation=implementation, dropout=options.get("dropout") or 0.0,
        masked=options.get("position_bias") is not None,
    )  # fmt: skip
    return attention_kernel(
        layer, dtype=_DTYPES[query.dtype], capability=capability_of(query.device)
    )


def _own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    **options: Any,
) -> Any:
    """Attention of a family that is `hocket_flex`."""
    if attention_mask is not None and attention_mask.ndim == 3:
        if _choice(query, value, "flex", options).name == "flex":
            bends = options.get("softcap"), options.get("s_aux")
            return _flex_of(query, key, value, attention_mask, options.get("scaling"), *bends)
        visible = dense_mask(attention_mask, query.shape[0], query.shape[2])
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attention_mask = torch.where(visible, zero, torch.finfo(query.dtype).min)
    written: Any = sys.modules[type(module).__module__]
    return written.eager_attention_forward(module, query, key, value, attention_mask, **options)


def _attention(given: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.ndim != 3:
            return given(module, query, key, value, attention_mask, **options)
        rows, _, length, _ = query.shape
        chosen = _choice(query, value, "sdpa", options)
        if chosen.name == "flex":
            return _flex_of(query, key, value, attention_mask, options.get("scaling"))
        if chosen.name != "flash-varlen":
            mask = dense_mask(attention_mask, rows, length)
            return given(module, query, key, value, mask, **options)
        cu_seqlens, window, longest = _parts(attention_mask, length)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        out = _varlen(q, k, v, cu_seqlens, longest, window, options.get("scaling"))
        return out.view(rows, length, *out.shape[1:]), None

    return attention


def _mask(given: Callable[..., Any], *, skips: bool = True) -> Callable[..., Any]:
    """The mask function of an implementation.

    Args:
        given: transformers' own, for what boundaries cannot say.
        skips: no mask stands for causal attention of whole rows.
    """

    def mask(  # noqa: PLR0917  as transformers calls it
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Any = None,
        attention_mask: Mask = None,
        local_size: int | None = None,
        **options: Any,
    ) -> Mask:
        device = options.get("device", "cpu")
        known = mask_documents(mask_function)
        config = options.get("config")
        custom = (
            not _on_cuda(device)
            or attention_mask is not None
            or q_length != kv_length
            or q_length == 1
            or options.get("use_vmap", False)
            # Packed rows forbid the skip, and so does what no boundaries can say.
            or (known is None and not options.get("allow_is_causal_skip", True))
            or options.get("allow_is_bidirectional_skip", False)
            or getattr(config, "attention_chunk_size", None) is not None
            or getattr(config, "model_type", None) in _UNLIKE
        )
        window = local_size if local_size is not None and local_size < kv_length else None
        if not custom and skips and known is None and window is None:
            return None
        if not custom:
            if known is None:
                first = torch.arange(batch_size + 1, device=device, dtype=torch.int32) * q_length
                return boundaries(first, window=window, longest=q_length, length=q_length)
            return boundaries(
                known.cu_seqlens, window=window, longest=known.longest, length=q_length
            )
        return given(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            local_size=local_size, **options,
        )  # fmt: skip

    return mask


def sdpa_function() -> Callable[..., Any]:
    """The attention function that models of `sdpa` call."""
    functions: Any = transformers.AttentionInterface._global_mapping
    found: Callable[..., Any] = functions["sdpa"]
    return found


def choose_kernels_on_cuda(model: nn.Module | None = None, *, asked: str = "sdpa") -> None:
    """Let transformers' `sdpa` be as described above, once in a process, and a model without `sdpa`
    be `hocket_flex` if flex attention computes what its own code does.

    Args:
        model: as transformers built it. None: only the process is prepared.
        asked: the attention implementation that was asked for; a model of another one is left as
            it is.
    """
    from transformers import masking_utils

    from hocket.models.rows import remember_documents

    remember_documents()
    functions: Any = transformers.AttentionInterface._global_mapping
    masks: Any = masking_utils.AttentionMaskInterface._global_mapping
    if not hasattr(functions["sdpa"], "hocket"):
        attention, mask = _attention(functions["sdpa"]), _mask(masks["sdpa"])
        attention.hocket = True  # type: ignore[attr-defined]
        transformers.AttentionInterface.register("sdpa", attention)
        masking_utils.AttentionMaskInterface.register("sdpa", mask)
        transformers.AttentionInterface.register(FLEX, _own_attention)
        of_blocks = _mask(masking_utils.eager_mask, skips=False)
        masking_utils.AttentionMaskInterface.register(FLEX, of_blocks)
    if model is not None and asked == "sdpa" and flexible(model):
        model.config._attn_implementation = FLEX  # type: ignore[union-attr]


def flexible(model: nn.Module) -> bool:
    """Whether transformers gives a model's attention to flex attention, and has no `sdpa` for it:
    then a soft cap and sinks are all that its own code adds."""
    config: Any = model.config
    written = sys.modules[type(model).__module__]
    return (
        config.get_text_config()._attn_implementation == "eager"
        and not getattr(model, "_supports_sdpa", False)
        and bool(getattr(model, "_supports_flex_attn", False))
        and hasattr(written, "eager_attention_forward")
    )
