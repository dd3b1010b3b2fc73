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
from hocket.runtime.collectives import all_gather, all_reduce, reduce_scatter
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_chunks import sunk
from hocket.serving.engine.attention_pieces import (
    Piece,
    attend_piece,
    attend_rows,
    join_pieces,
)
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import PagedCache, as_cached, read, write
from hocket.spec.serving import SPLIT_TOKENS

_PIECE = 1024
"""Cached tokens of a row that are gathered at once."""


def local_tokens(count: int, ranks: int) -> int:
    """Tokens of a step that a context rank computes: its part, the last padded, or all."""
    return -(-count // ranks) if count >= SPLIT_TOKENS * ranks else count


@dataclasses.dataclass(slots=True)
class ContextStep:
    """What of a step is a context rank's, on the CPU.

    Attributes:
        step: the whole step's indices. local: those of the tokens that this rank computes.
        each: how many these are, from `first` on; `split`: whether they are a part.
        counts: of each rank, tokens whose logits are asked for and which it computes.
        own: tokens whose keys and values it stores, at `places` of its pool.
        part: tokens of a block that it has, from `begin` on. block: tokens of a block.
    """

    step: StepIndices
    local: StepIndices
    each: int
    first: int
    split: bool
    counts: list[int]
    own: Tensor
    places: Tensor
    block: int
    part: int
    begin: int

    @classmethod
    def of(cls, step: StepIndices, axis: Axis) -> ContextStep:
        """That of this rank of the axis."""
        count, block = step.num_tokens, step.block_size
        part = block // axis.size
        each = local_tokens(count, axis.size)
        blocks = step.places // block
        at = step.places - blocks * block
        own = (at // part == axis.index).nonzero().squeeze(1)
        owner = step.wanted // each
        first = each * axis.index if each < count else 0
        return cls(
            step=step,
            local=_tokens_of(step, first, each) if each < count else step,
            each=each,
            first=first,
            split=each < count,
            counts=[int((owner == rank).sum()) for rank in range(axis.size)],
            own=own,
            places=blocks[own] * part + at[own] % part,
            block=block,
            part=part,
            begin=part * axis.index,
        )


def _tokens_of(step: StepIndices, first: int, each: int) -> StepIndices:
    """The indices of `each` tokens, the last ones of padding."""
    tokens, positions = (one[first : first + each] for one in (step.tokens, step.positions))
    missing = each - tokens.shape[0]
    wanted = step.wanted - first
    return dataclasses.replace(
        step,
        tokens=nn.functional.pad(tokens, (0, missing)),
        positions=nn.functional.pad(positions, (0, missing)),
        wanted=wanted[(wanted >= 0) & (wanted < each)],
    )


class ContextAttention:
    """Attention of one step on one context rank, over all layers in calling order.

    Args:
        cache: of the stage, of this rank's part of each block; [blocks, part, K, D].
        step: this rank's.
        axis: the context ranks. recorder: of their collectives.
        device: of the cache.
    """

    def __init__(
        self,
        cache: PagedCache,
        step: ContextStep,
        axis: Axis,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.cache, self.step, self.device = cache, step, device
        self._own, self._stored = step.own.to(device), step.places.to(device)
        self._lengths, self._tables = step.step.lengths.to(device), step.step.tables.to(device)
        self.axis, self.recorder = axis, recorder
        self._layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Query [1, A, t, D], key and value [1, K, t, .] of the tokens that this rank computes, to
        [1, t, A, E]."""
        layer, self._layer = self._layer, self._layer + 1
        q, k, v = self._gathered(query[0], key[0], value[0])
        pools = self.cache.keys[layer], self.cache.values[layer]
        for pool, new in zip(pools, (k, v), strict=True):
            rows = new.transpose(0, 1).index_select(0, self._own).flatten(1)
            write(pool, self._stored, as_cached(pool, rows))
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
        return self._merged(mixed.flatten(0, 1), weight.flatten(0, 1), options, query.dtype)

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """As `attend`, to latent vectors: [1, t, A, E]."""
        layer, self._layer = self._layer, self._layer + 1
        q, latent, _ = self._gathered(query[0], heads.taken().unsqueeze(0), None)
        pool = self.cache.keys[layer]
        width, size = heads.width, heads.latent_size
        pool.view(-1, width).index_copy_(0, self._stored, latent[0][self._own])

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
        return self._merged(mixed, weight, options, query.dtype)

    # --- between ranks -------------------------------------------------------------------------

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [heads, t, size], of all tokens: [heads, T, size]."""
        given = [query, key] if value is None else [query, key, value]
        if not self.step.split:
            return query, key, key if value is None else value
        flat = torch.cat([one.transpose(0, 1).flatten(1) for one in given], 1)
        whole = all_gather(flat, self.axis, self.recorder)[: self.step.step.num_tokens]
        sizes = [one.shape[0] * one.shape[2] for one in given]
        found = [
            each.reshape(-1, one.shape[0], one.shape[2]).transpose(0, 1)
            for each, one in zip(whole.split(sizes, 1), given, strict=True)  # type: ignore[no-untyped-call]
        ]
        return found[0], found[1], found[-1]

    def _merged(
        self, mixed: Tensor, weight: Tensor, options: Options, dtype: torch.dtype
    ) -> Tensor:
        """Attended values [A, T, E] of all ranks, each with its logarithm [A, T], as one, of the
        tokens that this rank computes: [1, t, A, E]."""
        mixed, weight = mixed.transpose(0, 1), weight.t().contiguous()
        every = all_gather(weight.unsqueeze(0), self.axis, self.recorder)
        total = every.logsumexp(0)
        share = mixed * torch.exp(weight - total).unsqueeze(-1)
        found = sunk(share, total, options.sinks).contiguous()
        if self.step.split:
            missing = self.step.each * self.axis.size - found.shape[0]
            padded = nn.functional.pad(found, (0, 0, 0, 0, 0, missing))
            return reduce_scatter(padded, self.axis, self.recorder).to(dtype).unsqueeze(0)
        all_reduce(found, self.axis, self.recorder)
        return found.to(dtype).unsqueeze(0)

    # --- this rank's keys ----------------------------------------------------------------------

    def _places(self, first: int, columns: int) -> Tensor:
        """Positions in the sequence of this rank's tokens of blocks `first` and so many: [n]."""
        step, device = self.step, self.device
        block = torch.arange(first, first + columns, device=device).unsqueeze(1) * step.block
        return (block + step.begin + torch.arange(step.part, device=device)).view(-1)

    def _decoded(
        self,
        asked: Tensor,
        rows_of: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor]],
        options: Options,
    ) -> Piece:
        """Queries [R, K, G, 1, D] of the rows that decode."""
        step = self.step
        return attend_rows(
            asked, rows_of, self._tables, self._lengths.unsqueeze(1), options,
            places=self._places, columns=max(1, _PIECE // step.part),
        )  # fmt: skip

    def _chunks(
        self,
    ) -> Iterator[tuple[int, int, Callable[[Options], Iterator[tuple[Tensor, Tensor]]]]]:
        """First token and tokens of each chunk, and its pieces: blocks, and what each query does
        not see of them [c, n]."""
        step = self.step
        device = self.device
        columns = max(1, _PIECE // step.part)
        for chunk in step.step.chunks:
            blocks = chunk.blocks.to(device)
            own = torch.arange(chunk.start, chunk.start + chunk.count, device=device).unsqueeze(1)

            def pieces(
                options: Options,
                blocks: Tensor = blocks,
                own: Tensor = own,
                start: int = chunk.start,
            ) -> Iterator[tuple[Tensor, Tensor]]:
                oldest = 0
                if options.window is not None:
                    oldest = max(0, start + 1 - options.window) // step.block
                for begin in range(oldest, blocks.shape[0], columns):
                    some = blocks[begin : begin + columns]
                    at = self._places(begin, some.shape[0])
                    hidden = at > own
                    if options.window is not None:
                        hidden = hidden | (at <= own - options.window)
                    yield some, hidden

            yield chunk.first, chunk.count, pieces
