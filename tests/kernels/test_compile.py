"""Every Triton kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import hocket.runtime.triton as package  # noqa: E402
from hocket.runtime.triton import compile as compiling  # noqa: E402
from hocket.runtime.triton import grouped_gemm  # noqa: E402
from hocket.runtime.triton.compile import (  # noqa: E402
    SHARED_LIMIT,
    Compiled,
    KernelSpecialization,
    compile_for,
    configurations,
)
from hocket.runtime.triton.grouped_gemm import tiles_of  # noqa: E402
from hocket.runtime.triton.paged_attention import AttentionTile  # noqa: E402
from tests.rotation import part  # noqa: E402

pytestmark = pytest.mark.torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "kernels.md"
ALL = configurations()


def _name(configuration: KernelSpecialization) -> str:
    c = configuration
    sizes = "-".join(map(str, c.sizes))
    return f"{c.kernel}-{str(c.dtype)[6:]}-{sizes}-{c.tile.rows}-{c.variant.split(',')[0]}"


@pytest.mark.parametrize("configuration", part(ALL, 8), ids=_name)
def test_compiles_without_spills_within_shared_memory_with_tensor_cores(
    configuration: KernelSpecialization,
) -> None:
    for arch in configuration.architectures:
        compiled = compile_for(configuration, arch)
        assert not compiled.faults(), (arch, compiled)
        if configuration.matmul and configuration.tile.rows >= 64:
            assert compiled.instruction == {90: "wgmma", 100: "tcgen05"}.get(arch, "mma")


def test_every_kernel_is_in_the_table() -> None:
    from triton.runtime import JITFunction

    files = sorted(Path(package.__path__[0]).glob("*_kernels.py"))
    assert [file.stem for file in files] == [
        "grouped_gemm_kernels", "paged_attention_kernels", "quantize_rows_kernels",
    ]  # fmt: skip
    kernels: set[tuple[str, str]] = set()
    for file in files:
        module = importlib.import_module(f"hocket.runtime.triton.{file.stem}")
        kernels |= {
            (file.stem, name)
            for name, value in vars(module).items()
            if isinstance(value, JITFunction) and not name.startswith("_")
        }
    assert {(c.module, c.kernel) for c in ALL} == kernels
    assert {name for _, name in kernels} == {
        "attend_kernel", "merge_kernel", "grouped_mm_kernel", "grouped_weight_gradient_kernel",
        "quantize_rows_kernel",
    }  # fmt: skip


def test_every_tile_is_in_the_table() -> None:
    """Whatever a batch, the tile is one of those that were compiled."""
    from hocket.runtime.triton.paged_attention import attention_tile, padded

    compiled = {
        (c.dtype.itemsize, max(map(padded, c.sizes)), c.tile)
        for c in ALL
        if c.kernel == "attend_kernel"
    }
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64, 80, 96, 112, 128, 160, 192, 256):
            for rows in range(1, 300):
                tile = attention_tile(dtype, size, size, rows)
                assert (dtype.itemsize, padded(size), tile) in compiled
    grouped = {(c.dtype, c.tile) for c in ALL if c.kernel == "grouped_mm_kernel"}
    kinds = (*grouped_gemm.DTYPES, grouped_gemm.E4M3)
    assert grouped == {(dtype, t) for dtype in kinds for t in tiles_of(dtype)}
    for c in ALL:
        if c.kernel == "grouped_weight_gradient_kernel":
            assert c.tile == tiles_of(c.dtype)[-1]


def test_the_page_lists_every_tile_without_a_spill() -> None:
    text = PAGE.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and "_kernel" in line]
    assert len(lines) == len({(c.kernel, c.operands, c.sizes, c.tile) for c in ALL})
    for c in ALL:
        assert f"| {c.kernel} | {c.operands} |" in text
        assert f"{c.tile} | {c.tile.num_warps} | {c.tile.num_stages}" in text
    assert "spilled**" not in text


def test_a_tile_too_large_is_a_fault() -> None:
    """The proof that the tests above can fail."""
    given = next(c for c in ALL if c.dtype == torch.float32 and c.sizes == (256, 256))
    huge = dataclasses.replace(
        given,
        tile=AttentionTile(64, 32, 4, 4),
        constants={**given.constants, "BLOCK_M": 64, "BLOCK_N": 32},
    )
    faults = compile_for(huge, 120).faults()
    assert any("stack" in fault for fault in faults)
    assert any("shared memory" in fault for fault in faults)
    plain = Compiled(dataclasses.replace(given, matmul=True), 90, 100, 0, 1000, "")
    assert plain.faults() == ["no tensor-core instruction"]


def test_the_command_fails_where_a_kernel_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merge = next(c for c in ALL if c.kernel == "merge_kernel")
    monkeypatch.setattr(compiling, "configurations", lambda: (merge,))
    assert compiling.main(["--arch", "90"]) == 0
    assert "merge_kernel" in capsys.readouterr().out
    monkeypatch.setitem(SHARED_LIMIT, 90, 0)
    wrong = dataclasses.replace(merge, matmul=True)
    monkeypatch.setattr(compiling, "configurations", lambda: (wrong,))
    assert compiling.main(["--arch", "90"]) == 1
    assert "no tensor-core" in capsys.readouterr().err
