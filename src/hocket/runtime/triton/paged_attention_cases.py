"""Cases that paged attention is held against: random batches, and the result in plain PyTorch.

Tests give them to Triton's interpreter on a CPU, and to the kernel where there is a GPU.

Legend: T tokens, R sequences, Hq query heads, Hkv key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference allowed, relative to the largest entry of the reference: a few roundings."""


def paged_attention_reference(  # noqa: PLR0917  as `paged_attention` is called
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
    seqused_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, *, scale: float,
    causal: bool = True, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `paged_attention` computes, sequence by sequence in float64. Reads lengths on the host.

    Returns:
        [T, Hq, Dv] float64; rows after `cu_seqlens_q[R]` are zero.
    """
    out, weight = paged_attention_part_reference(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        span=key_cache.shape[1], offset=0, scale=scale, causal=causal, window=window,
        softcap=softcap,
    )  # fmt: skip
    if sinks is None:
        return out
    return out * torch.sigmoid(weight - sinks.double()).unsqueeze(2)


def paged_attention_part_reference(  # noqa: PLR0917  as `paged_attention_part` is called
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
    seqused_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, *, span: int, offset: int,
    scale: float, causal: bool = True, window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `paged_attention_part` computes, as the reference above.

    Returns:
        [T, Hq, Dv] and [T, Hq] float64; rows after `cu_seqlens_q[R]` are zero, and -inf.
    """
    num_tokens, num_heads, _ = query.shape
    size, kv_heads, value_size = value_cache.shape[1:]
    out = query.new_zeros(num_tokens, num_heads, value_size, dtype=torch.float64)
    weight = torch.full_like(out[..., 0], -torch.inf)
    begins, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for row, length in enumerate(lengths):
        begin, end = begins[row], begins[row + 1]
        assert end - begin <= max_seqlen_q, (end - begin, max_seqlen_q)
        if begin == end or not length:
            continue
        blocks = block_tables[row, : -(-length // span)].long()
        at = torch.arange(len(blocks), device=query.device).unsqueeze(1) * span + offset
        at = (at + torch.arange(size, device=query.device)).flatten()
        held = at < length
        keys, values = (
            cache[blocks].flatten(0, 1)[held].double().repeat_interleave(num_heads // kv_heads, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), keys) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        at = at[held]
        position = torch.arange(length - (end - begin), length, device=query.device).unsqueeze(1)
        visible = at <= position if causal else torch.ones_like(at <= position)
        if window is not None:
            visible = visible & (at > position - window)
        scores = scores.masked_fill(~visible, -torch.inf)
        weight[begin:end] = scores.logsumexp(2).t()
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(2).nan_to_num(0.0), values)
    return out, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """One batch.

    Attributes:
        counts: queries of each sequence.
        lengths: tokens of each sequence in the cache.
        heads: Hq, Hkv.
        sizes: D, Dv.
        block_size: tokens of a block.
        max_blocks: columns of the block table; 0: what the longest needs.
        cached: dtype of keys and values. None: the query's.
        padding: rows of the query after the last sequence's.
        parts: of a block, of which the cache holds number `index`, of `block_size` tokens.
    """

    name: str
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (64, 64)
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    max_blocks: int = 0
    padding: int = 0
    parts: int = 1
    index: int = 0
    seed: int = 0

    def arguments(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The arguments of `paged_attention`, of parts those of `paged_attention_part`. Blocks lie
        in random order; what no sequence uses, the tail of a last block too, is NaN, and table
        entries behind a sequence are 0."""
        g = torch.Generator().manual_seed(self.seed)
        size, (num_heads, kv_heads), (d, dv) = self.block_size, self.heads, self.sizes
        span, offset = size * self.parts, size * self.index
        needed = [-(-length // span) for length in self.lengths]
        order = torch.randperm(sum(needed) + 3, generator=g).int()
        tables = torch.zeros(len(needed), max(self.max_blocks, *needed, 1), dtype=torch.int32)
        keys = torch.full((len(order), size, kv_heads, d), torch.nan)
        values = torch.full((len(order), size, kv_heads, dv), torch.nan)
        first = 0
        for row, (length, blocks) in enumerate(zip(self.lengths, needed, strict=True)):
            own = order[first : first + blocks]
            tables[row, :blocks] = own
            first += blocks
            for cache, width in ((keys, d), (values, dv)):
                held = torch.full((blocks * span, kv_heads, width), torch.nan)
                held[:length] = torch.randn(length, kv_heads, width, generator=g)
                part = held.view(blocks, span, kv_heads, width)[:, offset : offset + size]
                cache[own.long()] = part
        num_tokens = sum(self.counts)
        query = torch.randn(num_tokens + self.padding, num_heads, d, generator=g)
        begins = torch.tensor([0, *self.counts]).cumsum(0).int()
        sinks = torch.randn(num_heads, generator=g) if self.sinks else None
        split = {"span": span, "offset": offset}
        whole = {
            "causal": self.causal, "sinks": None if sinks is None else sinks.to(device, self.dtype)
        }  # fmt: skip
        return {
            "query": query.to(device, self.dtype),
            "key_cache": keys.to(device, self.cached or self.dtype),
            "value_cache": values.to(device, self.cached or self.dtype),
            "block_tables": tables.to(device),
            "seqused_k": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            "cu_seqlens_q": begins.to(device),
            "max_seqlen_q": max(1, *self.counts),
            "scale": d**-0.5,
            "window": self.window,
            "softcap": self.softcap,
            **(whole if self.parts == 1 else split),
        }


def largest_error(case: PagedBatch, device: torch.device | str = "cpu") -> float:
    """The largest difference from the reference, relative to the reference's largest entry; of a
    part's weights, the largest difference itself.

    Infinite where the kernel gives what is not a number.
    """
    from hocket.runtime.triton.paged_attention import paged_attention, paged_attention_part

    arguments, count = case.arguments(device), sum(case.counts)
    worst = 0.0
    if case.parts == 1:
        found = paged_attention(**arguments)[:count].double()
        wanted = paged_attention_reference(**arguments)[:count]
    else:
        found, weight = (one[:count].double() for one in paged_attention_part(**arguments))
        wanted, weights = (one[:count] for one in paged_attention_part_reference(**arguments))
        unseen = weights.isneginf()
        if not torch.equal(unseen, weight.isneginf()):
            return float("inf")
        worst = float((weight - weights).masked_fill(unseen, 0.0).abs().amax()) if count else 0.0
    if not found.isfinite().all():
        return float("inf")
    if not wanted.numel():
        return worst
    return max(worst, float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)))


def _cases() -> tuple[PagedBatch, ...]:
    half, bf16 = torch.float16, torch.bfloat16
    decode = PagedBatch(name="decode", counts=(1, 1, 1), lengths=(33, 1, 70))
    mixed = PagedBatch(name="mixed", counts=(1, 1, 9, 30), lengths=(40, 17, 9, 51))
    chunk = PagedBatch(name="chunk", counts=(40,), lengths=(90,))
    more = dataclasses.replace
    whole = [decode, mixed, chunk]
    for base in (decode, mixed):
        whole += [
            more(base, name=f"{base.name} window", window=20),
            more(base, name=f"{base.name} window of one token", window=1),
            more(base, name=f"{base.name} softcap", softcap=3.0),
            more(base, name=f"{base.name} sinks", sinks=True),
            more(base, name=f"{base.name} all", sinks=True, softcap=3.0, window=37),
            more(base, name=f"{base.name} not causal", causal=False),
            more(base, name=f"{base.name} of float16", dtype=half),
            more(base, name=f"{base.name} of bfloat16", dtype=bf16),
            more(
                base,
                name=f"{base.name} of float16 cached in 8 bits",
                dtype=half,
                cached=torch.float8_e4m3fn,
            ),
            more(
                base,
                name=f"{base.name} of bfloat16 cached in 8 bits, and all",
                dtype=bf16,
                cached=torch.float8_e4m3fn,
                sinks=True,
                softcap=3.0,
                window=37,
            ),
            more(base, name=f"{base.name} blocks of 48", block_size=48),
            more(base, name=f"{base.name} blocks of 256", block_size=256),
            more(base, name=f"{base.name} tables longer than sequences", max_blocks=20),
            more(base, name=f"{base.name} padded tokens", padding=5),
            more(base, name=f"{base.name} one head", heads=(1, 1)),
            more(base, name=f"{base.name} groups of 7", heads=(14, 2)),
            more(base, name=f"{base.name} groups of 20", heads=(20, 1)),
            *(
                more(base, name=f"{base.name} heads of {d} and {dv}", sizes=(d, dv))
                for d, dv in ((8, 8), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
            ),
        ]
    whole += [
        more(decode, name="one sequence, split keys", counts=(1,), lengths=(500,), max_blocks=64),
        more(
            decode, name="one sequence, split keys and sinks", counts=(1,), lengths=(500,),
            max_blocks=64, sinks=True, window=300, softcap=5.0,
        ),
        more(decode, name="short sequence, many splits", counts=(1,), lengths=(3,), max_blocks=99),
        more(decode, name="four tokens a row", counts=(4, 4, 4), lengths=(30, 4, 100)),
        more(decode, name="rows that pad", counts=(1, 1, 1), lengths=(20, 0, 0), sinks=True),
        more(mixed, name="rows without queries", counts=(0, 5, 0, 1, 0), lengths=(4, 9, 0, 3, 7)),
        more(mixed, name="all rows without queries", counts=(0, 0), lengths=(4, 0), padding=3),
        more(mixed, name="more queries than tokens", counts=(6, 2), lengths=(4, 9)),
        more(chunk, name="whole prompts", counts=(70, 33, 1), lengths=(70, 33, 1)),
        more(chunk, name="tiles of 128 rows", counts=(70, 90), lengths=(100, 90), dtype=half),
        more(
            chunk, name="tiles of 128 rows and all", counts=(70, 90), lengths=(100, 90), dtype=bf16,
            window=23, softcap=4.0, sinks=True, heads=(6, 2),
        ),
        more(
            chunk, name="many short rows", counts=tuple(range(1, 18)),
            lengths=tuple(range(18, 1, -1)), heads=(6, 2),
        ),
    ]  # fmt: skip
    rows = PagedBatch(
        name="", counts=(1, 1, 1, 9, 40), lengths=(40, 1, 17, 9, 151), parts=2, window=37,
        softcap=4.0,
    )  # fmt: skip
    long = more(decode, counts=(1,), lengths=(900,), max_blocks=64)
    whole += [
        more(rows, name="the first half of blocks", window=None, softcap=None),
        more(rows, name="the second half of blocks", index=1),
        more(rows, name="a fourth of blocks of 192", block_size=48, parts=4, index=2, dtype=bf16),
        more(
            rows, name="a half of blocks cached in 8 bits", index=1, dtype=half,
            cached=torch.float8_e4m3fn,
        ),
        more(long, name="a third of blocks, split keys", parts=3, index=1),
        more(long, name="a half of blocks, split keys and a window", parts=2, window=300),
        more(long, name="a half that no query sees", lengths=(9,), parts=2, index=1),
        more(long, name="a half that no window reaches", lengths=(64,), window=16, parts=2),
    ]  # fmt: skip
    return tuple(more(case, seed=seed) for seed, case in enumerate(whole))


CASES = _cases()
