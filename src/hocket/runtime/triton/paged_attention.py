"""Attention over a paged key/value cache, as a Triton kernel behind an operator of PyTorch.

`paged_attention` takes chunks of prompts, decode steps and both in one batch, any number of query
heads for a key/value head, head sizes up to 256 that may differ between keys and values, blocks of
any multiple of 16 tokens, sliding windows, soft caps and attention sinks, in float16, bfloat16 and
float32. With queries in 16 bits the cache may be in 8-bit floats (e4m3) of the scale 1, which are
converted to the query's dtype before they are multiplied; in float32 that would spill registers.
It is the kernel for what the libraries cannot do, or where they are not installed.

`paged_attention_part` attends where the cache holds a part of each block, as on one of several
context ranks, and also returns the logarithm of the sum of exponentials, by which parts are merged.

Nothing is read back from the device: the grid follows from shapes and `max_seqlen_q`, so that a
call can be captured in a CUDA graph and replayed with other lengths. A batch with too few tiles to
fill the device splits the keys of each sequence and merges the results (two launches).

Checked against `paged_attention_reference` in Triton's interpreter, and compiled for every
architecture of `compile`. Not executed on a GPU yet.

Legend: T tokens, R sequences, Hq query heads, Hkv key/value heads, D and Dv head sizes of keys and
values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from hocket.runtime.triton import FUSED

LARGEST_HEAD = 256
BLOCK_MULTIPLE = 16
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn

_MOST_SPLITS = 64
_INTERPRETED_MULTIPROCESSORS = 132
"""Of the device that Triton's interpreter stands for: an H100."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionTile:
    """What one program holds at once.

    Attributes:
        rows: query rows (tokens times the query heads of one key/value head).
        keys: keys of one iteration.
        num_warps, num_stages: of Triton's compiler.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.keys}"


def padded(size: int) -> int:
    """The power of two, 16 or larger, that holds a head: a tile's sides are powers of two."""
    return max(16, 1 << (size - 1).bit_length())


_HALF = {
    64: (
        AttentionTile(16, 64, 4, 3),
        AttentionTile(32, 64, 4, 3),
        AttentionTile(64, 64, 4, 3),
        AttentionTile(128, 32, 8, 3),
    ),
    128: (
        AttentionTile(16, 64, 4, 3),
        AttentionTile(32, 64, 4, 3),
        AttentionTile(64, 64, 8, 3),
        AttentionTile(128, 32, 8, 3),
    ),
    256: (AttentionTile(16, 32, 4, 3), AttentionTile(32, 32, 4, 3), AttentionTile(64, 16, 8, 3)),
}
_SINGLE = {
    64: (AttentionTile(16, 32, 4, 3), AttentionTile(32, 32, 8, 3)),
    128: (AttentionTile(16, 32, 4, 3), AttentionTile(32, 16, 8, 2)),
    256: (AttentionTile(16, 16, 4, 2),),
}
"""Padded head size to the tiles that none of the architectures of `compile` spills: one table for
all, which fits the smallest shared memory among them (99 KiB of sm_120)."""


def attention_tile(
    dtype: torch.dtype, key_size: int, value_size: int, most_rows: int, *, converted: bool = False,
    part: bool = False,
) -> AttentionTile:  # fmt: skip
    """The tile for heads of these sizes in a batch whose longest sequence has `most_rows` rows.

    The smallest that holds them, or the largest: a decode step gets tiles of 16 rows. `converted`:
    keys and values are in 8 bits, whose conversion takes the registers of larger tiles. `part`:
    the cache holds a part of each block, whose bounds take some as well.
    """
    tiles = _SINGLE if dtype == torch.float32 else _HALF
    width = max(64, padded(key_size), padded(value_size))
    most = 128 if not converted else 16 if width == 64 else 64
    if part and dtype == torch.float32 and width == 128:
        most = 16
    found = tuple(tile for tile in tiles[width] if tile.rows <= most)
    return next((tile for tile in found if tile.rows >= most_rows), found[-1])


def precision_of(dtype: torch.dtype, key_size: int, value_size: int) -> str:
    """How `tl.dot` multiplies: ieee, or tf32x3 for float32.

    tf32x3 is three matmuls of TF32 on tensor cores, with a rounding of about 2**-21 instead of
    TF32's 2**-11. For heads above 128 its halves of every operand spill registers.
    """
    wide = max(padded(key_size), padded(value_size)) > 128
    return "tf32x3" if dtype == torch.float32 and not wide else "ieee"


def num_splits(tiles: int, max_context: int, tile: AttentionTile, multiprocessors: int) -> int:
    """Into how many parts the keys of each sequence are split, from sizes known on the host.

    As many as give each multiprocessor two programs, none of fewer than two iterations. Tiles that
    fill the device already are not split.
    """
    if tiles >= multiprocessors:
        return 1
    wanted = -(-2 * multiprocessors // max(tiles, 1))
    return max(1, min(wanted, max_context // (2 * tile.keys), _MOST_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(  # noqa: PLR0917  as kernels of this kind are called
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the new tokens of R sequences to all tokens that the cache holds of them.

    The queries of sequence r are its last tokens: query i of n stands at position
    `seqused_k[r] - n + i`. The cache holds their keys and values already. A query that sees no key
    gets zeros. Rows of the result after `cu_seqlens_q[R]` are undefined.

    Args:
        query: [T, Hq, D], its last dimension dense.
        key_cache: [blocks, block, Hkv, D], contiguous; block is a multiple of 16.
        value_cache: [blocks, block, Hkv, Dv], contiguous.
        block_tables: [R, max_blocks] int32: where the tokens of each sequence are, block by block.
        seqused_k: [R] int32, tokens of each sequence in the cache. 0: none (a row that pads).
        cu_seqlens_q: [R + 1] int32, first query of each sequence, and their number.
        max_seqlen_q: an upper bound of the queries of one sequence; 1 for a decode step.
        scale: of the scores.
        causal: a query sees no token after its own.
        window: tokens that a query sees, itself included. None: all before it.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: [Hq], for each head a score that takes weight and has no value (gpt-oss).

    Returns:
        [T, Hq, Dv], contiguous, of the query's dtype.

    Raises:
        ValueError: shapes, dtypes or strides other than these.
    """
    _check(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        window, sinks,
    )  # fmt: skip
    out: Tensor = torch.ops.hocket.paged_attention(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        scale, causal, window, softcap, sinks,
    )  # fmt: skip
    return out


def paged_attention_part(  # noqa: PLR0917  as `paged_attention` is called
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    span: int,
    offset: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `paged_attention`, causal, to the part of each block that this cache holds.

    A block has `span` tokens of a sequence, of which the cache holds those from `offset` on, as
    many as a block of the cache has. Tables, lengths and windows are of whole sequences.

    Returns:
        Attended values [T, Hq, Dv] in fp32, and the logarithm of the sum of exponentials [T, Hq] in
        fp32. Of a query that sees none of these keys: zeros and -inf.

    Raises:
        ValueError: shapes, dtypes or strides other than these.
    """
    _check(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        window, None,
    )  # fmt: skip
    size = key_cache.shape[1]
    if span % size or not 0 <= offset <= span - size:
        raise ValueError(
            f"a block of {span} tokens does not consist of parts of {size}, one from {offset} on"
        )
    found: tuple[Tensor, Tensor] = torch.ops.hocket.paged_attention_part(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        span, offset, scale, window, softcap,
    )  # fmt: skip
    return found


def _check(  # noqa: PLR0917
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, used: Tensor, begins: Tensor,
    most: int, window: int | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Shapes, dtypes and strides: nothing that is on the device."""
    if most < 1 or (window is not None and window < 1):
        raise ValueError(f"max_seqlen_q {most} and window {window} must be 1 or more")
    if query.ndim != 3 or keys.ndim != 4 or values.ndim != 4 or tables.ndim != 2:
        raise ValueError(
            f"query {tuple(query.shape)}, key_cache {tuple(keys.shape)}, value_cache "
            f"{tuple(values.shape)} and block_tables {tuple(tables.shape)} must have 3, 4, 4 and 2 "
            "dimensions"
        )
    heads, size = query.shape[1:]
    rows = tables.shape[0]
    if keys.shape[3] != size or values.shape[:3] != keys.shape[:3] or heads % keys.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit key_cache {tuple(keys.shape)} and "
            f"value_cache {tuple(values.shape)}"
        )
    if max(size, values.shape[3]) > LARGEST_HEAD:
        raise ValueError(f"head sizes {size} and {values.shape[3]}: at most {LARGEST_HEAD}")
    if keys.shape[1] % BLOCK_MULTIPLE:
        raise ValueError(f"blocks of {keys.shape[1]} tokens: not a multiple of {BLOCK_MULTIPLE}")
    half = query.dtype in (torch.float16, torch.bfloat16)
    known = query.dtype in DTYPES and values.dtype == keys.dtype
    if not known or not (keys.dtype == query.dtype or (half and keys.dtype == E4M3)):
        raise ValueError(
            f"query {query.dtype}, key_cache {keys.dtype}, value_cache {values.dtype}: one of "
            "float16, bfloat16, float32 for all three, or float8_e4m3fn for both caches of the "
            "first two"
        )
    for name, tensor, shape in (
        ("block_tables", tables, tuple(tables.shape)),
        ("seqused_k", used, (rows,)),
        ("cu_seqlens_q", begins, (rows + 1,)),
    ):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not torch.int32 {shape}"
            )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks {tuple(sinks.shape)}: one for each of {heads} query heads")
    if query.stride(2) != 1:
        raise ValueError(f"query with strides {query.stride()}: its last dimension must be dense")
    dense = {"key_cache": keys, "value_cache": values, "block_tables": tables}
    dense |= {"seqused_k": used, "cu_seqlens_q": begins}
    for name, tensor in (dense | ({} if sinks is None else {"sinks": sinks})).items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} with strides {tensor.stride()} is not contiguous")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """The grid and the compile-time constants of one call.

    Attributes:
        grid: of `attend_kernel`.
        tile: of it.
        splits: of the keys; more than one: `merge_kernel` follows.
        constants: the values of `attend_kernel`'s compile-time arguments.
    """

    grid: tuple[int, int, int]
    tile: AttentionTile
    splits: int
    constants: dict[str, object]


def launch_of(
    *, dtype: torch.dtype, num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int,
    key_size: int, value_size: int, block_size: int, max_blocks: int, max_seqlen_q: int,
    causal: bool, window: bool, softcap: bool, sinks: bool, multiprocessors: int,
    converted: bool = False, span: int | None = None,
) -> Launch:  # fmt: skip
    """How a call of these sizes is launched: a function of what the host knows. `span`: tokens of
    a block of which the cache holds a part."""
    group = num_heads // num_kv_heads
    most_rows = min(max_seqlen_q, num_tokens) * group
    tile = attention_tile(
        dtype, key_size, value_size, most_rows, converted=converted, part=span is not None
    )
    one_tile = most_rows <= tile.rows
    tiles = num_rows if one_tile else num_tokens * group // tile.rows + num_rows
    splits = num_splits(tiles * num_kv_heads, max_blocks * block_size, tile, multiprocessors)
    return Launch(
        (tiles, num_kv_heads, splits), tile, splits,
        {
            "GROUP": group, "D": key_size, "DV": value_size, "BLOCK_SIZE": block_size,
            "SPAN": span or block_size, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys,
            "D_PAD": padded(key_size), "DV_PAD": padded(value_size),
            "SPLIT": splits > 1, "ONE_TILE": one_tile, "CAUSAL": causal, "HAS_WINDOW": window,
            "HAS_SOFTCAP": softcap, "HAS_SINKS": sinks, "RETURN_LSE": span is not None,
            "PRECISION": precision_of(dtype, key_size, value_size),
        },
    )  # fmt: skip


def _launched(  # noqa: PLR0917
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
    seqused_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, scale: float, causal: bool,
    window: int | None, softcap: float | None, sinks: Tensor | None, span: int | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What is attended to, and with a span its weight."""
    from hocket.runtime.triton.paged_attention_kernels import attend_kernel, merge_kernel

    num_tokens, num_heads, key_size = query.shape
    _, block_size, num_kv_heads, value_size = value_cache.shape
    num_rows, max_blocks = block_tables.shape
    returns_lse = span is not None
    kind = torch.float32 if returns_lse else query.dtype
    out = query.new_empty(num_tokens, num_heads, value_size, dtype=kind)
    weight = query.new_empty(num_tokens, num_heads, dtype=torch.float32) if returns_lse else out
    if not num_tokens or not num_rows:
        return out, weight
    launch = launch_of(
        dtype=query.dtype, num_tokens=num_tokens, num_rows=num_rows, num_heads=num_heads,
        num_kv_heads=num_kv_heads, key_size=key_size, value_size=value_size,
        block_size=block_size, max_blocks=max_blocks, max_seqlen_q=max_seqlen_q, causal=causal,
        window=window is not None, softcap=softcap is not None, sinks=sinks is not None,
        multiprocessors=_multiprocessors(query.device), converted=key_cache.dtype == E4M3,
        span=span,
    )  # fmt: skip
    splits = launch.splits
    target, lse = out, weight
    if splits > 1:
        lse = query.new_empty(splits, num_tokens, num_heads, dtype=torch.float32)
        target = query.new_empty(splits, num_tokens, num_heads, value_size, dtype=torch.float32)
    attend_kernel[launch.grid](
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q,
        query if sinks is None else sinks, target, lse,
        scale, softcap or 0.0, window or 0, offset, query.stride(0), query.stride(1),
        num_tokens, num_rows, max_blocks, num_kv_heads,
        **launch.constants, num_warps=launch.tile.num_warps, num_stages=launch.tile.num_stages,
        **FUSED,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(num_tokens * num_heads,)](
            target, lse, out, weight, num_tokens * num_heads, splits, DV=value_size,
            DV_PAD=padded(value_size), SPLITS_PAD=1 << (splits - 1).bit_length(),
            RETURN_LSE=returns_lse, num_warps=4, **FUSED,
        )  # fmt: skip
    return out, weight


def _paged_attention(*arguments: Any) -> Tensor:
    return _launched(*arguments)[0]


def _paged_attention_part(  # noqa: PLR0917
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
    seqused_k: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, span: int, offset: int,
    scale: float, window: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _launched(
        query, key_cache, value_cache, block_tables, seqused_k, cu_seqlens_q, max_seqlen_q,
        scale, True, window, softcap, None, span, offset,
    )  # fmt: skip


def _fake_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object
) -> Tensor:
    return query.new_empty(*query.shape[:2], value_cache.shape[3])


def _fake_paged_attention_part(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    shape = *query.shape[:2], value_cache.shape[3]
    return (
        query.new_empty(shape, dtype=torch.float32),
        query.new_empty(shape[:2], dtype=torch.float32),
    )


_LIBRARY: Any = torch.library.Library("hocket", "FRAGMENT")  # type: ignore[no-untyped-call]
_PAGES = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seqused_k, "
    "Tensor cu_seqlens_q, int max_seqlen_q, "
)
for _name, _schema, _run, _fake in (
    (
        "paged_attention",
        "float scale, bool causal, int? window, float? softcap, Tensor? sinks) -> Tensor",
        _paged_attention, _fake_paged_attention,
    ),
    (
        "paged_attention_part",
        "int span, int offset, float scale, int? window, float? softcap) -> (Tensor, Tensor)",
        _paged_attention_part, _fake_paged_attention_part,
    ),
):  # fmt: skip
    _LIBRARY.define(f"{_name}({_PAGES}{_schema}")
    _LIBRARY.impl(_name, _run, "CUDA")
    _LIBRARY.impl(_name, _run, "CPU")  # Triton's interpreter
    torch.library.register_fake(f"hocket::{_name}", _fake, lib=_LIBRARY)
