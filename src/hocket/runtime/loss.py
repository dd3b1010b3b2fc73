"""The default loss: next-token cross-entropy of a model's logits, split by vocabulary or whole.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.collectives import all_reduce
from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from hocket.runtime.tensor_parallel.layers import VocabParallelHead
from hocket.spec.errors import OptionError
from hocket.spec.placement import Placement
from hocket.spec.plan import RouterLoss

IGNORED = -100
"""The label of a token that has no target."""


class NextTokenLoss:
    """Sum of the cross-entropies of a microbatch's `labels` [B, S], and, without gradients, their
    number (else 0).

    The logits [B, S, V] (or [B, S, V of this rank], if `module` ends in a vocabulary-parallel
    head) are the output's `logits`, or its first entry, or the output itself. They are overwritten.

    A router's auxiliary loss (Switch Transformer, Fedus et al. 2021, section 2.2) is not linear in
    the batch. It is that of a microbatch of all data ranks, whose counts and probabilities are
    summed over them, and the loss of a step has its mean over microbatches: what a loop over plain
    transformers gets from `(model(**microbatch, num_items_in_batch=tokens / count).loss /
    count).backward()`, whatever the number of data ranks. Where the model's loss is another
    function, it is the `aux_loss` that its forward returns, and data ranks count as microbatches.
    In evaluation it is left out: the result is the cross-entropy.

    Args:
        module: the last stage.
        mesh: the ranks.
        labels_shifted: `labels[:, i]` is the token after `input_ids[:, i]`. False: transformers'
            convention, `labels[:, i]` is the label of `input_ids[:, i]` itself.
        router: the router's auxiliary loss; None: the model has none.
        router_degree: as `auxiliary_loss` takes it.

    Attributes:
        tokens_per_microbatch: valid tokens of the global batch divided by its microbatches, the
            weight of one microbatch's auxiliary loss; set before each step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        labels_shifted: bool = False,
        router: RouterLoss | None = None,
        router_degree: int = 1,
    ) -> None:
        self.recorder = mesh.recorder
        self.data = mesh.data
        self.labels_shifted = labels_shifted
        self.router = router
        self.router_degree = router_degree
        self.tokens_per_microbatch: Any = 1.0
        heads = [m for m in module.modules() if isinstance(m, VocabParallelHead)]
        self.axis = heads[-1].axis if heads else Axis("tp")
        self.start = heads[-1].start if heads else 0

    def begin(self, tokens_per_microbatch: Any) -> None:
        self.tokens_per_microbatch = tokens_per_microbatch

    def __call__(
        self, output: Any, microbatch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | int]:
        labels = targets(microbatch["labels"], self.labels_shifted)
        loss = vocab_parallel_cross_entropy(
            logits_of(output),
            labels,
            self.axis,
            self.start,
            ignore_index=IGNORED,
            recorder=self.recorder,
        ).sum()
        if self.router is not None and torch.is_grad_enabled():
            mask = microbatch.get("attention_mask")
            auxiliary = auxiliary_loss(output, self.router_degree)
            if self.router.of_all_ranks and self.data.size > 1:
                auxiliary = balancing_loss(
                    output.router_logits, self.router, mask, self.data, self.recorder
                )
                auxiliary = _divided(auxiliary, self.router_degree)
            auxiliary = self.router.coefficient * auxiliary
            loss = loss + self.tokens_per_microbatch * auxiliary.to(loss)
        # A training step is divided by the tokens of the global batch, which are known before it.
        return loss, 0 if torch.is_grad_enabled() else (labels != IGNORED).sum()


class OwnLoss:
    """A loss function of the caller's. It gets whole logits [B, S, V] on every tensor rank, and the
    tokens that it counts are those that the step's loss is divided by.

    Args:
        function: `(output, microbatch) -> (sum of losses, number of tokens)`.
        module: the last stage. Where it ends in a vocabulary-parallel head, the output's logits are
            gathered (all-gather over tp; in backward each rank takes its shard of the gradient).

    Attributes:
        tokens: counted in the forwards of this step.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor | int]], module: nn.Module):
        self.function = function
        heads = [m for m in module.modules() if isinstance(m, VocabParallelHead)]
        self._head = heads[-1] if heads else None
        self.tokens: Tensor | int = 0

    def __call__(
        self, output: Any, microbatch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | int]:
        if self._head is not None:
            output = _with_logits(output, self._head.gathered(logits_of(output)))
        total, tokens = self.function(output, microbatch)
        self.tokens = self.tokens + tokens
        return total, tokens

    def begin(self, tokens_per_microbatch: Any) -> None:
        self.tokens = 0


@torch.no_grad()
def divide_by_counted(
    loss: Tensor,
    divisor: Any,
    stages: Iterable[Any],
    stepped: Iterable[tuple[str, nn.Parameter]],
    everywhere: Callable[[Tensor], Tensor],
) -> Tensor:
    """Divide a step's loss and gradients by the tokens that the caller's loss function counted
    instead of by `divisor`, the number of labels. A CUDA device is not read.

    Args:
        loss: of the step, divided by `divisor`.
        stages: of this rank, with their loss functions.
        stepped: tensors whose `.grad` is the step's.
        everywhere: the sum over the world of the last stages' numbers.
    """
    counted = sum(s.loss_fn.tokens for s in stages if isinstance(s.loss_fn, OwnLoss))
    total = everywhere(torch.as_tensor(counted, dtype=torch.float64, device=loss.device))
    factor = divisor / total.clamp(min=1)
    if not factor.is_cuda and factor == 1:
        return loss
    for _, tensor in stepped:
        if tensor.grad is not None:
            tensor.grad.mul_(factor.to(tensor.grad.dtype))
    return loss * factor.to(loss.dtype)


def _with_logits(output: Any, logits: Tensor) -> Any:
    """What a model returned, with other logits."""
    if isinstance(output, Tensor):
        return logits
    if getattr(output, "logits", None) is None:
        return (logits, *output[1:])
    found = copy.copy(output)
    found.logits = logits
    return found


def auxiliary_loss(output: Any, degree: int = 1) -> Tensor:
    """The router's auxiliary loss that a model returned, its gradient divided by `degree`: by the
    number of tensor ranks that add up their gradients of the router's logits."""
    found = getattr(output, "aux_loss", None)
    assert isinstance(found, Tensor), "the model returned no aux_loss"
    return _divided(found, degree)


def _divided(loss: Tensor, degree: int) -> Tensor:
    """A loss with its gradient divided by `degree`."""
    if degree == 1:
        return loss
    fixed = loss.detach()
    return fixed + (loss - fixed) / degree


def balancing_loss(
    gates: Sequence[Tensor],
    router: RouterLoss,
    mask: Tensor | None,
    data: Axis,
    recorder: Recorder,
) -> Tensor:
    """The load-balancing loss over the tokens of all data ranks, equal on each (Fedus et al. 2021,
    equations 4 to 6, over all layers as transformers has it).

    The gradients of all ranks add up to that of one process: each takes its part of the sum as
    often as there are ranks, which a step divides by.

    Args:
        gates: each layer's logits of the router, [B S, E].
        mask: [B, S], 0 where a token does not count; None: all do.
        data: axis whose ranks have the tokens, context ranks among them. One all-reduce of 2 E + 1
            numbers.
    """
    first = gates[0]
    weight = None
    if mask is not None and mask.ndim == 2:
        weight = mask.reshape(-1, 1).to(first.device, torch.float32)
    counts = probabilities = torch.zeros(router.experts, device=first.device)
    rows = torch.zeros(1, device=first.device)
    for gate in gates:
        chances = gate.softmax(-1)
        chosen = torch.zeros_like(chances, dtype=torch.float32)
        chosen.scatter_(1, chances.topk(router.top_k, dim=-1).indices, 1.0)
        kept = chances.float()
        if weight is not None:
            chosen, kept = chosen * weight, kept * weight
        counts, probabilities = counts + chosen.sum(0), probabilities + kept.sum(0)
        rows = rows + (float(len(gate)) if weight is None else weight.sum())
    summed = torch.cat([counts, probabilities.detach(), rows])
    all_reduce(summed, data, recorder)
    counts, fixed, rows = summed[: router.experts], summed[router.experts : -1], summed[-1]
    probabilities = fixed + (probabilities - probabilities.detach()) * data.size
    return router.experts * (counts / rows * (probabilities / rows)).sum()


def router_degree(router: RouterLoss, placements: Mapping[str, Placement], degree: int) -> int:
    """`degree` where the gradients of the router's parameters are parts of a sum over tp, else
    1."""
    gates = tuple(f"{name}." for name in router.gates)
    mine = (p for name, p in placements.items() if name.startswith(gates))
    return degree if any("tp" in p.grad_sum for p in mine) else 1


def targets(labels: Tensor, shifted: bool) -> Tensor:
    """The label of each position's logits [B, S]: the next token's. `shifted`: they are that."""
    if shifted:
        return labels
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def check_convention(microbatch: Mapping[str, Tensor], shifted: bool) -> None:
    """Reject labels that follow the other convention than `shifted` says. Reads the device.

    Raises:
        OptionError: the labels of one microbatch equal its tokens in the wrong place.
    """
    tokens, labels = microbatch.get("input_ids"), microbatch["labels"]
    if tokens is None or tokens.shape != labels.shape or labels.ndim != 2 or labels.shape[1] < 3:
        return
    own = _agree(labels, tokens)
    following = _agree(labels[:, :-1], tokens[:, 1:])
    if shifted and own and not following:
        raise OptionError(
            "labels_shifted=True, and the labels equal input_ids at the same positions: the model "
            "would learn to copy its input",
            hint="labels_shifted=False",
        )
    if not shifted and following and not own:
        raise OptionError(
            "the labels equal input_ids one position ahead, that is they are shifted already: "
            "shifted once more, the model would learn to skip a token",
            hint="labels=input_ids as for transformers, or parallelize(..., labels_shifted=True)",
        )


def _agree(labels: Tensor, tokens: Tensor) -> bool:
    """Whether labels that are not ignored equal the tokens; with at least two of them."""
    counted = labels != IGNORED
    return int(counted.sum()) > 1 and bool(((labels == tokens) | ~counted).all())


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    found = output[0] if logits is None else logits
    assert isinstance(found, Tensor), type(output)
    return found
