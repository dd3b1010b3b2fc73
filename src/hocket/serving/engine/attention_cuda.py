"""Paged attention on CUDA: all rows of a step in one kernel that reads the blocks in place.

Which kernel that is for each layer was settled before (`attention_kernels`). Nothing here reads the
device, copies the cache or loops over rows, so that decode steps can be captured in CUDA graphs.

torch's variable-length attention calls the flash-attention that is active; the built-in one is not
split along the keys, since a split forgets rows of packed sequences (pytorch/pytorch#194167). What
is handed over as pointers (queries with strides, tables) is made dense here.

Legend: T tokens of the step, R rows, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hocket.models.flash_varlen import flash_varlen
from hocket.models.latent import LatentHeads
from hocket.serving.engine import attention_latent
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_kernels import KernelRow, LayerKind
from hocket.serving.engine.attention_pieces import Piece
from hocket.serving.engine.cache import PagedCache, as_cached, holds_8_bits, write
from hocket.serving.engine.context_exchange import BlockPart, Exchange
from hocket.serving.engine.device_step import DeviceStep

Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [blocks, block, K, D]."""

_TOLERANCE = 0.03
"""Of the trial: bfloat16 carries 8 bits, values there are near 1."""


class CudaAttention:
    """Attention of one step, over all layers in the order in which they are called.

    Args:
        cache: of the stage.
        step: indices of the step.
        kernels: name of each layer's kernel, in calling order.
    """

    def __init__(self, cache: PagedCache, step: DeviceStep, kernels: Sequence[str]) -> None:
        self.cache = cache
        self.step = step
        self.kernels = kernels
        self._layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Write the new keys and values [1, K, T, D], attend with query [1, A, T, D]."""
        layer, self._layer = self._layer, self._layer + 1
        pools = self.cache.keys[layer], self.cache.values[layer]
        for pool, new in zip(pools, (key, value), strict=True):
            rows = new[0].transpose(0, 1).reshape(new.shape[2], -1)
            write(pool, self.step.places, as_cached(pool, rows))
        q = query[0].transpose(0, 1)
        return attend_pools(self.kernels[layer], q, pools, self.step, options).unsqueeze(0)

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """Write the new latent vectors, attend to them with query [1, A, T, D]."""
        layer, self._layer = self._layer, self._layer + 1
        pool, step = self.cache.keys[layer], self.step
        pool.view(-1, heads.width).index_copy_(0, step.places, heads.taken())
        return attention_latent.attend_heads(heads, query[0], pool, step, options).unsqueeze(0)


class CudaContextAttention:
    """The same on one of several context ranks, which holds a part of each block: what it attends
    to is merged with what the others do (`Exchange`).

    Args:
        cache: of the stage, of this rank's part of each block.
        step: indices of the whole step.
        kernels: name of each layer's kernel, in calling order.
        part: of each block that this rank holds.
        exchange: with the other ranks.
        spare: where what the other ranks hold is written, which nothing reads.
    """

    def __init__(  # noqa: PLR0917
        self, cache: PagedCache, step: DeviceStep, kernels: Sequence[str], part: BlockPart,
        exchange: Exchange, spare: int,
    ) -> None:  # fmt: skip
        self.cache, self.step, self.kernels = cache, step, kernels
        self.part, self.exchange = part, exchange
        held, places = part.own(step.places)
        self._places = torch.where(held, places, spare)
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
            rows = new.transpose(0, 1).reshape(new.shape[1], -1)
            write(pool, self._places, as_cached(pool, rows))
        mixed, weight = attend_block_parts(
            self.kernels[layer], q.transpose(0, 1), pools, self.step, options, self.part
        )
        return self.exchange.merged(mixed, weight, options, query.dtype)

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        """As `attend`, to latent vectors: [1, t, A, E]."""
        layer, self._layer = self._layer, self._layer + 1
        q, latent, _ = self.exchange.gathered(query[0], heads.taken().unsqueeze(0), None)
        pool = self.cache.keys[layer]
        pool.view(-1, heads.width).index_copy_(0, self._places, latent[0])
        mixed, weight = attention_latent.heads_piece(heads, q, pool, self.step, options, self.part)
        return self.exchange.merged(mixed, weight.contiguous(), options, query.dtype)


def attend_pools(name: str, q: Tensor, pools: Pools, step: DeviceStep, options: Options) -> Tensor:
    """Query [T, A, D] to [T, A, D of the value], all rows at once, by the kernel of this name."""
    keys, values = pools
    if name == "latent":
        return attention_latent.attend_absorbed(
            q.transpose(0, 1), keys, step, options, values.shape[-1]
        )
    q = _handed(q, pools, step)
    if name == "triton":
        from hocket.runtime.triton.paged_attention import paged_attention

        sinks = options.sinks
        return paged_attention(
            q, keys, values, step.tables, step.lengths, step.begins, step.most,
            scale=options.scaling, window=options.window, softcap=options.softcap,
            sinks=None if sinks is None else sinks.contiguous(),
        )  # fmt: skip
    if name == "reference":
        from hocket.runtime.triton.paged_attention_cases import paged_attention_reference

        keys, values = (pool.to(q.dtype) for pool in pools)
        return paged_attention_reference(
            q, keys, values, step.tables, step.lengths, step.begins, step.most,
            scale=options.scaling, window=options.window, softcap=options.softcap,
            sinks=options.sinks,
        ).to(q.dtype)  # fmt: skip
    return _varlen(q, pools, step, options, split=name != "fa2")


def attend_block_parts(  # noqa: PLR0917
    name: str, q: Tensor, pools: Pools, step: DeviceStep, options: Options, part: BlockPart
) -> Piece:
    """As `attend_pools`, over what the pools hold of each block: [T, A, D of the value] in fp32,
    and the logarithm of the sum of exponentials [T, A]. Sinks take no part."""
    keys, values = pools
    if name == "latent":
        return attention_latent.absorbed_piece(
            q.transpose(0, 1), keys, step, options, values.shape[-1], part
        )
    q = _handed(q, pools, step)
    attend: Callable[..., Piece]
    if name == "triton":
        from hocket.runtime.triton.paged_attention import paged_attention_part as attend
    else:
        from hocket.runtime.triton.paged_attention_cases import (
            paged_attention_part_reference as attend,
        )

        assert name == "reference", name
        keys, values = (pool.to(q.dtype) for pool in pools)
    mixed, weight = attend(
        q, keys, values, step.tables, step.lengths, step.begins, step.most,
        span=part.span, offset=part.begin, scale=options.scaling, window=options.window,
        softcap=options.softcap,
    )  # fmt: skip
    return mixed.float(), weight.float()


def _handed(q: Tensor, pools: Pools, step: DeviceStep) -> Tensor:
    """The query as kernels take it, with what else they take as pointers."""
    keys, values = pools
    handed = (keys, values, step.tables, step.lengths, step.begins)
    assert all(x.is_contiguous() for x in handed)
    assert all(x.dtype == torch.int32 for x in handed[2:])
    assert {x.device for x in handed} == {q.device}
    assert keys.dtype == values.dtype
    assert keys.dtype == q.dtype or holds_8_bits(keys)
    return q if q.stride(-1) == 1 else q.contiguous()


def _varlen(q: Tensor, pools: Pools, step: DeviceStep, options: Options, *, split: bool) -> Tensor:
    assert options.softcap is None
    assert options.sinks is None
    keys, values = pools
    # The second offsets are those of keys that are packed; of pages their number alone counts.
    begins = step.begins, None if split else step.begins
    return flash_varlen(
        q.contiguous(), keys, values, begins, (step.most, step.longest), scale=options.scaling,
        window=options.window, pages=(step.lengths, step.tables), num_splits=None if split else 1,
    )  # fmt: skip


# --- the trial ------------------------------------------------------------------------------------


class Trial:
    """Tries kernels on a device, with three rows of several blocks whose result is known.

    Args:
        ranks: that hold a part of each block; the second's is tried.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self.device, self.ranks = device, ranks

    @torch.inference_mode()
    def __call__(self, kernel: KernelRow, kind: LayerKind, block_size: int) -> str | None:
        """Why a kernel does not work for a kind of layer; None if it does.

        A kernel that torch activates is active afterwards.
        """
        try:
            if kernel.flash:
                _activate(kernel.impl)
            off = self._difference(kernel, kind, block_size)
        except Exception as error:  # absent parts, other versions, what a library rejects
            first = (str(error).splitlines() or [""])[0]
            return f"failed in a trial: {type(error).__name__}: {first}"
        tolerance = 1e-4 if kind.shape.dtype == torch.float32 else _TOLERANCE
        if not off <= tolerance:
            return f"gave results off by {off:.2g} in a trial"
        return None

    def _difference(self, kernel: KernelRow, kind: LayerKind, block_size: int) -> float:
        layer, device = kind.shape, self.device
        generator = torch.Generator(device).manual_seed(1)
        part = BlockPart(block_size, block_size // self.ranks, 0)
        if self.ranks > 1:
            part = dataclasses.replace(part, begin=part.size)
        cache = PagedCache([layer], 8, part.size, device, heads_first=False)
        for pool in (*cache.keys, *cache.values):
            drawn = torch.empty(pool.shape, dtype=layer.dtype, device=device)
            pool.copy_(drawn.normal_(generator=generator))
        step = trial_step(block_size, device)
        q = torch.empty(6, layer.num_heads, layer.key_size, dtype=layer.dtype, device=device)
        q.normal_(generator=generator)
        sinks = torch.linspace(-1, 1, layer.num_heads, dtype=layer.dtype, device=device)
        options = Options(
            layer.key_size**-0.5,
            kind.window,
            2.0 if kind.softcap else None,
            sinks if kind.sinks else None,
        )
        pools = cache.keys[0], cache.values[0]
        dense = cache.keys[0], cache.values[0].contiguous()
        if self.ranks == 1:
            found = attend_pools(kernel.name, q, pools, step, options).float()
            wanted = attend_pools("reference", q, dense, step, options).float()
        else:
            found, weight = attend_block_parts(kernel.name, q, pools, step, options, part)
            wanted, weights = attend_block_parts("reference", q, dense, step, options, part)
            found, wanted = (
                torch.cat([mixed, weight.nan_to_num(neginf=-99.0).unsqueeze(2)], 2)
                for mixed, weight in ((found, weight), (wanted, weights))
            )
        return float((found - wanted).abs().max().nan_to_num(nan=torch.inf))


def trial_step(block_size: int, device: torch.device) -> DeviceStep:
    """Two rows of one token and one of four, over scattered blocks of 8."""
    lengths, begins = [2 * block_size + 3, block_size + 1, 5], [0, 1, 2, 6]
    nothing = torch.zeros(6, dtype=torch.long, device=device)

    def ints(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return DeviceStep(
        tokens=nothing,
        positions=nothing,
        places=nothing,
        wanted=None,
        begins=ints(begins),
        lengths=ints(lengths),
        tables=ints([[5, 1, 6], [3, 2, 0], [7, 0, 0]]),
        most=4,
        longest=max(lengths),
        slots=nothing[:3],
        chunks=[(2, 4, 5)],
    )


def _activate(impl: str | None) -> None:
    """Have torch call a flash-attention, or its own."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    if impl is None:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
    elif current_flash_attention_impl() != impl:
        activate_flash_attention_impl(impl)
