"""Which kernel attends from the pages of the cache on a GPU, for each kind of attention layer.

    fa3      flash-attention 3 behind torch's variable-length attention; Hopper; package
             flash_attn_3, which torch activates
    fa4      flash-attention 4, likewise; data-center Blackwell; package flash-attn-4; blocks of a
             multiple of 128 tokens
    fa2      flash-attention 2, built into torch; blocks of a multiple of 256 tokens
    triton   `runtime.triton.paged_attention`: fp32, soft caps, attention sinks, keys and values of
             different sizes, any block of a multiple of 16 tokens
    latent   torch's operations over latent vectors (`attention_latent`), for the layers that cache
             them

The table `KERNELS` is in order of preference: a library that others maintain first. A kernel that
the table allows is tried once on each rank, with a small batch whose result is known. The block
size of the cache follows: the smallest that all chosen kernels read.

FlashInfer is not in the table: its general kernels need a host-side plan in each step and a
compiler where they run, and those that take block tables on the device are for Blackwell alone.

Not executed on a GPU yet.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hocket.serving.engine.attention import Options
from hocket.serving.engine.cache import LayerShape
from hocket.spec.capabilities import FP8_CAPABILITY
from hocket.spec.errors import ModelError
from hocket.spec.serving import BLOCK_SIZE

_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """What attention layers of one kind ask of a kernel.

    Attributes:
        shape: what a layer keeps of a token.
        window: tokens that a query sees. None: all before it.
        softcap, sinks: whether scores are capped, whether sinks take weight.
    """

    shape: LayerShape
    window: int | None = None
    softcap: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, shape: LayerShape, options: Options) -> LayerKind:
        return cls(shape, options.window, options.softcap is not None, options.sinks is not None)

    def stored_in(self, dtype: torch.dtype | None) -> LayerKind:
        """The same, cached in another dtype; None: as it is.

        Raises:
            ModelError: latent vectors have none.
        """
        if dtype is None:
            return self
        if self.shape.latent:
            raise ModelError(
                "latent vectors (MLA) are cached in the model's precision, not in 8 bits",
                hint="--kv-cache-dtype auto",
            )
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, stored=dtype))

    def __str__(self) -> str:
        shape = self.shape
        size = f"{shape.key_size}"
        if shape.value_size != shape.key_size:
            size += f"/{shape.value_size}"
        words = [f"{shape.num_heads}:{shape.num_kv_heads} heads of {size}", str(shape.dtype)[6:]]
        words += [f"window {self.window}"] if self.window else []
        words += ["cached in fp8"] if shape.stored else []
        words += ["latent"] if shape.latent else []
        words += ["soft cap"] if self.softcap else []
        words += ["sinks"] if self.sinks else []
        return ", ".join(words)


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """What decides on a kernel besides the layer.

    Attributes:
        capability: compute capability of the GPU.
        modules: importable modules among those that kernels need.
    """

    capability: tuple[int, int]
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, device: torch.device) -> Accelerator:
        """That of a CUDA device of this process."""
        modules = {kernel.module for kernel in KERNELS if kernel.module is not None}
        return cls(
            torch.cuda.get_device_capability(device),
            frozenset(module for module in modules if _importable(module)),
        )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One row of the table.

    Attributes:
        name: as it is reported.
        majors: compute capabilities (their first numbers) it runs on; `least`: the smallest.
        module: Python module it needs. None: none besides torch.
        impl: name by which torch activates it. None: nothing to activate.
        dtypes: of queries, keys and values.
        block: the block of the cache must be a multiple of so many tokens.
        preferred: block that is chosen where nothing else decides.
        head: head sizes must be a multiple of it; `largest_head`: at most this.
        softcap, sinks, unequal: whether it takes them (unequal: other values than keys).
        latent: whether it reads latent vectors, and nothing else.
        eight_bits: whether it reads keys and values in 8 bits with queries of another dtype.
        parts: whether it attends where a cache holds a part of each block, over context ranks.
    """

    name: str
    least: tuple[int, int]
    majors: tuple[int, ...] = ()
    module: str | None = None
    impl: str | None = None
    dtypes: tuple[torch.dtype, ...] = _HALF
    block: int
    preferred: int
    head: int = 8
    largest_head: int = 256
    softcap: bool = False
    sinks: bool = False
    unequal: bool = False
    latent: bool = False
    eight_bits: bool = False
    parts: bool = False

    @property
    def flash(self) -> bool:
        """Whether torch's variable-length attention calls it."""
        return self.name.startswith("fa")

    def rejection(
        self, kind: LayerKind, accelerator: Accelerator, block_size: int | None, ranks: int = 1
    ) -> str | None:
        """Why it is not taken; None: it may be. `ranks`: that hold a part of each block."""
        major, minor = accelerator.capability
        shape = kind.shape
        if shape.latent != self.latent:
            return "reads keys and values" if shape.latent else "reads latent vectors"
        if self.majors and major not in self.majors:
            return f"runs on compute capability {_or(self.majors)}.x, not {major}.{minor}"
        if accelerator.capability < self.least:
            needed = ".".join(map(str, self.least))
            return f"needs compute capability {needed}, not {major}.{minor}"
        if self.module is not None and self.module not in accelerator.modules:
            return f"module {self.module} is not installed"
        if ranks > 1 and not self.parts:
            return "attends to whole sequences, not to the part that a context rank holds"
        if shape.dtype not in self.dtypes:
            return f"does not compute in {str(shape.dtype)[6:]}"
        if shape.stored is not None and not self.eight_bits:
            return "does not read a cache in 8 bits"
        if shape.stored is not None and shape.dtype == torch.float32:
            return "converts a cache in 8 bits to 16 bits, not to float32"
        if shape.stored is not None and accelerator.capability < FP8_CAPABILITY:
            return f"converts 8-bit floats from 8.9 on, not on {major}.{minor}"
        for size in (shape.key_size, shape.value_size):
            if size > self.largest_head or size % self.head:
                return (
                    f"takes head sizes of a multiple of {self.head} up to {self.largest_head}, "
                    f"not {size}"
                )
        if shape.key_size != shape.value_size and not self.unequal:
            return f"takes one head size, not {shape.key_size} and {shape.value_size}"
        if kind.softcap and not self.softcap:
            return "has no soft cap"
        if kind.sinks and not self.sinks:
            return "has no attention sinks"
        least = self.block * ranks
        if block_size is not None and block_size % least:
            over = f" over cp {ranks}" if ranks > 1 else ""
            return f"reads blocks of a multiple of {least} tokens{over}, not {block_size}"
        return None


def _or(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


KERNELS = (
    KernelRow(
        name="fa3", least=(9, 0), majors=(9,), module="flash_attn_interface", impl="FA3",
        block=16, preferred=16,
    ),
    # torch's registration takes a block table on compute capability 10 alone (nn/attention/_fa4.py)
    KernelRow(
        name="fa4", least=(10, 0), majors=(10,), module="flash_attn.cute.interface", impl="FA4",
        block=128, preferred=128, largest_head=128,
    ),
    KernelRow(name="fa2", least=(8, 0), block=256, preferred=256),
    KernelRow(
        name="triton", least=(8, 0), module="triton", dtypes=(*_HALF, torch.float32),
        block=16, preferred=16, head=1, softcap=True, sinks=True, unequal=True,
        eight_bits=True, parts=True,
    ),
    KernelRow(
        name="latent", least=(0, 0), dtypes=(*_HALF, torch.float32), block=1, preferred=16, head=1,
        largest_head=1 << 16, softcap=True, sinks=True, unequal=True, latent=True,
        parts=True,
    ),
)  # fmt: skip

Works = Callable[[KernelRow, LayerKind, int], "str | None"]
"""Tries a kernel for a kind of layer and a block size; why it does not work, or None."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The kernel of one kind of layer.

    Attributes:
        kind: of the layers; `layers`: how many.
        kernel: its name.
        rejected: by name, why each kernel before it in the table was not taken.
    """

    kind: LayerKind
    layers: int
    kernel: str
    rejected: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the start message, the figures and the run's report."""
        shape = self.kind.shape
        return {
            "kernel": self.kernel,
            "layers": self.layers,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "key_size": shape.key_size,
            "value_size": shape.value_size,
            "dtype": str(shape.dtype)[6:],
            "cached": str(shape.stored or shape.dtype)[6:],
            "window": self.kind.window,
            "softcap": self.kind.softcap,
            "sinks": self.kind.sinks,
            "rejected": dict(self.rejected),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of a stage, and the block size that all of them read."""

    chosen: tuple[Chosen, ...]
    block_size: int

    def name(self, kind: LayerKind) -> str:
        return next(one.kernel for one in self.chosen if one.kind == kind)

    def to_json(self) -> list[dict[str, Any]]:
        return [{**one.to_json(), "block_size": self.block_size} for one in self.chosen]


def choose_kernels(
    kinds: Sequence[LayerKind],
    accelerator: Accelerator,
    block_size: int | None = None,
    works: Works = lambda kernel, kind, block: None,
    ranks: int = 1,
) -> Choice:
    """The kernel of each layer.

    Args:
        kinds: of the stage's attention layers, one for each layer.
        accelerator: of this rank.
        block_size: of the cache. None: chosen with the kernels, the least common multiple of what
            they prefer.
        works: tries a kernel.
        ranks: context ranks, each of which holds a part of each block.

    Raises:
        ModelError: no kernel takes one of the kinds.
    """
    counts: dict[LayerKind, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    failed: dict[tuple[str, LayerKind], str] = {}
    while True:
        picked: list[tuple[KernelRow, Chosen]] = []
        for kind, count in counts.items():
            rejected: dict[str, str] = {}
            for kernel in KERNELS:
                reason = failed.get((kernel.name, kind)) or kernel.rejection(
                    kind, accelerator, block_size, ranks
                )
                if reason is None:
                    picked.append((kernel, Chosen(kind, count, kernel.name, rejected)))
                    break
                rejected[kernel.name] = reason
            else:
                raise _none(kind, rejected, block_size, ranks)
        preferred = [kernel.preferred for kernel, _ in picked] or [BLOCK_SIZE]
        size = block_size or math.lcm(*preferred) * ranks
        flash = next((kernel for kernel, _ in picked if kernel.flash), None)
        for kernel, one in picked:
            why: str | None
            if kernel.flash and kernel is not flash:
                why = f"torch holds one flash-attention at a time, here {flash and flash.name}"
            else:
                why = works(kernel, one.kind, size)
            if why is not None:
                failed[kernel.name, one.kind] = why
                break
        else:
            return Choice(tuple(one for _, one in picked), size)


def _none(
    kind: LayerKind, rejected: dict[str, str], block_size: int | None, ranks: int
) -> ModelError:
    why = "; ".join(f"{name} {reason}" for name, reason in rejected.items())
    hint = "--device cpu"
    if block_size is not None and any("blocks of a multiple" in one for one in rejected.values()):
        able = [kernel.block for kernel in KERNELS if ranks == 1 or kernel.parts]
        hint = f"--block-size {math.lcm(*able) * ranks}"
    return ModelError(f"no attention kernel reads pages for {kind}: {why}", hint=hint)
