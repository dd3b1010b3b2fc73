"""Vocabulary-parallel cross-entropy: the loss without ever gathering the logits.

Of each token every rank knows the log of its own sum of exponentials and, if the label is its
own, the label's logit; one all-gather of these two numbers a token and rank gives the loss
everywhere (after Megatron-LM, Shoeybi et al. 2019, section 3, whose three all-reduces become one
message). The gradient, softmax minus one-hot, is written over the logits: nothing of their size is
allocated. Tokens are taken in chunks that fit a cache.

Legend: N tokens, V vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder

_CHUNK_BYTES = {"cpu": 2**19, "cuda": 2**28}

# Operations whose backward does not read their own result, which may therefore be overwritten.
_KEEPS_NO_RESULT = ("Addmm", "Mm", "Bmm", "Linear", "Mul", "Div", "ToCopy", "Clone", "_Halved")
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    start: int = 0,
    *,
    ignore_index: int = -100,
    recorder: Recorder | None = None,
) -> Tensor:
    """The cross-entropy of each token, in fp32, equal on every rank of the axis.

    Args:
        logits: [..., V of this rank]. With gradients on they are overwritten.
        labels: [...] global token ids, `ignore_index` where there is no target (loss 0).
        axis: the tensor axis; of size 1 there is no communication.
        start: first vocabulary row of this rank.
        recorder: where the all-gather is counted; needed on an axis of several ranks.
    """
    target = labels.reshape(-1)
    flat = logits.reshape(target.numel(), logits.shape[-1])
    assert flat.shape[0] == target.shape[0], (logits.shape, labels.shape)
    assert axis.size == 1 or recorder is not None
    if logits.requires_grad and torch.is_grad_enabled():
        if not _may_overwrite(logits):
            flat = flat.clone()
        loss: Tensor = _CrossEntropy.apply(flat, target, axis, start, ignore_index, recorder)  # type: ignore[no-untyped-call]
    else:
        parts = _partial(flat, target - start, keep=False)
        loss, _ = _combine(parts, target == ignore_index, axis, recorder)
    return loss.view(labels.shape)


def _may_overwrite(logits: Tensor) -> bool:
    node: Any = logits.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None and node.name().startswith(_KEEPS_NO_RESULT)


def _chunk_rows(logits: Tensor) -> int:
    budget = _CHUNK_BYTES["cuda" if logits.is_cuda else "cpu"]
    return max(1, budget // max(1, 4 * logits.shape[-1]))


def _partial(logits: Tensor, local: Tensor, keep: bool) -> Tensor:
    """[2, N]: log of the sum of exponentials over this rank's rows; the label's logit or 0.

    `keep` leaves this rank's softmax in place of fp32 logits.
    """
    n, vocabulary = logits.shape
    parts = torch.empty(2, n, dtype=torch.float32, device=logits.device)
    if vocabulary == 0:
        parts[0].fill_(-torch.inf)
        parts[1].zero_()
        return parts
    mine = (local >= 0) & (local < vocabulary)
    label_logit = logits.gather(1, local.clamp(0, vocabulary - 1).unsqueeze(1)).squeeze(1)
    torch.mul(label_logit.float(), mine, out=parts[1])
    rows = _chunk_rows(logits)
    for chunk, lse in zip(torch.split(logits, rows), torch.split(parts[0], rows), strict=True):
        largest = chunk.amax(-1).float()
        softmax = torch.softmax(chunk, -1, dtype=torch.float32)
        # The largest entry of a softmax is 1 / sum exp(x - max x).
        torch.sub(largest, softmax.amax(-1).log_(), out=lse)
        if keep:
            chunk.copy_(softmax)
    return parts


def _combine(
    parts: Tensor, ignored: Tensor, axis: Axis, recorder: Recorder | None
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token, and this rank's share of each sum of exponentials (None: all)."""
    if axis.size == 1:
        return (parts[0] - parts[1]).masked_fill_(ignored, 0), None
    assert recorder is not None
    every = all_gather(parts.unsqueeze(0), axis, recorder)
    lse = torch.logsumexp(every[:, 0], 0)
    loss = (lse - every[:, 1].sum(0)).masked_fill_(ignored, 0)
    return loss, (parts[0] - lse).exp_()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        axis: Axis,
        start: int,
        ignore_index: int,
        recorder: Recorder | None,
    ) -> Tensor:
        local, ignored = labels - start, labels == ignore_index
        # Half precision keeps its logits and takes the softmax again: kept in bf16 it would be
        # rounded twice.
        keep = logits.dtype == torch.float32
        loss, share = _combine(_partial(logits, local, keep), ignored, axis, recorder)
        # Not save_for_backward: the buffer is overwritten on purpose.
        ctx.buffer, ctx.local, ctx.ignored, ctx.share, ctx.keep = (
            logits,
            local,
            ignored,
            share,
            keep,
        )
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buffer, local = ctx.buffer, ctx.local
        assert buffer is not None, "the logits were overwritten by the first backward"
        ctx.buffer = None
        grad = grad.masked_fill(ctx.ignored, 0)
        weight = (grad if ctx.share is None else grad * ctx.share).unsqueeze(1)
        vocabulary = buffer.shape[1]
        if vocabulary == 0:
            return buffer, None, None, None, None, None
        mine = (local >= 0) & (local < vocabulary)
        column = local.clamp(0, vocabulary - 1).unsqueeze(1)
        minus = (-grad * mine).unsqueeze(1)
        rows = _chunk_rows(buffer)
        pieces = (buffer, weight, column, minus)
        with torch.no_grad():
            for chunk, w, c, m in zip(*(torch.split(p, rows) for p in pieces), strict=True):
                if ctx.keep:
                    chunk.mul_(w).scatter_add_(1, c, m)
                else:
                    softmax = torch.softmax(chunk, -1, dtype=torch.float32)
                    chunk.copy_(softmax.mul_(w).scatter_add_(1, c, m))
        return buffer, None, None, None, None, None
