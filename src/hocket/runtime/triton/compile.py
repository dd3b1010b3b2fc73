"""Compiles every Triton kernel of hocket to machine code, on a machine without a GPU.

    python -m hocket.runtime.triton.compile [--arch 90] [--write docs/reference/kernels.md]

For each kernel, dtype, head size and tile that hocket launches, and each architecture: registers of
a thread, bytes of stack (a register that spills goes there), shared memory of a program, which the
architecture limits, and the tensor-core instruction that the compiler chose. This finds, before a
GPU is rented, kernels that do not compile, spill, do not fit, or multiply without tensor cores. It
does not find whether they are right (Triton's interpreter does, in the tests) or fast.

Needs the package triton, which brings ptxas and cuobjdump.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hocket.runtime.triton import FUSED, grouped_gemm, quantize_rows
from hocket.runtime.triton.paged_attention import AttentionTile, launch_of, padded
from hocket.spec.attention_kernel import SHARED_MEMORY

SHARED_LIMIT = {arch: limit for arch, limit in SHARED_MEMORY.items() if arch != 86}  # as 89

FIRST_WITH_8_BITS = 89
"""The first with instructions of 8-bit floats; kernels without them are compiled for 80 instead."""

CACHED_IN_8_BITS = "cache in 8 bits"
"""End of the variants of paged attention whose keys and values are."""

_RESERVED = 1024
"""Bytes of it that the driver takes for itself from sm_90 on, already taken off the limits."""

TENSOR_CORE = {"mma": r"\bmma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma"}

_POINTER = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    grouped_gemm.E4M3: "*fp8e4nv",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSpecialization:
    """One specialisation of one kernel that hocket launches.

    Attributes:
        kernel: name of one of the kernels. module: of this package, that defines it.
        dtype: of its operands.
        sizes: head sizes of keys and values; () where there are none.
        tile: what a program holds; for `merge_kernel`, rows are the splits.
        variant: plain, or with what else an attention layer may ask for; of a grouped matmul, the
            strides of the weight.
        constants: compile-time arguments.
        matmul: whether tensor cores are expected.
        lowest: the least architecture that has its instructions.
    """

    kernel: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    tile: AttentionTile | grouped_gemm.GemmTile | quantize_rows.RowTile
    variant: str
    constants: dict[str, object] = dataclasses.field(hash=False)
    matmul: bool = True
    module: str = "paged_attention_kernels"
    lowest: int = 80

    @property
    def operands(self) -> str:
        cached = f", {CACHED_IN_8_BITS}" if self.variant.endswith(CACHED_IN_8_BITS) else ""
        return str(self.dtype).removeprefix("torch.") + cached

    @property
    def architectures(self) -> tuple[int, ...]:
        """Those it is compiled for."""
        if self.lowest == FIRST_WITH_8_BITS:
            return tuple(arch for arch in SHARED_LIMIT if arch >= FIRST_WITH_8_BITS)
        return tuple(arch for arch in SHARED_LIMIT if arch != FIRST_WITH_8_BITS)


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a configuration.

    Attributes:
        arch: compute capability, 90 for sm_90.
        registers: of a thread.
        stack: bytes of a thread; 0 unless registers spill.
        shared: bytes of a program.
        instruction: of the tensor core: mma, wgmma, tcgen05 or "".
    """

    configuration: KernelSpecialization
    arch: int
    registers: int
    stack: int
    shared: int
    instruction: str

    def faults(self) -> list[str]:
        """What a shipped configuration must not do."""
        limit = SHARED_LIMIT[self.arch]
        found = []
        if self.stack:
            found.append(f"{self.stack} bytes of stack a thread")
        if self.shared > limit:
            found.append(f"{self.shared} of {limit} bytes of shared memory")
        if self.configuration.matmul and not self.instruction:
            found.append("no tensor-core instruction")
        return found


def configurations() -> tuple[KernelSpecialization, ...]:
    """Every tile of every kernel: of attention plain, with window, softcap and sinks together, and
    with window and softcap over a part of each block; of grouped matmuls with weights stored
    [E, K, N] and [E, N, K]."""
    return tuple(_attention()) + tuple(_merging()) + tuple(_grouped()) + tuple(_quantizing())


def _attention() -> Iterator[KernelSpecialization]:
    seen = set()
    heads = [(64, 64), (128, 128), (192, 128), (256, 256)]
    whole = [(torch.bfloat16, sizes) for sizes in heads] + [(torch.float32, s) for s in heads]
    for dtype, (key_size, value_size) in [*whole, (torch.float16, (128, 128))]:
        for queries in (1, 8, 16, 512):  # of a sequence: 4, 32, 64 and 2048 rows
            for variant, converted in itertools.product(_VARIANTS, (False, True)):
                if converted and dtype == torch.float32:
                    continue
                more, part = variant != _VARIANTS[0], variant == _VARIANTS[2]
                launch = launch_of(
                    dtype=dtype, num_tokens=queries, num_rows=1, num_heads=32, num_kv_heads=8,
                    key_size=key_size, value_size=value_size, block_size=16, max_blocks=1024,
                    max_seqlen_q=queries, causal=True, window=more, softcap=more,
                    sinks=more and not part, multiprocessors=132, converted=converted,
                    span=32 if part else None,
                )  # fmt: skip
                half = dtype != torch.float32
                found = KernelSpecialization(
                    "attend_kernel", dtype, (key_size, value_size), launch.tile,
                    f"{variant}, {CACHED_IN_8_BITS}" if converted else variant, launch.constants,
                    matmul=half or launch.constants["PRECISION"] == "tf32x3",
                    lowest=FIRST_WITH_8_BITS if converted else 80,
                )  # fmt: skip
                if found not in seen:
                    seen.add(found)
                    yield found


_VARIANTS = ("plain", "window, softcap, sinks", "part of blocks")


def _merging() -> Iterator[KernelSpecialization]:
    for size in (64, 128, 256):
        constants: dict[str, object] = {"DV": size, "DV_PAD": padded(size), "SPLITS_PAD": 64}
        tile = AttentionTile(64, 1, 4, 1)
        for variant, returns_lse in (("plain", False), ("part of blocks", True)):
            yield KernelSpecialization(
                "merge_kernel", torch.bfloat16, (size, size), tile, variant,
                {**constants, "RETURN_LSE": returns_lse}, matmul=False,
            )  # fmt: skip


def _grouped() -> Iterator[KernelSpecialization]:
    kinds = {"weight [E, K, N]": "weight_stride_n", "weight [E, N, K]": "weight_stride_k"}
    dense = {"x_stride_k": 1, "gradient_stride_n": 1, "out_stride_n": 1}
    for dtype in grouped_gemm.DTYPES:
        tiles = grouped_gemm.tiles_of(dtype)
        for tile in tiles:
            for variant, one in kinds.items():
                constants = {**tile.forward_constants(dtype), "x_stride_k": 1, one: 1}
                yield KernelSpecialization(
                    "grouped_mm_kernel", dtype, (), tile, variant, constants,
                    module="grouped_gemm_kernels",
                )  # fmt: skip
        yield KernelSpecialization(
            "grouped_weight_gradient_kernel", dtype, (), tiles[-1], "plain",
            {**tiles[-1].constants(dtype), **dense}, module="grouped_gemm_kernels",
        )  # fmt: skip
    kind = grouped_gemm.E4M3
    for tile in grouped_gemm.tiles_of(kind):
        constants = {**tile.forward_constants(kind), "x_stride_k": 1, "weight_stride_k": 1}
        yield KernelSpecialization(
            "grouped_mm_kernel", kind, (), tile, "weight [E, N, K]", constants,
            module="grouped_gemm_kernels", lowest=FIRST_WITH_8_BITS,
        )  # fmt: skip


def _quantizing() -> Iterator[KernelSpecialization]:
    for dtype in (torch.bfloat16, torch.float32):
        yield KernelSpecialization(
            "quantize_rows_kernel", dtype, (), quantize_rows.TILE, "plain",
            quantize_rows.TILE.constants(), matmul=False, module="quantize_rows_kernels",
            lowest=FIRST_WITH_8_BITS,
        )  # fmt: skip


def compile_for(configuration: KernelSpecialization, arch: int) -> Compiled:
    """Compile one configuration for one architecture; a second or so."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = importlib.import_module(f"hocket.runtime.triton.{configuration.module}")
    kernel = getattr(kernels, configuration.kernel)
    signature = _signature(configuration)
    names: list[str] = kernel.arg_names
    dense = {"query_stride_token", "query_stride_head", "K", "N"}
    dense |= {name for name in names if "_stride_" in name and "query" not in name}
    dense |= {"num_columns"}
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): v for name, v in configuration.constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in signature and (name in dense or signature[name].startswith("*"))
        },
    )
    tile = configuration.tile
    built = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages, **FUSED},
    )
    registers, stack = _usage(built.asm["cubin"])
    chosen = [name for name, sign in TENSOR_CORE.items() if re.search(sign, built.asm["ptx"])]
    reserved = _RESERVED if arch >= 90 else 0
    shared = built.metadata.shared + reserved if built.metadata.shared else 0
    return Compiled(configuration, arch, registers, stack, shared, " ".join(chosen))


def _signature(configuration: KernelSpecialization) -> dict[str, str]:
    pointer = _POINTER[configuration.dtype]
    if configuration.module == "grouped_gemm_kernels":
        matrices = dict.fromkeys(("x", "weight", "gradient", "out"), pointer)
        sizes = ("num_rows", "num_groups", "K", "N")
        strides = tuple(
            f"{matrix}_stride_{axis}" for matrix in matrices for axis in ("row", "group", "k", "n")
        )
        given = {**matrices, "offsets": "*i32", **dict.fromkeys((*sizes, *strides), "i32")}
        scaled = bool(configuration.constants.get("SCALED"))
        given |= dict.fromkeys(("x_scale", "weight_scale"), "*fp32" if scaled else "*i32")
        given["out"] = "*bf16" if scaled else pointer
        return {name: kind for name, kind in given.items() if name not in configuration.constants}
    if configuration.kernel == "quantize_rows_kernel":
        return {
            "x": pointer, "out": "*fp8e4nv", "scale": "*fp32", "num_columns": "i32",
            "x_stride_row": "i32",
        }  # fmt: skip
    if configuration.kernel == "merge_kernel":
        return {
            "partial": "*fp32", "lse": "*fp32", "weight": "*fp32", "num_places": "i32",
            "out": "*fp32" if configuration.constants["RETURN_LSE"] else pointer, "splits": "i32",
        }  # fmt: skip
    in_fp32 = bool(configuration.constants["SPLIT"] or configuration.constants["RETURN_LSE"])
    numbers = (
        "window", "offset", "query_stride_token", "query_stride_head", "num_tokens", "num_rows",
        "max_blocks", "num_kv_heads",
    )  # fmt: skip
    pages = "*fp8e4nv" if configuration.variant.endswith(CACHED_IN_8_BITS) else pointer
    return {
        **dict.fromkeys(("query", "sinks"), pointer),
        **dict.fromkeys(("key_cache", "value_cache"), pages),
        **dict.fromkeys(("block_tables", "seqused_k", "cu_seqlens_q"), "*i32"),
        **dict.fromkeys(("out", "lse"), "*fp32" if in_fp32 else pointer),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        **dict.fromkeys(numbers, "i32"),
    }


@functools.cache
def _cuobjdump() -> str:
    import triton

    return str(next(Path(triton.__file__).parent.rglob("cuobjdump")))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    text = done.stdout + done.stderr
    found: Any = [re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")]
    assert all(found), text
    return int(found[0][1]), int(found[1][1])


def _results_table(compiled: list[Compiled]) -> str:
    """The results in Markdown: a line for each tile, the worst of its variants in each cell."""
    archs = sorted({one.arch for one in compiled})
    head = ["kernel", "dtype", "heads", "tile", "warps", "stages"]
    lines = [head + [f"sm_{arch}" for arch in archs], ["---"] * (len(head) + len(archs))]
    tiles: dict[Any, dict[int, list[Compiled]]] = {}
    for one in compiled:
        c = one.configuration
        key = (c.kernel, c.operands, c.sizes, c.tile)
        tiles.setdefault(key, {}).setdefault(one.arch, []).append(one)
    for (kernel, operands, sizes, tile), found in tiles.items():
        heads = "/".join(map(str, dict.fromkeys(sizes)))
        cells = [_cell(found[arch]) if arch in found else "-" for arch in archs]
        lines.append(
            [kernel, operands, heads, str(tile), str(tile.num_warps),
             str(tile.num_stages), *cells]
        )  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(variants: list[Compiled]) -> str:
    registers = max(one.registers for one in variants)
    stack = max(one.stack for one in variants)
    shared = max(one.shared for one in variants)
    spilled = f", **{stack} B spilled**" if stack else ""
    return f"{registers}, {shared / 1024:.0f} KiB, {variants[0].instruction or '-'}{spilled}"


HEAD = """\
# Triton kernels

No kernel of hocket spills registers or exceeds the shared memory of sm_80 to sm_120, as Triton
{version} compiles them. No GPU has executed them yet: tests compare them with PyTorch in Triton's
interpreter. Written by `python -m hocket.runtime.triton.compile --write
docs/reference/kernels.md`, on a machine without a GPU; do not edit.

- `attend_kernel` and `merge_kernel`: paged attention of servers, where no FlashAttention supports
  the layer, and over context ranks. With a cache in 8 bits (`--kv-cache-dtype fp8`, from sm_89 on)
  keys and values are converted to the dtype of the query.
- `grouped_mm_kernel` and `grouped_weight_gradient_kernel`: matmuls of experts, forward and both
  gradients, where torch has no kernel for the dtype and GPU.
- `quantize_rows_kernel`: inputs of matmuls with weights in 8 bits (`hocket serve --quantization
  fp8`, from sm_89 on).

A tile: rows x keys of attention, rows x columns x depth of a grouped matmul. A cell: registers of a
thread, shared memory of a program (with the 1 KiB that the driver takes from sm_90 on), tensor-core
instruction; the largest of the plain kernel, the one with window, soft cap and attention sinks, and
the one over a part of each block with window and soft cap; or of weights stored [E, K, N] and
[E, N, K]. Limits of shared memory: {limits}.
A test compiles a rotating third (`HOCKET_TESTS=all`: all).

float32 multiplies by three TF32 matmuls (tf32x3), above head size 128 without tensor cores.
Head sizes in between use the next power of two: 80, 96 and 112 the tiles of 128.

"""


def _kernels_page(compiled: list[Compiled]) -> str:
    """The page docs/reference/kernels.md."""
    import triton

    limits = ", ".join(f"{b / 1024:.0f} KiB on sm_{a}" for a, b in SHARED_LIMIT.items())
    return HEAD.format(limits=limits, version=triton.__version__) + _results_table(compiled) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Compile all of them; 1 if one spills, does not fit or misses the tensor cores."""
    parser = argparse.ArgumentParser(prog="python -m hocket.runtime.triton.compile")
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT))
    parser.add_argument("--write", type=Path, help="write the page there")
    options = parser.parse_args(arguments)
    done = [
        compile_for(configuration, arch)
        for configuration in configurations()
        for arch in configuration.architectures
        if arch in (options.arch or SHARED_LIMIT)
    ]
    if options.write:
        options.write.write_text(_kernels_page(done))
    else:
        print(_results_table(done))
    faults = [(one, one.faults()) for one in done if one.faults()]
    for one, what in faults:
        c = one.configuration
        print(f"{c.kernel} {c.dtype} {c.sizes} {c.variant} sm_{one.arch}: {what}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
