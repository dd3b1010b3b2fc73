"""Dispatch by DeepEP, a library of kernels that move tokens between GPUs (`deep_ep.ElasticBuffer`).

    dispatch    [T, H] -> [R, H], a row for each choice, sorted by this rank's experts, and [R] of
                their routing weights; a token is sent once to each rank (over several nodes: once
                to each node), and copied there
    (my experts)
    combine     [R, H] -> [T, H], the rows of each token summed

Backward of either is the other (DeepEP, README, "model training"). Its kernels know what arrives
before the host does, which waits for the number of rows, once for each set of experts and forward;
a layer that is recomputed has it. Rows are bf16, and so are sums that one rank sends to another.

Legend: T tokens of this rank, k experts of a token, H hidden, R rows that arrive, E experts.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather, library_communication
from hocket.runtime.expert_parallel.dispatch import OTHER_CHOICE
from hocket.runtime.mesh import Axis
from hocket.runtime.recompute import found_once
from hocket.runtime.record import Recorder
from hocket.spec.errors import ModelError
from hocket.spec.expert_dispatch import DEEPEP, require_deepep

ROWS = torch.bfloat16
"""What the library sums."""


class DeepEP:
    """The buffer through which the ranks that together hold all experts exchange tokens.

    It is made by the first call, for as many tokens as any rank brings then.

    Args:
        axis: these ranks. recorder: of their messages.
    """

    def __init__(self, axis: Axis, recorder: Recorder) -> None:
        self.axis, self.recorder = axis, recorder
        self.tokens = 0
        """T at most."""
        self.index_dtype = torch.int64
        self._buffer: Any = None

    def __deepcopy__(self, memo: dict[int, object]) -> DeepEP:
        return self  # a copied module talks to the same ranks

    def buffer(self, hidden: Tensor, choices: int) -> Any:
        """The buffer for tokens [T, H] with k choices.

        Raises:
            OptionError: the library is not installed, or the GPU is older than it needs.
            ModelError: tokens that are not bf16, or more than the first call's.
        """
        tokens, width = hidden.shape
        if hidden.dtype != ROWS or width % 8:
            raise ModelError(
                f"--expert-dispatch {DEEPEP} sends rows of bf16 whose width is a multiple of 8; "
                f"these are {hidden.dtype}, {width} wide",
                hint="--dtype bf16" if hidden.dtype != ROWS else "--expert-dispatch direct",
            )
        if self._buffer is None:
            capability = torch.cuda.get_device_capability() if hidden.is_cuda else None
            require_deepep(cuda=True, dtype="bf16", capability=capability)
            mine = torch.tensor([tokens], device=hidden.device)
            self.tokens = int(all_gather(mine, self.axis, Recorder()).max())  # of no step
            library: Any = importlib.import_module("deep_ep")
            self.index_dtype = library.topk_idx_t
            # deterministic: rows of one expert in order of their tokens, so that a run repeats.
            self._buffer = library.ElasticBuffer(
                self.axis.group, num_max_tokens_per_rank=self.tokens, hidden=width,
                num_topk=choices, deterministic=True,
            )  # fmt: skip
        if tokens > self.tokens:
            raise ModelError(
                f"--expert-dispatch {DEEPEP}: its buffer was made for the {self.tokens} tokens of "
                f"the first step, and this one has {tokens}",
                hint="--expert-dispatch direct",
            )
        return self._buffer


class DeepRoutes:
    """What one dispatch came to.

    Attributes:
        handle: DeepEP's own, by which combine and backward find the way.
        load: [E of this rank] int64, rows of each expert.
    """

    def __init__(self, deep: DeepEP, num_experts: int) -> None:
        self.deep, self.num_experts = deep, num_experts
        self.handle: Any = None
        self.load: Tensor = torch.empty(0)

    def expert_ids(self) -> Tensor:
        """[R] int64, number among this rank's experts of each row that arrived."""
        own = torch.arange(len(self.load), device=self.load.device)
        rows = sum(self.handle.num_recv_tokens_per_expert_list)
        return torch.repeat_interleave(own, self.load, output_size=rows)

    def there(self, hidden: Tensor, weights: Tensor | None, index: Tensor | None) -> Any:
        """[T, H] to [R, H], and [T, k] of weights to [R]; `index` None: by the same way again."""
        choices = (self.handle.topk_idx if index is None else index).shape[1]
        buffer = self.deep.buffer(hidden, choices)
        same: dict[str, Any] = {}
        if index is None:
            same = {"handle": self.handle, "num_sms": self.handle.num_sms}
        else:
            index = index.to(self.deep.index_dtype).contiguous()
            same = {"topk_idx": index, "num_experts": self.num_experts}
        with self._moves(hidden, len(hidden)):
            rows, _, of_rows, self.handle, _ = buffer.dispatch(
                hidden.contiguous(), topk_weights=weights, do_expand=True, **same
            )
        return rows, of_rows

    def back(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[R, H] to [T, H], the rows of each token summed, and [R] of weights to [T, k]."""
        tokens, choices = self.handle.topk_idx.shape
        buffer = self.deep.buffer(rows[:0], choices)
        with self._moves(rows, tokens):
            summed, of_tokens, _ = buffer.combine(
                rows.contiguous(), handle=self.handle, topk_weights=weights
            )
        return summed, of_tokens

    def _moves(self, rows: Tensor, tokens: int) -> Any:
        """Recorded are the tokens of this rank, there and back: what of them is sent how often is
        the library's choice."""
        nbytes = tokens * rows.shape[1] * rows.element_size()
        return library_communication(self.deep.recorder, "all-to-all", self.deep.axis, nbytes)


def dispatch_deep(
    hidden: Tensor, index: Tensor, weights: Tensor, num_experts: int, deep: DeepEP
) -> tuple[Tensor, Tensor, DeepRoutes]:
    """Tokens to the ranks of their experts. Waits for the number of rows.

    Args:
        hidden: [T, H] bf16. index: [T, k] int64, of all experts. weights: [T, k].
        num_experts: of all ranks; the rank of index i on the axis holds the i-th equal part.

    Returns:
        [R, H], their routing weights [R] in fp32, and the way back.
    """
    routes = DeepRoutes(deep, num_experts)
    rows, of_rows = _Dispatch.apply(hidden, weights, index, routes)  # type: ignore[no-untyped-call]
    return rows, of_rows, routes


def combine_deep(rows: Tensor, routes: DeepRoutes) -> Tensor:
    """[R, H] bf16 of this rank's experts, weighted, to [T, H]: summed over the experts of each
    token."""
    found: Tensor = _Combine.apply(rows, routes)  # type: ignore[no-untyped-call]
    return found


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weights: Tensor, index: Tensor, routes: DeepRoutes
    ) -> tuple[Tensor, Tensor]:
        ctx.routes, ctx.dtype = routes, weights.dtype
        wide = weights.float().contiguous()

        both: list[Tensor] = []

        def find() -> tuple[Any, Tensor]:
            both.extend(routes.there(hidden, wide, index))
            counts = routes.handle.num_recv_tokens_per_expert_list
            return routes.handle, torch.tensor(counts, device=hidden.device)

        (routes.handle, routes.load), again = found_once(find)
        if again:
            torch._assert_async((routes.handle.topk_idx == index).all(), OTHER_CHOICE)
            both.extend(routes.there(hidden, wide, None))
        return both[0], both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_rows: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weights = ctx.routes.back(grad, of_rows.float().contiguous())
        assert weights is not None
        return hidden, weights.to(ctx.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: DeepRoutes) -> Tensor:  # type: ignore[override]
        ctx.routes = routes
        return routes.back(rows)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows, _ = ctx.routes.there(grad, None, None)
        return rows, None
