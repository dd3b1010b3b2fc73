"""Paged attention on CUDA: all rows of a step in one kernel that reads the blocks in place.

PyTorch's variable-length attention takes a block table. What it can do depends on the flash
attention behind it, so each rank asks once, with a small case whose result is known:

    fa3        Hopper, where the package flash_attn_3 is installed; any block size
    fa2        built into PyTorch; blocks of a multiple of 256 tokens; never split along the keys,
               since a split forgets rows of packed sequences (pytorch/pytorch#194167)
    gathered   neither: fp32, a softcap or attention sinks, other head sizes or blocks. Keys are
               copied row by row into padded batches for the kernels of whole sequences.

Legend: T tokens of the step, R rows, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import LayerShape, PagedCache

FA2_BLOCK = 256
_LARGEST_HEAD = 256

_Pools = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [blocks, block, K, D]."""


@dataclasses.dataclass(slots=True)
class DeviceStep:
    """The indices of one step on the device.

    Attributes:
        tokens, positions, places, wanted: as in `StepIndices`.
        begins: [R + 1] int32, first token of each row, and T.
        lengths: [R] int32, tokens that each row's last token attends to.
        ends: [R + 1] int32, the lengths summed up; FA2 wants it and does not read it.
        tables: [R, most blocks] int32.
        counts: new tokens of each row.
        longest: upper bound of the lengths.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    wanted: Tensor
    begins: Tensor
    lengths: Tensor
    ends: Tensor
    tables: Tensor
    counts: list[int]
    longest: int

    @classmethod
    def of(cls, step: StepIndices, device: torch.device) -> DeviceStep:
        """A step's indices, in two copies to the device."""
        counts = [1] * step.num_decode + [chunk.count for chunk in step.chunks]
        lengths = [*step.lengths.tolist(), *(c.start + c.count for c in step.chunks)]
        most = max([step.tables.shape[1], *(c.blocks.shape[0] for c in step.chunks)])
        tables = torch.zeros(len(counts), most, dtype=torch.long)
        tables[: step.num_decode, : step.tables.shape[1]] = step.tables
        for row, chunk in enumerate(step.chunks, step.num_decode):
            tables[row, : chunk.blocks.shape[0]] = chunk.blocks
        # What lies beyond a sequence is never read, but must name a block.
        long = [step.tokens, step.positions, step.places, step.wanted]
        short = [
            _summed(counts), torch.tensor(lengths), _summed(lengths), tables.view(-1),
        ]  # fmt: skip
        a, b, c, d = _sent(long, torch.long, device)
        e, f, g, h = _sent(short, torch.int32, device)
        return cls(a, b, c, d, e, f, g, h.view(tables.shape), counts, max(lengths))


def _summed(counts: list[int]) -> Tensor:
    return F.pad(torch.tensor(counts).cumsum(0), (1, 0))


def _sent(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    flat = torch.cat(parts).to(dtype)
    if device.type == "cuda":
        flat = flat.pin_memory()
    there = flat.to(device, non_blocking=True)
    sizes = [part.shape[0] for part in parts]
    return list(there.split(sizes))  # type: ignore[no-untyped-call]


class CudaAttention:
    """Attention of one step, over all layers in the order in which they are called."""

    def __init__(self, cache: PagedCache, step: DeviceStep, kernel: str) -> None:
        self.cache = cache
        self.step = step
        self.kernel = kernel
        self._layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Write the new keys and values [1, K, T, D], attend with query [1, A, T, D]."""
        layer, self._layer = self._layer, self._layer + 1
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for pool, new in ((keys, key), (values, value)):
            rows = new[0].transpose(0, 1).reshape(new.shape[2], -1)
            pool.view(-1, rows.shape[1]).index_copy_(0, self.step.places, rows)
        q = query[0].transpose(0, 1)
        varlen = options.softcap is None and options.sinks is None
        if self.kernel != "gathered" and varlen and keys.shape[-1] == values.shape[-1]:
            out = _varlen(q.contiguous(), (keys, values), self.step, options, self.kernel)
        else:
            out = _gathered(q, (keys, values), self.step, options)
        return out.unsqueeze(0)


def _varlen(q: Tensor, pools: _Pools, step: DeviceStep, options: Options, kernel: str) -> Tensor:
    """Query [T, A, D] to [T, A, D], all rows at once."""
    from torch.nn.attention.varlen import varlen_attn

    keys, values = pools

    out: Tensor = varlen_attn(  # type: ignore[assignment]
        q, keys, values, step.begins, None if kernel == "fa3" else step.ends,
        max(step.counts), step.longest, scale=options.scaling,
        window_size=(-1, 0) if options.window is None else (options.window - 1, 0),
        enable_gqa=True, seqused_k=step.lengths, block_table=step.tables,
        num_splits=None if kernel == "fa3" else 1,
    )  # fmt: skip
    return out


def _gathered(q: Tensor, pools: _Pools, step: DeviceStep, options: Options) -> Tensor:
    """The same from copies: rows of one token together, padded to the longest; others alone."""
    single = next((i for i, count in enumerate(step.counts) if count != 1), len(step.counts))
    parts = []
    if single:
        parts.append(_padded(q[:single].unsqueeze(1), pools, step, slice(0, single), options))
    first = single
    for row in range(single, len(step.counts)):
        count = step.counts[row]
        own = q[first : first + count].unsqueeze(0)
        parts.append(_padded(own, pools, step, slice(row, row + 1), options)[0])
        first += count
    parts = [part.reshape(-1, *part.shape[-2:]) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(q: Tensor, pools: _Pools, step: DeviceStep, rows: slice, options: Options) -> Tensor:
    """Query [r, c, A, D] of rows with c new tokens each to [r, c, A, D of the value]."""
    keys, values = pools
    size, heads = keys.shape[1], keys.shape[2]
    tables = step.tables[rows, : -(-step.longest // size)]
    lengths = step.lengths[rows].view(-1, 1, 1)
    many, count, num_heads, width = q.shape
    group = num_heads // heads

    def picked(pool: Tensor) -> Tensor:
        found = pool.index_select(0, tables.reshape(-1).long())
        return found.view(many, -1, heads, pool.shape[-1]).transpose(1, 2)

    k, v = picked(keys), picked(values)
    seen = torch.arange(k.shape[2], device=q.device)
    at = lengths - count + torch.arange(count, device=q.device).view(1, -1, 1)
    visible = seen <= at  # [r, c, keys]
    if options.window is not None:
        visible &= seen > at - options.window
    # Queries of heads that share a key lie one after the other: no key is repeated.
    asked = q.permute(0, 2, 1, 3).reshape(many, heads, group * count, width)
    mask = visible.repeat(1, group, 1).unsqueeze(1)
    if options.softcap is None and options.sinks is None and k.shape[-1] == v.shape[-1]:
        out = F.scaled_dot_product_attention(asked, k, v, mask, scale=options.scaling)
    else:
        scores = (asked * options.scaling @ k.transpose(2, 3)).float()
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh_().mul_(options.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if options.sinks is not None:
            sinks = options.sinks.float().view(1, heads, group, 1)
            sinks = sinks.expand(many, -1, -1, count).reshape(many, heads, group * count, 1)
            scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        out = scores.to(v.dtype) @ v
    return out.reshape(many, num_heads, count, -1).transpose(1, 2)


def choose_kernel(layers: list[LayerShape], block_size: int, device: torch.device) -> str:
    """The kernel that serves these layers on this device: fa3, fa2 or gathered."""
    fitting = [
        layer
        for layer in layers
        if layer.dtype in (torch.float16, torch.bfloat16)
        and layer.key_size == layer.value_size <= _LARGEST_HEAD
        and layer.key_size % 8 == 0
    ]
    if not fitting or device.type != "cuda":
        return "gathered"
    if torch.cuda.get_device_capability(device)[0] == 9:
        with contextlib.suppress(Exception):  # the package is absent, or not for this PyTorch
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
            if all(_right(layer, block_size, device, "fa3") for layer in fitting):
                return "fa3"
            from torch.nn.attention import restore_flash_attention_impl

            restore_flash_attention_impl()
    if block_size % FA2_BLOCK == 0:
        with contextlib.suppress(RuntimeError):
            if all(_right(layer, block_size, device, "fa2") for layer in fitting):
                return "fa2"
    return "gathered"


@torch.inference_mode()
def _right(layer: LayerShape, block_size: int, device: torch.device, kernel: str) -> bool:
    """Whether a kernel gives what copies give, for three rows of several blocks."""
    generator = torch.Generator(device).manual_seed(1)
    cache = PagedCache([layer], 8, block_size, device)
    for pool in (*cache.keys, *cache.values):
        pool.normal_(generator=generator)
    lengths, counts = [2 * block_size + 3, block_size + 1, 5], [1, 1, 4]
    step = DeviceStep.of(
        StepIndices(
            tokens=torch.zeros(6, dtype=torch.long),
            positions=torch.zeros(6, dtype=torch.long),
            places=torch.zeros(6, dtype=torch.long),
            num_decode=2,
            lengths=torch.tensor(lengths[:2]),
            tables=torch.tensor([[5, 1, 6], [3, 2, 0]]),
            chunks=[],
            wanted=torch.zeros(0, dtype=torch.long),
            block_size=block_size,
        ),
        device,
    )
    tables = torch.tensor([[5, 1, 6], [3, 2, 0], [7, 0, 0]], dtype=torch.int32, device=device)
    step = dataclasses.replace(
        step,
        begins=_summed(counts).int().to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        ends=_summed(lengths).int().to(device),
        tables=tables,
        counts=counts,
        longest=max(lengths),
    )
    q = torch.empty(6, layer.num_heads, layer.key_size, dtype=layer.dtype, device=device)
    q.normal_(generator=generator)
    options = Options(layer.key_size**-0.5)
    found = _varlen(q, (cache.keys[0], cache.values[0]), step, options, kernel)
    wanted = _gathered(q, (cache.keys[0], cache.values[0]), step, options)
    return bool(torch.isclose(found.float(), wanted.float(), atol=0.03).all())
