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

_CHUNK_BYTES = {"cpu": 2**21, "cuda": 2**28}

Labels = tuple[Tensor, "Tensor | None"]
"""[N, 1] column of each token's label, [N] whether that row is this rank's (None: always)."""

# Operations whose backward does not read their own result, which may therefore be overwritten.
_KEEPS_NO_RESULT = (
    "Addmm", "Mm", "Bmm", "Linear", "Mul", "Div", "ToCopy", "Clone", "_Halved", "_KeptInPart",
    "_Overlapped",
)  # fmt: skip
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
    """The cross-entropy of each token, equal on every rank of the axis: in fp32, of fp64 logits in
    fp64.

    Args:
        logits: [..., V of this rank]. With gradients on they are overwritten.
        labels: [...] global token ids, `ignore_index` where there is no target (loss 0).
        axis: the tensor axis; of size 1 there is no communication.
        start: first vocabulary row of this rank.
        recorder: where the all-gather is counted; needed on an axis of several ranks.
    """
    target = labels.reshape(-1)
    flat = logits.reshape(target.numel(), logits.shape[-1])
    assert axis.size == 1 or recorder is not None
    ignored = target == ignore_index
    labelled = _labels(target, ignored, axis.size, start, flat.shape[1])
    if logits.requires_grad and torch.is_grad_enabled():
        if not _may_overwrite(logits):
            flat = flat.clone()
        loss: Tensor = _CrossEntropy.apply(flat, labelled, ignored, axis, recorder)  # type: ignore[no-untyped-call]
    else:
        loss, _ = _combine(_partial(flat, labelled, keep=False), ignored, axis, recorder)
    return loss.view(labels.shape)


def _labels(target: Tensor, ignored: Tensor, size: int, start: int, vocabulary: int) -> Labels:
    if size == 1:
        return target.masked_fill(ignored, 0).unsqueeze(1), None
    local = target - start
    mine = (local >= 0) & (local < vocabulary)
    return local.clamp_(0, max(0, vocabulary - 1)).unsqueeze(1), mine


def _may_overwrite(logits: Tensor) -> bool:
    node: Any = logits.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None and node.name().startswith(_KEEPS_NO_RESULT)


def _scratch(logits: Tensor) -> tuple[int, Tensor]:
    """Rows of a chunk, and a buffer for one in the dtype of the loss: memory fresh from the system
    costs more to touch for the first time than the softmax itself."""
    n, vocabulary = logits.shape
    budget = _CHUNK_BYTES["cuda" if logits.is_cuda else "cpu"]
    rows = max(1, min(n, budget // max(1, 4 * vocabulary)))
    return rows, torch.empty(rows, vocabulary, dtype=loss_dtype(logits.dtype), device=logits.device)


def loss_dtype(logits: torch.dtype) -> torch.dtype:
    """What a loss of logits is computed in: fp32, or fp64 where they are."""
    return torch.float64 if logits == torch.float64 else torch.float32


def _partial(logits: Tensor, labels: Labels, keep: bool) -> Tensor:
    """[2, N]: log of the sum of exponentials over this rank's rows; the label's logit or 0.

    `keep` leaves this rank's softmax in place of fp32 or fp64 logits.
    """
    n, vocabulary = logits.shape
    dtype = loss_dtype(logits.dtype)
    parts = torch.empty(2, n, dtype=dtype, device=logits.device)
    if vocabulary == 0:
        parts[0].fill_(-torch.inf)
        parts[1].zero_()
        return parts
    column, mine = labels
    if logits.dtype == dtype:  # one kernel, where a copy would be a second
        torch.gather(logits, 1, column, out=parts[1].unsqueeze(1))
    else:
        parts[1].copy_(logits.gather(1, column).squeeze(1))
    if mine is not None:
        parts[1].mul_(mine)
    rows, scratch = _scratch(logits)
    for chunk, lse in zip(torch.split(logits, rows), torch.split(parts[0], rows), strict=True):
        softmax = torch.softmax(chunk, -1, dtype=dtype, out=scratch[: len(chunk)])
        # The largest entry of a softmax is 1 / sum exp(x - max x).
        torch.sub(chunk.amax(-1), softmax.amax(-1).log_(), out=lse)
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
        labels: Labels,
        ignored: Tensor,
        axis: Axis,
        recorder: Recorder | None,
    ) -> Tensor:
        # Half precision keeps its logits and takes the softmax again: kept in bf16 it would be
        # rounded twice.
        keep = logits.dtype == loss_dtype(logits.dtype)
        loss, share = _combine(_partial(logits, labels, keep), ignored, axis, recorder)
        # Not save_for_backward: the buffer is overwritten on purpose.
        ctx.buffer, ctx.labels, ctx.ignored, ctx.share, ctx.keep = (
            logits, labels, ignored, share, keep,
        )  # fmt: skip
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        buffer, (column, mine) = ctx.buffer, ctx.labels
        assert buffer is not None, "the logits were overwritten by the first backward"
        ctx.buffer = None
        with torch.no_grad():
            grad = grad.masked_fill(ctx.ignored, 0)
            weight = (grad if ctx.share is None else grad * ctx.share).unsqueeze(1)
            minus = grad.neg().unsqueeze(1) if mine is None else (grad.neg() * mine).unsqueeze(1)
            if buffer.shape[1] == 0:
                pass
            elif ctx.keep:
                buffer.mul_(weight).scatter_add_(1, column, minus)
            else:
                rows, scratch = _scratch(buffer)
                pieces = (buffer, weight, column, minus)
                for chunk, w, c, m in zip(*(torch.split(p, rows) for p in pieces), strict=True):
                    part = torch.softmax(chunk, -1, dtype=torch.float32, out=scratch[: len(chunk)])
                    chunk.copy_(part.mul_(w).scatter_add_(1, c, m))
        return buffer, None, None, None, None
