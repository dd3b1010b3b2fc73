"""Paged attention on CPU, whose cost grows with the tokens that are really attended.

In fp32, where they could be compiled, kernels of our own (`native`) read the pages where they are.
What follows is done otherwise: for another dtype, with a softcap, or without a compiler.

Decoding rows: the queries travel to the keys, not the keys to the queries. Blocks that are
attended are taken in the order in which they lie in memory; where they lie side by side, one
batched product reads them in place, and only blocks that lie alone are copied first:

    cache        [ b0 b1 b2 b3 | . . | b6 | . | b8 b9 b10 b11 ]     attended blocks
    products       in place           copied    in place
    each pair      attended values, and the logarithm of its sum of exponentials
    rows           the pairs of each, weighted by a softmax over those logarithms

which is the split softmax of Milakov and Gimelshein (2018), one piece per block. Chunks of prompts
attend one by one (`attention_chunks`).

Legend: R decoding rows, N pairs of a row and a block, A query heads, K key/value heads, G = A / K,
D head size, B block size.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor, nn

from hocket.models.latent import LatentHeads
from hocket.runtime.native.kernels import CpuKernels, kernels_take
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_chunks import (
    attend_chunk,
    attend_to_chunk,
    dense,
    gathered,
    near,
    sunk,
)
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import PagedCache
from hocket.serving.engine.whole_layer import DecodeStep, WholeLayer

_RUN_BYTES = 64 << 10
"""Keys that lie side by side and are worth a product of their own; fewer are copied together."""
_COPIED_BYTES = 1 << 20
"""Keys that are copied at once: they are read again while they lie near the core."""
_FEW = 2
"""Rows that are attended one by one: each costs a quarter of what all cost together."""
_BATCH = 1024
"""Pairs whose scores are held at once, about."""

_NOBODY = nn.Module()


@dataclasses.dataclass(slots=True)
class _Segment:
    """Pairs `first` to `last` of the working order, whose blocks lie side by side from `block`,
    or are `blocks`, to be copied."""

    first: int
    last: int
    block: int = -1
    blocks: Tensor | None = None

    def of(self, pool: Tensor) -> Tensor:
        """Its blocks of a layer's keys or values."""
        if self.blocks is None:
            return pool[self.block : self.block + self.last - self.first]
        return pool.index_select(0, self.blocks)


@dataclasses.dataclass(slots=True)
class _Group:
    """Rows (None: all) and their pairs [r, most], where `padding` [r, most, 1, 1, 1] is false."""

    rows: Tensor | None
    table: Tensor
    padding: Tensor | None


@dataclasses.dataclass(slots=True)
class _Pairs:
    """Which decoding row attends to which block, for one window.

    Attributes:
        batches: segments of the pairs, in working order; scores are held for a batch at once.
        owners: [N] row of each pair.
        columns: [N] which of the row's blocks it is.
        mask: [N, 1, B] 0 or -inf.
        groups: of rows of similar length, with the pairs that make up each.
    """

    batches: list[list[_Segment]]
    owners: Tensor
    columns: Tensor
    mask: Tensor
    groups: list[_Group]


Remembered = dict[int | None, tuple[tuple[Tensor, Tensor, Tensor], _Pairs]]
"""By window, what the pairs of the last step came from, and the pairs."""


class CpuAttention:
    """Attention of one step, over all layers in the order in which they are called."""

    def __init__(
        self,
        cache: PagedCache,
        step: StepIndices,
        remembered: Remembered | None = None,
        kernels: CpuKernels | None = None,
    ) -> None:
        self.cache = cache
        self.step = step
        self._kernels = kernels
        self._remembered: Remembered = {} if remembered is None else remembered
        self._layer = 0
        self._decode_step: DecodeStep | None = None
        self._pairs: dict[int | None, _Pairs] = {}
        self._rows: dict[int, Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Write the new keys and values [1, K, T, D], attend with query [1, A, T, D]."""
        layer, self._layer = self._layer, self._layer + 1
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        # An all-gather along the last dimension (norms over all heads) leaves other strides.
        query, key, value = dense(query), dense(key), dense(value)
        kernels = self._kernels
        if kernels is not None and not kernels_take(query, key, value, keys, values):
            kernels = None
        if kernels is not None:
            kernels.store(key, self.step.places, keys)
            kernels.store(value, self.step.places, values)
        else:
            self._write(keys, key)
            self._write(values, value)
        q = query[0].transpose(0, 1)
        num_decode = self.step.num_decode
        if not self.step.chunks:
            if kernels is not None and options.softcap is None:
                return self._by_kernel(kernels, q, keys, values, options).unsqueeze(0)
            if self._few(keys, options):
                return self._one_by_one(query, keys, values, options)
            return self._decode(q, keys, values, options).unsqueeze(0)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[-1])
        if num_decode:
            if kernels is not None and options.softcap is None:
                made = self._by_kernel(kernels, q[:num_decode], keys, values, options)
            else:
                made = self._decode(q[:num_decode], keys, values, options)
            out[:num_decode] = made
        for chunk in self.step.chunks:
            where = slice(chunk.first, chunk.first + chunk.count)
            if kernels is not None and options.softcap is None and near(chunk, keys, values):
                kernels.attend_chunk(
                    query[:, :, where],
                    keys,
                    values,
                    chunk.blocks,
                    start=chunk.start,
                    scaling=options.scaling,
                    out=out[where],
                    window=options.window,
                    sinks=None if options.sinks is None else options.sinks.float().contiguous(),
                )
                continue
            own = (query[:, :, where], key[:, :, where], value[:, :, where])
            out[where] = attend_chunk(chunk, own, keys, values, options)
        return out.unsqueeze(0)

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """Write the new latent vectors, attend with query [1, A, T, D]: rows that decode to the
        vectors themselves, chunks of prompts to the keys and values that they expand to."""
        layer, self._layer = self._layer, self._layer + 1
        pool, kernels, num_decode = self.cache.keys[layer], self._kernels, self.step.num_decode
        pool.view(-1, heads.width).index_copy_(0, self.step.places, heads.taken())
        out = query.new_empty(query.shape[2], query.shape[1], heads.value_size)
        if num_decode:
            q = heads.absorb(query[0, :, :num_decode]).transpose(0, 1)
            if kernels is not None and options.softcap is None and kernels_take(q, pool):
                # The rotary entries are weighted too, and dropped: one pool is read.
                mixed = self._by_kernel(kernels, q, pool, pool, options)[..., : heads.latent_size]
            else:
                mixed = self._decode(q, pool, self.cache.values[layer], options)
            out[:num_decode] = heads.read(mixed.transpose(0, 1)).transpose(0, 1)
        for chunk in self.step.chunks:
            where = slice(chunk.first, chunk.first + chunk.count)
            cached = pool.index_select(0, chunk.blocks).view(-1, heads.width)
            keys, values = (x[None] for x in heads.expand(cached[: chunk.start + chunk.count]))
            new = (query[:, :, where], keys[:, :, chunk.start :], values[:, :, chunk.start :])
            whole = dataclasses.replace(chunk, blocks=torch.zeros(1, dtype=torch.long))
            out[where] = attend_chunk(whole, new, keys, values, options)
        return out.unsqueeze(0)

    def whole_layer(
        self, layer: WholeLayer, hidden: Tensor, positions: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """`hidden` [1, T, H] after a layer, in one call; None, and nothing has happened, where a
        part of it is done otherwise.

        Args:
            positions: cosine and sine [1, T, D], contiguous.
        """
        keys, values = self.cache.keys[self._layer], self.cache.values[self._layer]
        if self._kernels is None or self.step.chunks or not layer.takes(hidden.shape[1]):
            return None
        if not kernels_take(hidden, keys, values) or not hidden.is_contiguous():
            return None
        self._layer += 1
        step = self._decode_step
        if step is None or not step.turned_by(*positions):
            step = self._decode_step = DecodeStep(self.step, *positions)
        return layer(hidden, step, keys, values)

    def attend_merged(
        self,
        merged: Tensor,
        positions: tuple[Tensor, Tensor],
        heads: tuple[int, int, int],
        options: Options,
    ) -> Tensor | None:
        """As `attend`, of what one product made of query, key and value, not yet turned.

        Args:
            merged: [T, (A + 2 K) * D], contiguous. heads: A, K and D.
            positions: cosine and sine [1, T, D], contiguous.

        Returns:
            [T, A * D]; None, and nothing has happened, where no kernel does that.
        """
        kernels, layer = self._kernels, self._layer
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        num_heads, kv_heads, size = heads
        if kernels is None or options.softcap is not None or not kernels_take(merged, keys, values):
            return None
        step = self.step
        if not step.chunks:
            self._layer += 1
            return kernels.decode(
                merged,
                *positions,
                keys,
                values,
                places=step.places,
                tables=step.tables,
                lengths=step.lengths,
                longest=step.tables.shape[1] * step.block_size,
                group=num_heads // kv_heads,
                scaling=options.scaling,
                window=options.window,
                sinks=None if options.sinks is None else options.sinks.float().contiguous(),
            )
        split = merged.view(1, merged.shape[0], -1, size).transpose(1, 2)
        query, key = split[:, :num_heads], split[:, num_heads : num_heads + kv_heads]
        query, key = kernels.rotate(query, key, *positions)
        value = split[:, num_heads + kv_heads :]
        out = self.attend(_NOBODY, query, key, value, options)
        return out.view(merged.shape[0], num_heads * size)

    def _write(self, pool: Tensor, new: Tensor) -> None:
        _, heads, count, width = new.shape
        rows = self._rows.get(heads)
        if rows is None:
            size = self.cache.block_size
            places = self.step.places
            blocks = places // size
            rows = (blocks * heads).unsqueeze(1) + torch.arange(heads)
            rows = (rows * size + (places - blocks * size).unsqueeze(1)).view(-1)
            self._rows[heads] = rows
        flat = new[0].transpose(0, 1).reshape(count * heads, width)
        pool.view(-1, width).index_copy_(0, rows, flat)

    def _by_kernel(
        self, kernels: CpuKernels, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Query [R, A, D] to [R, A, D of the value], without a copy of what is attended to."""
        step = self.step
        return kernels.attend(
            q,
            keys,
            values,
            step.tables,
            step.lengths,
            longest=step.tables.shape[1] * step.block_size,
            scaling=options.scaling,
            window=options.window,
            sinks=None if options.sinks is None else options.sinks.float().contiguous(),
        )

    def _few(self, keys: Tensor, options: Options) -> bool:
        """Whether copying what the rows attend to costs less than sorting them into pairs."""
        if self.step.num_decode > _FEW or options.softcap is not None:
            return False
        if options.window is not None and options.window < int(self.step.lengths.max()):
            return False
        return self.step.tables.numel() * keys[0].numel() * keys.element_size() <= _COPIED_BYTES

    def _one_by_one(self, query: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        """Query [1, A, R, D] to [1, R, A, D of the value], of a few rows that decode."""
        heads, block = keys.shape[1], keys.shape[2]
        num_heads, size = query.shape[1], query.shape[3]
        found = []
        for row, length in enumerate(self.step.lengths.tolist()):
            blocks = self.step.tables[row, : -(-length // block)]
            k, v = gathered(keys, blocks)[:, :, :length], gathered(values, blocks)[:, :, :length]
            asked = query[:, :, row].reshape(1, heads, num_heads // heads, size)
            out, weight = attend_to_chunk(asked, k, v, options.scaling, causal=False)
            out, weight = out.reshape(num_heads, -1), weight.reshape(num_heads)
            found.append(sunk(out, weight, options.sinks))
        return torch.stack(found).unsqueeze(0)

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        """Query [R, A, D] to [R, A, D of the value]."""
        pairs = self._pairs.get(options.window)
        if pairs is None:
            block_bytes = keys[0].numel() * keys.element_size()
            pairs = _pairs(self.step, options.window, block_bytes, self._remembered)
            self._pairs[options.window] = pairs
        rows, num_heads, size = q.shape
        _, heads, block, _ = keys.shape
        width, group = values.shape[-1], num_heads // heads
        q = (q * options.scaling).reshape(rows, heads, group, size)
        weights: list[Tensor] = []
        mixed: list[Tensor] = []
        for some in pairs.batches:
            a, b = some[0].first, some[-1].last
            asked = q.index_select(0, pairs.owners[a:b]).view(-1, group, size)
            scores = asked.new_empty((b - a) * heads, group, block)
            for each in some:
                k = each.of(keys).view(-1, block, size).transpose(1, 2)
                where = slice((each.first - a) * heads, (each.last - a) * heads)
                torch.bmm(asked[where], k, out=scores[where])
            scores = scores.float()
            if options.softcap is not None:
                scores.div_(options.softcap).tanh_().mul_(options.softcap)
            scores.view(b - a, heads * group, block).add_(pairs.mask[a:b])
            shares = scores.softmax(-1)
            # The largest share is 1 / (sum of exponentials): no need to compute them again.
            weights.append(scores.amax(-1).sub_(shares.amax(-1).log_()))
            shares = shares.to(values.dtype)
            parts = shares.new_empty((b - a) * heads, group, width)
            for each in some:
                v = each.of(values).view(-1, block, width)
                where = slice((each.first - a) * heads, (each.last - a) * heads)
                torch.bmm(shares[where], v, out=parts[where])
            mixed.append(parts)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        parts = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        weight, parts = weight.view(-1, heads, group, 1), parts.view(-1, heads, group, width)
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().view(1, 1, heads, group, 1)
        if pairs.groups[0].rows is None:
            out = _join(weight, parts, pairs.groups[0], sinks)
        else:
            out = parts.new_empty(rows, heads, group, width)
            for joined in pairs.groups:
                assert joined.rows is not None
                out[joined.rows] = _join(weight, parts, joined, sinks)
        return out.view(rows, num_heads, width)


def _join(weight: Tensor, parts: Tensor, group: _Group, sinks: Tensor | None) -> Tensor:
    """Rows [r, K, G, D] from what their pairs attended to and the weight, a logarithm, of each."""
    rows, n = group.table.shape
    flat = group.table.view(-1)
    if n == 1 and sinks is None:
        return parts.index_select(0, flat)
    weight = weight.index_select(0, flat).view(rows, n, *weight.shape[1:])
    if group.padding is not None:
        weight.masked_fill_(group.padding, -torch.inf)
    if sinks is not None:
        weight = torch.cat([weight, sinks.expand(rows, -1, -1, -1, -1)], 1)
    share = weight.softmax(1)[:, :n].to(parts.dtype)
    parts = parts.index_select(0, flat).view(rows, n, *parts.shape[1:])
    return parts.mul_(share).sum(1)


def _pairs(
    step: StepIndices, window: int | None, block_bytes: int, remembered: Remembered
) -> _Pairs:
    """The pairs of a step; those of the step before, where only the lengths have grown."""
    size = step.block_size
    lengths = step.lengths
    ends = (lengths + (size - 1)) // size
    oldest = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_min(0)
    begins = oldest // size
    known = remembered.get(window)
    same = known is not None and all(
        torch.equal(a, b) for a, b in zip(known[0], (step.tables, begins, ends), strict=True)
    )
    pairs = known[1] if known is not None and same else _paired(step, begins, ends, block_bytes)
    first = (pairs.columns * size).unsqueeze(1)
    # Of each pair, the places of its block that are tokens of the row, and young enough.
    place = torch.arange(size)
    hidden = place >= lengths[pairs.owners].unsqueeze(1) - first
    if window is not None:
        hidden |= place < oldest[pairs.owners].unsqueeze(1) - first
    mask = torch.zeros(pairs.owners.shape[0], 1, size)
    mask.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    pairs = dataclasses.replace(pairs, mask=mask)
    remembered[window] = (step.tables, begins, ends), pairs
    return pairs


def _paired(step: StepIndices, low: Tensor, ends: Tensor, block_bytes: int) -> _Pairs:
    """The pairs without their mask, for rows that attend to their blocks `low` to `ends`."""
    column = torch.arange(step.tables.shape[1])
    held = (column < ends.unsqueeze(1)) & (column >= low.unsqueeze(1))
    rows, columns = held.nonzero(as_tuple=True)
    count = rows.shape[0]
    blocks, order = step.tables[rows, columns].sort(stable=True)
    # Runs of blocks that lie side by side; a block that several rows share begins a new one.
    breaks = (blocks.diff() != 1).nonzero().squeeze(1) + 1
    bounds = [0, *breaks.tolist(), count]
    segments: list[_Segment] = []
    pieces: list[Tensor] = []
    alone: list[tuple[int, int]] = []
    done = 0
    shortest = max(2, _RUN_BYTES // block_bytes)
    for a, b in itertools.pairwise(bounds):
        if b - a < shortest:
            alone.append((a, b))
            continue
        pieces.append(order[a:b])
        first_block = int(blocks[a])
        for i in range(0, b - a, _BATCH):
            n = min(_BATCH, b - a - i)
            segments.append(_Segment(done + i, done + i + n, first_block + i))
        done += b - a
    if alone:
        scattered = torch.cat([order[a:b] for a, b in alone])
        copied = torch.cat([blocks[a:b] for a, b in alone])
        pieces.append(scattered)
        for some in torch.split(copied, max(1, _COPIED_BYTES // block_bytes)):
            segments.append(_Segment(done, done + some.shape[0], blocks=some))
            done += some.shape[0]
    working = torch.cat(pieces)
    batches: list[list[_Segment]] = [[]]
    for segment in segments:
        if batches[-1] and segment.last - batches[-1][0].first > _BATCH:
            batches.append([])
        batches[-1].append(segment)
    where = torch.empty(count, dtype=torch.long)
    where[working] = torch.arange(count)
    groups = _groups(ends - low, where)
    return _Pairs(batches, rows[working], columns[working], torch.empty(0), groups)


def _groups(counts: Tensor, where: Tensor) -> list[_Group]:
    """Rows with `counts` pairs each, whose places are `where`, so that little of it is padding."""
    begins = counts.cumsum(0) - counts
    smallest, largest = int(counts.min()), int(counts.max())
    if largest <= 2 * smallest or largest <= 8:
        return [_group(None, counts, begins, where)]
    power = counts.log2().ceil().long()
    return [
        _group((power == each).nonzero().squeeze(1), counts, begins, where)
        for each in sorted(set(power.tolist()))
    ]


def _group(rows: Tensor | None, counts: Tensor, begins: Tensor, where: Tensor) -> _Group:
    if rows is not None:
        counts, begins = counts[rows], begins[rows]
    column = torch.arange(int(counts.max()))
    padding = column >= counts.unsqueeze(1)
    pairs = (begins.unsqueeze(1) + column).masked_fill_(padding, 0)
    some = bool(padding.any())
    return _Group(rows, where[pairs], padding[..., None, None, None] if some else None)
