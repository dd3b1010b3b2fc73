"""Attention layers of a model, by kind, and the kernel of each on a CUDA device."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import nn

from hocket.spec.attention_kernel import (
    AttentionKernel,
    AttentionLayer,
    attention_kernel,
    context_kernel,
)

FLEX = "hocket_flex"
"""The attention implementation of families whose soft caps or sinks flex attention computes."""

_SDPA = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""`torch.nn.attention.SDPBackend` to the name of `spec.attention_kernel`."""


def layers_of(
    model: nn.Module, *, seq_len: int, packed: bool = False
) -> list[tuple[AttentionLayer, int]]:
    """The kinds of attention layers that a causal language model has, and how many of each.

    Layers without attention (recurrent, convolutions) are not among them.

    Args:
        model: as transformers built it; on the meta device is enough.
        seq_len: tokens of a row.
        packed: rows hold several documents.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        count = config.num_hidden_layers
        kinds = ["sliding_attention" if isinstance(window, int) else "full_attention"] * count
    implementation = config._attn_implementation or "eager"
    implementation = "flex" if implementation == FLEX else implementation
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    found: collections.Counter[AttentionLayer] = collections.Counter()
    for kind in kinds:
        if "attention" not in kind or "linear" in kind:
            continue
        chunk = getattr(config, "attention_chunk_size", None)
        key_size, value_size = _head_sizes(config, kind)
        slides = "sliding" in kind and isinstance(window, int) and window < seq_len
        found[
            AttentionLayer(
                key_size=key_size,
                value_size=value_size,
                implementation=implementation,
                window=window if slides else None,
                packed=packed,
                chunked="chunked" in kind and chunk is not None and chunk < seq_len,
                softcap=getattr(config, "attn_logit_softcapping", None) is not None,
                sinks=sinks,
                dropout=_dropout(config) if model.training else 0.0,
            )
        ] += 1
    return list(found.items())


def _head_sizes(config: Any, kind: str) -> tuple[int, int]:
    """Of keys and values. Multi-head latent attention has two, some families one for each kind."""
    if getattr(config, "qk_nope_head_dim", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    whole = getattr(config, "global_head_dim", None)
    if whole and "full" in kind:
        return whole, whole
    hidden = getattr(config, "hidden_size", None) or config.n_embd
    heads = getattr(config, "num_attention_heads", None) or config.n_head
    size = getattr(config, "head_dim", None) or hidden // heads
    return size, size


def _dropout(config: Any) -> float:
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def kernel_on(
    layer: AttentionLayer, *, dtype: torch.dtype, device: torch.device, seq_len: int
) -> AttentionKernel:
    """The kernel of a layer on the CUDA device of this process, asked of PyTorch where it chooses.

    `scaled_dot_product_attention` is asked which kernel it would take for one head of one short
    row: its rules do not depend on the length. Where other code decides (`flash-varlen`, `flex`,
    `eager`), the rules of `spec.attention_kernel` answer.
    """
    name = str(dtype).removeprefix("torch.")
    capability = torch.cuda.get_device_capability(device)
    chosen = attention_kernel(layer, dtype=name, capability=capability)
    if chosen.name not in _SDPA.values():
        return chosen

    length = min(seq_len, 256)

    def tensor(size: int) -> torch.Tensor:
        return torch.empty(1, length, 1, size, dtype=dtype, device=device).transpose(1, 2)

    query, key, value = tensor(layer.key_size), tensor(layer.key_size), tensor(layer.value_size)
    masked = layer.window is not None or layer.packed or layer.chunked or layer.masked
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if masked else None
    for each in (query, key, value):
        each.requires_grad_()
    asked: int = torch._fused_sdp_choice(
        query, key, value, mask, layer.dropout, is_causal=not masked, enable_gqa=False
    )
    answer = _SDPA.get(int(asked), chosen.name)
    if answer == chosen.name:
        return chosen
    return AttentionKernel(answer, "chosen by PyTorch")


def kernel_rows(
    model: nn.Module, *, dtype: torch.dtype, device: torch.device, seq_len: int, packed: bool,
    context: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of a run's `attention.json`: layer kind, how many, kernel and reason.

    `context`: sequences are split over context ranks, whose attention is our own.
    """
    rows = []
    for layer, count in layers_of(model, seq_len=seq_len, packed=packed):
        if context:
            kernel = context_kernel(layer, dtype=str(dtype).removeprefix("torch."))
        else:
            kernel = kernel_on(layer, dtype=dtype, device=device, seq_len=seq_len)
        row = {"layer": layer.kind, "layers": count, **dataclasses.asdict(kernel)}
        rows.append({("kernel" if key == "name" else key): value for key, value in row.items()})
    return rows
