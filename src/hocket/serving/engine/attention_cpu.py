"""Paged attention on CPU, whose cost grows with the tokens that are really attended.

In fp32, where they could be compiled, kernels of our own (`native`) read the pages where they are.
For another dtype, or without a compiler, blocks of rows that decode are copied, those of some rows
at a time (`attention_pieces`). Chunks of prompts attend one by one (`attention_chunks`).

Legend: R decoding rows, A query heads, K key/value heads, D head size, B block size.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hocket.models.latent import LatentHeads
from hocket.runtime.native.kernels import CpuKernels, kernels_take
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_chunks import attend_chunk, dense, near, sunk
from hocket.serving.engine.attention_pieces import attend_rows
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import PagedCache, as_cached, read, write
from hocket.serving.engine.whole_layer import DecodeStep, WholeLayer

_COPIED_BYTES = 1 << 20
"""Keys that are copied at once: they are read again while they lie near the core."""

_NOBODY = nn.Module()


class CpuAttention:
    """Attention of one step, over all layers in the order in which they are called."""

    def __init__(
        self,
        cache: PagedCache,
        step: StepIndices,
        kernels: CpuKernels | None = None,
    ) -> None:
        self.cache = cache
        self.step = step
        self._kernels = kernels
        self._layer = 0
        self._decode_step: DecodeStep | None = None
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
            key, value = as_cached(keys, key), as_cached(values, value)
            self._write(keys, key)
            self._write(values, value)
            key, value = key.to(query.dtype), value.to(query.dtype)
        q = query[0].transpose(0, 1)
        num_decode = self.step.num_decode
        if not self.step.chunks:
            if kernels is not None:
                return self._by_kernel(kernels, q, keys, values, options).unsqueeze(0)
            return self._decode(q, keys, values, options).unsqueeze(0)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[-1])
        if num_decode:
            if kernels is not None:
                made = self._by_kernel(kernels, q[:num_decode], keys, values, options)
            else:
                made = self._decode(q[:num_decode], keys, values, options)
            out[:num_decode] = made
        for chunk in self.step.chunks:
            where = slice(chunk.first, chunk.first + chunk.count)
            if kernels is not None and near(chunk, keys, values):
                kernels.attend_chunk(
                    query[:, :, where],
                    keys,
                    values,
                    chunk.blocks,
                    start=chunk.start,
                    scaling=options.scaling,
                    out=out[where],
                    window=options.window,
                    softcap=options.softcap,
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
            if kernels is not None and kernels_take(q, pool):
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
        write(pool, rows, flat)

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
            softcap=options.softcap,
            sinks=None if options.sinks is None else options.sinks.float().contiguous(),
        )

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        """Query [R, A, D] to [R, A, D of the value], over copies of the blocks of some rows at a
        time."""
        step, heads, size = self.step, keys.shape[1], self.step.block_size
        lengths, columns = step.lengths.unsqueeze(1), step.tables.shape[1]
        # Behind its last block a row has its first one: what others left there may not be a number.
        ends = torch.arange(columns) * size >= lengths
        tables = torch.where(ends, step.tables[:, :1], step.tables)
        oldest = 0 if options.window is None else max(0, int(lengths.min()) - options.window)
        asked = q.reshape(q.shape[0], heads, -1, 1, q.shape[-1])
        of_head = torch.arange(heads).view(-1, 1)

        def rows_of(blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            of_heads = (blocks.view(shape[0], 1, -1) * heads + of_head).view(-1)
            picked = (read(pool.flatten(0, 1), of_heads, q.dtype) for pool in (keys, values))
            k, v = (one.view(shape[0], heads, -1, one.shape[-1]) for one in picked)
            return k, v

        each = max(1, _COPIED_BYTES // (columns * keys[0].numel() * keys.element_size()))
        found = [
            attend_rows(
                asked[first : first + each],
                rows_of,
                tables[first : first + each],
                lengths[first : first + each],
                options,
                places=lambda begin, count: torch.arange(begin * size, (begin + count) * size),
                begin=oldest // size,
                columns=columns,
            )
            for first in range(0, q.shape[0], each)
        ]
        mixed, weight = (torch.cat(parts) for parts in zip(*found, strict=True))
        out = sunk(mixed.view(*q.shape[:2], -1), weight.view(q.shape[:2]), options.sinks)
        return out.to(q.dtype)
