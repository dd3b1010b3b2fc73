"""Sizes: what is measured in the quick and in the full form, on CPU and on CUDA.

T tokens of a microbatch, H hidden size. A layer's weight is [out, in]; the three products of a
training step come from each pair of sizes: forward, gradient of the input, gradient of the weight.
"""

from __future__ import annotations

import dataclasses

Weights = tuple[tuple[int, int], ...]
"""(out, in) of a linear layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """One form.

    Attributes:
        tokens, weights: of the products; each pair up to `largest` operations.
        dtypes: of the products; the first one of everything else.
        streams: bytes of one tensor. heads: shapes of attention.
        widths, layers: (tokens, width), of kernels and of what lies between a layer's products.
        rows, matrices: of products that serve: rows, and (out, in) of so many weights in turn.
        half_rows, halves: the same, by weights in bf16.
        decoding, chunks: shapes of paged attention, as in `spec.measured.MeasuredKernel`.
        updates: (elements, tensors). messages: bytes of collectives.
        rounds: of repeats, at least (half of them of products, and of what serving calls). others:
            of messages over a backend that the runtime would not choose by itself. seconds: that
            each part may take.
    """

    tokens: tuple[int, ...]
    weights: Weights
    largest: float
    dtypes: tuple[str, ...]
    streams: tuple[int, ...]
    heads: tuple[tuple[int, int, int, int], ...]
    widths: tuple[tuple[int, int], ...]
    layers: tuple[tuple[int, int], ...]
    vocabularies: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    matrices: tuple[tuple[int, int, int], ...]
    half_rows: tuple[int, ...]
    halves: tuple[tuple[int, int, int], ...]
    decoding: tuple[tuple[int, int, int, int, int, int], ...]
    chunks: tuple[tuple[int, int, int, int], ...]
    updates: tuple[tuple[int, int], ...]
    messages: tuple[int, ...]
    rounds: int
    others: int
    seconds: dict[str, float]


_KI, _MI = 2**10, 2**20

_CPU_WEIGHTS: Weights = (
    (64, 64), (256, 64), (64, 256), (256, 256), (1024, 256), (256, 1024), (512, 128), (128, 512),
    (768, 768), (3072, 768), (768, 3072), (4096, 256),
)  # fmt: skip

QUICK = ProbeSizes(
    tokens=(32, 128, 512, 2048),
    weights=_CPU_WEIGHTS[:8],
    largest=1.2e9,
    dtypes=("fp32",),
    streams=(16 * _KI, 256 * _KI, 2 * _MI, 32 * _MI),
    heads=((1, 4, 64, 32), (4, 4, 128, 32), (1, 4, 256, 64), (4, 4, 128, 64)),
    widths=((512, 1024),),
    layers=((32, 64), (128, 128), (512, 128), (512, 256)),
    vocabularies=((128, 512, 128), (512, 4096, 256)),
    rows=(1, 8, 16, 32, 64),
    matrices=((512, 256, 2), (1024, 512, 6), (1024, 512, 48)),
    half_rows=(1, 4, 32, 64),
    halves=((512, 256, 2), (1024, 512, 96)),
    decoding=(
        (1, 8, 4, 256, 32, 64), (8, 8, 4, 256, 32, 8), (32, 8, 4, 256, 32, 4),
        (8, 12, 4, 128, 64, 32), (32, 12, 4, 128, 64, 12),
    ),
    chunks=((8, 4, 64, 32), (8, 4, 256, 32), (12, 4, 128, 64)),
    updates=((2**16, 8), (2**20, 40)),
    messages=(256, 4 * _KI, 32 * _KI, 128 * _KI, 512 * _KI, 2 * _MI, 8 * _MI),
    rounds=5,
    others=3,
    seconds={
        "products": 2.8, "streams": 0.5, "layers": 0.5, "kernels": 1.0, "updates": 0.3,
        "dispatch": 0.3, "serving": 0.4, "sharing": 2.4, "pairs": 0.4, "collectives": 2.7,
    },
)  # fmt: skip

FULL = dataclasses.replace(
    QUICK,
    tokens=(8, 32, 128, 512, 2048),
    weights=(*_CPU_WEIGHTS, (32, 256), (256, 32), (1024, 1024), (2048, 2048), (8192, 512)),
    largest=2.5e9,
    dtypes=("fp32", "bf16"),
    streams=(4 * _KI, 16 * _KI, 64 * _KI, 256 * _KI, _MI, 4 * _MI, 16 * _MI, 64 * _MI, 128 * _MI),
    heads=(
        (1, 4, 64, 32), (1, 4, 256, 64), (4, 4, 128, 64), (8, 8, 128, 32), (1, 8, 1024, 64),
        (1, 2, 512, 64), (2, 12, 512, 64),
    ),
    widths=((32, 64), (128, 64), (128, 256), (512, 1024), (2048, 256), (512, 4096)),
    layers=((8, 64), (32, 64), (128, 128), (512, 128), (512, 384)),
    vocabularies=((128, 512, 128), (512, 4096, 256), (512, 32000, 256), (2048, 1024, 256)),
    rows=(1, 2, 4, 8, 16, 32, 64),
    matrices=((512, 256, 2), (1024, 512, 6), (1024, 512, 48), (4096, 1024, 16)),
    halves=((512, 256, 2), (1024, 512, 12), (1024, 512, 96)),
    decoding=(
        *QUICK.decoding, (1, 4, 4, 64, 16, 4), (4, 32, 8, 512, 128, 8), (64, 8, 4, 256, 32, 4),
        (64, 12, 4, 128, 64, 8),
    ),
    chunks=(*QUICK.chunks, (4, 4, 32, 16), (32, 8, 256, 128)),
    updates=((2**14, 4), (2**16, 8), (2**20, 40), (2**22, 80), (2**24, 100)),
    messages=(
        64, 256, 1 * _KI, 4 * _KI, 16 * _KI, 64 * _KI, 256 * _KI, _MI, 4 * _MI, 16 * _MI,
    ),
    rounds=9,
    others=9,
    seconds={
        "products": 17.0, "streams": 3.0, "layers": 3.0, "kernels": 5.0, "updates": 2.5,
        "dispatch": 1.0, "serving": 2.0, "sharing": 8.0, "pairs": 2.0, "collectives": 19.5,
    },
)  # fmt: skip

_CUDA_WEIGHTS: Weights = (
    (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336),
    (8192, 8192),
)  # fmt: skip

CUDA_QUICK = dataclasses.replace(
    QUICK,
    tokens=(16, 512, 2048, 8192),
    weights=_CUDA_WEIGHTS,
    largest=1e13,
    dtypes=("bf16", "fp32"),
    streams=(256 * _KI, 4 * _MI, 64 * _MI, 1024 * _MI),
    heads=((1, 16, 1024, 64), (1, 32, 4096, 128), (4, 32, 2048, 128)),
    widths=((2048, 1024), (8192, 4096)),
    layers=((16, 1024), (512, 1024), (2048, 1024), (8192, 4096)),
    vocabularies=((2048, 32000, 1024), (8192, 128256, 4096)),
    updates=((2**22, 40), (2**28, 200)),
    messages=(_KI, 16 * _KI, 256 * _KI, 4 * _MI, 64 * _MI, 512 * _MI),
)

CUDA_FULL = dataclasses.replace(
    CUDA_QUICK,
    tokens=(1, 16, 128, 512, 2048, 4096, 8192),
    weights=(*_CUDA_WEIGHTS, (28672, 8192), (8192, 28672), (32000, 4096)),
    messages=tuple(_KI * 4**i for i in range(11)),
    rounds=9,
    others=9,
    seconds=FULL.seconds,
)


def probe_sizes(kind: str, quick: bool) -> ProbeSizes:
    """The form for `cpu` or `cuda`."""
    if kind == "cuda":
        return CUDA_QUICK if quick else CUDA_FULL
    return QUICK if quick else FULL


def worlds(kind: str, devices: int, quick: bool) -> tuple[int, ...]:
    """How many ranks talk or compute at once.

    On CUDA up to one a GPU. On CPU up to two a core and at least four: ranks that share cores are
    part of what a CPU does; the quick form stops at eight.
    """
    if kind == "cuda":
        return tuple(n for n in _powers(devices) if n > 1)
    most = min(8, devices) if quick else min(32, 2 * devices)
    return tuple(sorted({2, 4, *(n for n in _powers(most) if n > 1)}))


def group_sizes(world: int) -> tuple[int, ...]:
    """Sizes of the groups that a world is cut into: pairs, fours, and all of it."""
    return tuple(sorted({n for n in (2, 4, world) if n <= world and world % n == 0}))


def _powers(most: int) -> list[int]:
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})
