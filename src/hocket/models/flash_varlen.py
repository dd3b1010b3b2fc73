"""Attention of packed rows and of pages by flash attention, whichever torch is installed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def flash_varlen(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` with its arguments, computed by flash attention.

    From torch 2.15 on that function prefers cuDNN on Hopper and Blackwell where cuDNN takes the
    call. It builds a plan for each new size; its results for empty rows, its time and its memory
    are not known here; and it takes no windows, so that layers of one model would differ.
    """
    from torch.nn.attention.varlen import varlen_attn

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = varlen_attn(query, key, value, *rest, **options)
    assert isinstance(out, Tensor)
    return out
