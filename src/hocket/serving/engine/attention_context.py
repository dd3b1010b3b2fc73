"""Attention over context ranks: each has its tokens of every block, and attends to those alone.

    block of a sequence     [ rank 0's tokens | rank 1's | ... ]      in parts of equal size
    a step of prompts       a rank computes its part of the tokens; queries, keys and values of all
                            are gathered in each layer; keys and values go to the ranks they are of
    a step of few tokens    every rank computes all of them
    attention               all queries, over the keys of this rank: attended values, and the
                            logarithm of the sum of exponentials
    merged                  weighted by a softmax over the ranks' logarithms, and summed

So the cache divides over the ranks, and so does the work of attention, whatever the lengths: each
block is on all of them. Queries travel, not the keys of the prompt's beginning (Yang et al. 2024,
Context Parallelism for Scalable Million-Token Inference, section 3.4, "pass-Q").

Legend: T tokens of a step, R rows that decode, A query heads, K key/value heads, D head size, E
value size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hocket.models.latent import LatentHeads
from hocket.runtime.mesh import Axis
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_pieces import (
    Piece,
    attend_piece,
    attend_rows,
    join_pieces,
)
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import PagedCache, as_cached, read, write
from hocket.serving.engine.context_exchange import BlockPart, Exchange, TokenShare

_PIECE = 1024
"""Cached tokens of a row that are gathered at once."""


@dataclasses.dataclass(slots=True)
class ContextStep:
    """What of a step is a context rank's, on a CPU.

    Attributes:
        step: the whole step's indices. local: those of the tokens that this rank computes.
        share: which these are.
        counts: of each rank, tokens whose logits are asked for and which it computes.
        part: of each block that it holds.
        own: tokens whose keys and values it stores, at `places` of its pool.
    """

    step: StepIndices
    local: StepIndices
    share: TokenShare
    counts: list[int]
    part: BlockPart
    own: Tensor
    places: Tensor

    @classmethod
    def of(cls, step: StepIndices, axis: Axis) -> ContextStep:
        """That of this rank of the axis."""
        part = BlockPart.of(step.block_size, axis)
        share = TokenShare.of(step.num_tokens, axis)
        held, places = part.own(step.places)
        own = held.nonzero().squeeze(1)
        asked, local = step.wanted.tolist(), step
        if share.split:
            local = dataclasses.replace(
                step,
                tokens=share.part(step.tokens),
                positions=share.part(step.positions),
                wanted=torch.tensor(share.wanted(asked), dtype=torch.long),
            )
        return cls(step, local, share, share.counts(asked), part, own, places[own])


class ContextAttention:
    """Attention of one step on one context rank, on a CPU, over all layers in calling order.

    Args:
        cache: of the stage, of this rank's part of each block; [blocks, part, K, D].
        step: this rank's.
        exchange: with the other ranks.
    """

    def __init__(self, cache: PagedCache, step: ContextStep, exchange: Exchange) -> None:
        self.cache, self.step, self.exchange = cache, step, exchange
        self._layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Query [1, A, t, D], key and value [1, K, t, .] of the tokens that this rank computes, to
        [1, t, A, E]."""
        layer, self._layer = self._layer, self._layer + 1
        q, k, v = self.exchange.gathered(query[0], key[0], value[0])
        pools = self.cache.keys[layer], self.cache.values[layer]
        for pool, new in zip(pools, (k, v), strict=True):
            rows = new.transpose(0, 1).index_select(0, self.step.own).flatten(1)
            write(pool, self.step.places, as_cached(pool, rows))
        heads = pools[0].shape[2]

        def rows_of(blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            picked = (read(pool, blocks, q.dtype).view(*shape, *pool.shape[2:]) for pool in pools)
            return tuple(one.transpose(-3, -2) for one in picked)  # type: ignore[return-value]

        count = self.step.step.num_decode
        asked = q.reshape(heads, -1, *q.shape[1:])  # [K, G, T, D]
        parts: list[Piece] = []
        if count:
            some = asked[:, :, :count].permute(2, 0, 1, 3).unsqueeze(3)
            mixed, weight = self._decoded(some, rows_of, options)
            parts.append((mixed[..., 0, :].permute(1, 2, 0, 3), weight[..., 0].permute(1, 2, 0)))
        for first, tokens, piece in self._chunks():
            own = asked[:, :, first : first + tokens]
            parts.append(
                join_pieces(
                    attend_piece(own, *rows_of(blocks, (-1,)), hidden, options)
                    for blocks, hidden in piece(options)
                )
            )
        mixed, weight = torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2)
        mixed, weight = mixed.flatten(0, 1).transpose(0, 1), weight.flatten(0, 1).t().contiguous()
        return self.exchange.merged(mixed, weight, options, query.dtype)

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """As `attend`, to latent vectors: [1, t, A, E]."""
        layer, self._layer = self._layer, self._layer + 1
        q, latent, _ = self.exchange.gathered(query[0], heads.taken().unsqueeze(0), None)
        pool = self.cache.keys[layer]
        width, size = heads.width, heads.latent_size
        pool.view(-1, width).index_copy_(0, self.step.places, latent[0][self.step.own])

        def rows_of(blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            cached = pool.index_select(0, blocks).view(*shape, width).unsqueeze(-3)
            return cached, cached[..., :size]

        count = self.step.step.num_decode
        parts: list[Piece] = []
        if count:
            some = heads.absorb(q[:, :count]).transpose(0, 1)[:, None, :, None]
            mixed, weight = self._decoded(some, rows_of, options)
            read = heads.read(mixed[:, 0, :, 0].transpose(0, 1).to(query.dtype)).float()
            parts.append((read, weight[:, 0, :, 0].t()))
        for first, tokens, piece in self._chunks():
            own = q[:, first : first + tokens].unsqueeze(1)
            mixed, weight = join_pieces(
                attend_piece(own, *heads.expand(rows_of(blocks, (-1,))[0][0]), hidden, options)
                for blocks, hidden in piece(options)
            )
            parts.append((mixed[:, 0], weight[:, 0]))
        mixed, weight = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)
        mixed, weight = mixed.transpose(0, 1), weight.t().contiguous()
        return self.exchange.merged(mixed, weight, options, query.dtype)

    # --- this rank's keys ----------------------------------------------------------------------

    def _places(self, first: int, columns: int) -> Tensor:
        return self.step.part.positions(first, columns, self.cache.device)

    def _decoded(
        self,
        asked: Tensor,
        rows_of: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor]],
        options: Options,
    ) -> Piece:
        """Queries [R, K, G, 1, D] of the rows that decode."""
        step = self.step.step
        return attend_rows(
            asked, rows_of, step.tables, step.lengths.unsqueeze(1), options,
            places=self._places, columns=max(1, _PIECE // self.step.part.size),
        )  # fmt: skip

    def _chunks(
        self,
    ) -> Iterator[tuple[int, int, Callable[[Options], Iterator[tuple[Tensor, Tensor]]]]]:
        """First token and tokens of each chunk, and its pieces: blocks, and what each query does
        not see of them [c, n]."""
        part = self.step.part
        columns = max(1, _PIECE // part.size)
        for chunk in self.step.step.chunks:
            own = torch.arange(chunk.start, chunk.start + chunk.count).unsqueeze(1)

            def pieces(
                options: Options,
                blocks: Tensor = chunk.blocks,
                own: Tensor = own,
                start: int = chunk.start,
            ) -> Iterator[tuple[Tensor, Tensor]]:
                oldest = 0
                if options.window is not None:
                    oldest = max(0, start + 1 - options.window) // part.span
                for begin in range(oldest, blocks.shape[0], columns):
                    some = blocks[begin : begin + columns]
                    at = self._places(begin, some.shape[0])
                    hidden = at > own
                    if options.window is not None:
                        hidden = hidden | (at <= own - options.window)
                    yield some, hidden

            yield chunk.first, chunk.count, pieces
