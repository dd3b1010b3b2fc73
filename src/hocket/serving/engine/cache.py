"""Paged cache: keys and values of all sequences in blocks, and which blocks each slot holds.

A block holds `block_size` tokens of one sequence, in every attention layer of the stage. On CUDA a
layer's blocks are [blocks, block, K, D], as the variable-length kernel wants them; on CPU they are
[blocks, K, block, D], so that the keys of one head lie together and a matrix product reads them
in place.

Legend: K key/value heads of this rank, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hocket.runtime.hugepages import in_large_pages
from hocket.serving.scheduling.step import StepPlan
from hocket.spec.serving import ServeOptions


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key/value heads of this rank.
        key_size, value_size: of one head; they differ under multi-head latent attention.
        dtype: of both.
        stored: dtype of both in the cache, where that is another: e4m3, of the scale 1, as vLLM has
            it where a checkpoint names no scales.
        latent: whether a token leaves one vector that all heads read: a latent vector, which is the
            value, and a rotary key after it (`models.latent`).
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    latent: bool = False
    stored: torch.dtype | None = None

    def bytes_per_block(self, block_size: int) -> int:
        width = self.key_size + (0 if self.latent else self.value_size)
        return block_size * self.num_kv_heads * width * (self.stored or self.dtype).itemsize


class PagedCache:
    """The blocks of every attention layer of one stage.

    Attributes:
        block_size: tokens of a block.
        num_blocks: blocks that were allocated.
        keys, values: per layer; latent values are the first entries of the keys.
        heads_first: whether a block is [K, block, D] (CPU) or [block, K, D] (CUDA).
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        heads_first: bool | None = None,
    ) -> None:
        self.layers = list(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.heads_first = device.type == "cpu" if heads_first is None else heads_first
        # Zeros: a block is attended whole, with the weight of what was never written at zero,
        # and zero times what happened to lie there is only zero if that was a number.
        self.keys = [self._pool(layer, layer.key_size) for layer in self.layers]
        self.values = [
            key[..., : layer.value_size] if layer.latent else self._pool(layer, layer.value_size)
            for layer, key in zip(self.layers, self.keys, strict=True)
        ]

    def _pool(self, layer: LayerShape, width: int) -> Tensor:
        middle = (layer.num_kv_heads, self.block_size)
        if not self.heads_first:
            middle = (self.block_size, layer.num_kv_heads)
        shape = (self.num_blocks, *middle, width)
        pool = torch.empty(shape, dtype=layer.stored or layer.dtype, device=self.device)
        in_large_pages([pool], written=False)
        return pool.zero_()


def cache_dtype(options: ServeOptions) -> torch.dtype | None:
    """In which a server keeps keys and values; None: as it computes them."""
    return torch.float8_e4m3fn if options.kv_cache_dtype == "fp8" else None


def as_cached(pool: Tensor, new: Tensor) -> Tensor:
    """New keys or values as a pool holds them: in 8 bits rounded, the largest at its bounds."""
    if pool.dtype == new.dtype or not holds_8_bits(pool):
        return new
    largest = torch.finfo(pool.dtype).max
    return new.clamp(-largest, largest).to(pool.dtype)


def write(pool: Tensor, places: Tensor, rows: Tensor) -> None:
    """Put `rows` [n, width] at these rows of a pool [.., width], both of one dtype."""
    if holds_8_bits(pool):  # whose bytes are copied: fewer operators know its dtype
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool.view(-1, rows.shape[1]).index_copy_(0, places, rows)


def read(pool: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    if not holds_8_bits(pool):
        return pool.index_select(0, index)
    return pool.view(torch.uint8).index_select(0, index).view(pool.dtype).to(dtype)


def holds_8_bits(pool: Tensor) -> bool:
    return pool.dtype == torch.float8_e4m3fn


class BlockTables:
    """The blocks of each slot, in the order of its tokens; on CPU.

    Attributes:
        table: [slots, blocks of the longest sequence] int64.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table = torch.zeros(max_num_seqs, max_blocks, dtype=torch.long)
        self._held = [0] * max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan says of its slots: released, admitted, new blocks."""
        for slot in plan.released:
            self._held[slot] = 0
        for admission in plan.admitted:
            self._held[admission.slot] = 0
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for row in plan.rows:
            count = len(row.new_blocks)
            if count:
                held = self._held[row.slot]
                slots += [row.slot] * count
                columns += range(held, held + count)
                blocks += row.new_blocks
                self._held[row.slot] = held + count
        if slots:
            self.table[torch.tensor(slots), torch.tensor(columns)] = torch.tensor(blocks)

    def held(self, slot: int) -> int:
        return self._held[slot]


def bytes_per_block(layers: Iterable[LayerShape], block_size: int) -> int:
    """Bytes that one block takes in all layers together."""
    return sum(layer.bytes_per_block(block_size) for layer in layers)
