"""Attention of packed rows and of pages by flash attention, whichever torch is installed."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: tuple[Tensor, Tensor | None],
    longest: tuple[int, int],
    *,
    window: int | None = None,
    scale: float | None = None,
    pages: tuple[Tensor, Tensor] | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Causal attention of rows of several lengths, as `torch.nn.attention.varlen.varlen_attn`.

    From torch 2.15 on that function chooses cuDNN on Hopper and Blackwell where cuDNN takes the
    call. It builds a plan for each new size; its results for empty rows, its time and its memory
    are not known here; and it takes no windows, so that layers of one model would differ. The
    operation below is what that function calls, and its default is flash attention; a context
    that enables flash alone would do so for every thread of the process.

    Args:
        query: [T, A, D]. key, value: [T, K, D], or pools of pages [P, page, K, D].
        begins: first tokens of the rows of queries and of keys, and their end, [B + 1] int32.
        longest: tokens of the longest row of queries and of keys.
        window: keys that a query sees, its own among them; None: all up to its own.
        pages: keys in use [B] and pages [B, most] of each row, int32.
        num_splits: of the keys; None: as the kernel chooses.

    Returns:
        [T, A, D].
    """
    # It registers the operation; torch's compiler comes with it, which a CPU run does without.
    from torch.nn.attention import varlen  # noqa: F401

    out, _, _ = torch.ops.torch_attn._varlen_attn(
        query, key, value, *begins, *longest, window is None, scale,
        [-1 if window is None else window - 1, 0], key.shape[-2] != query.shape[-2],
        *(pages or (None, None)), num_splits,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out
