"""Flex attention's kernels, generated for every kind of GPU without one: do they fit?

    python -m tests.rehearsal.flex_kernels [--arch 89] [--write PAGE]

Each is compiled to machine code, forward and backward; what is compared with the GPU's limit is the
shared memory of a program.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from hocket.rehearsal.device import load_fake_device
from hocket.spec.attention_kernel import SHARED_MEMORY, shared_memory_limit
from hocket.spec.rehearsal import RehearsedDevice

SIZES = (
    (16, 16), (32, 32), (40, 40), (64, 64), (80, 80), (96, 64), (96, 96), (128, 128), (160, 160),
    (192, 128), (192, 192), (224, 224), (256, 256),
)  # fmt: skip
DTYPES = ("bfloat16", "float32")
LENGTH = 300
"""Tokens: no multiple of a block."""
BEGIN, END = "<!-- flex kernels -->", "<!-- end of flex kernels -->"


@dataclasses.dataclass(frozen=True, slots=True)
class FlexCase:
    """One kernel: an architecture (90 for sm_90), head sizes of keys and values, a dtype."""

    arch: int
    sizes: tuple[int, int]
    dtype: str

    def __str__(self) -> str:
        return f"sm_{self.arch}-{self.sizes[0]}-{self.sizes[1]}-{self.dtype}"

    @property
    def capability(self) -> tuple[int, int]:
        return self.arch // 10, self.arch % 10


ARCHITECTURES = tuple(arch for arch in SHARED_MEMORY if arch != 86)  # as 89
CASES = [
    FlexCase(arch, sizes, dtype) for arch in ARCHITECTURES for sizes in SIZES for dtype in DTYPES
]


def generated(arch: int, sizes: list[int], dtype: str) -> dict[str, Any]:
    """Bytes of shared memory of the forward and the backward kernel, with a soft cap, sinks, a
    window and grouped heads; and what cannot run."""
    import torch

    from hocket.models.flex_attention import block_mask, compiled_flex_attend, lowest_keys
    from hocket.rehearsal.execution import executing

    case = FlexCase(arch, (sizes[0], sizes[1]), dtype)
    gpu = RehearsedDevice(name=f"sm_{arch}", capability=case.capability, memory=80 << 30, sms=100)
    compiled_flex_attend.cache_clear()
    with executing(gpu, 0, 1, compiles=True) as execution, execution.fake():

        def heads(number: int, size: int) -> torch.Tensor:
            held = torch.empty(
                2, LENGTH, number, size, dtype=getattr(torch, dtype), device="cuda:0"
            )
            return held.requires_grad_().transpose(1, 2)

        begins = torch.empty(4, dtype=torch.int32, device="cuda:0")
        mask = block_mask(lowest_keys(begins, window=LENGTH // 2, rows=2, length=LENGTH))
        sinks = torch.empty(4, device="cuda:0", requires_grad=True)
        out = compiled_flex_attend()(
            heads(4, sizes[0]), heads(2, sizes[0]), heads(2, sizes[1]), mask, None, 30.0, sinks
        )
        out.sum().backward()
        assert execution.generated is not None
        kernels = execution.generated
    found = {"faults": kernels.faults()}
    for candidates in kernels.kernels.values():
        name = candidates[0].name
        if "triton_tem" in name:
            found["backward" if "backward" in name else "forward"] = candidates[0].shared
    return found


def table(rows: dict[FlexCase, dict[str, Any]], architectures: list[int]) -> str:
    """Kibibytes, forward and backward, by head sizes and architecture."""
    limits = ", ".join(
        f"{shared_memory_limit((a // 10, a % 10)) >> 10} on sm_{a}" for a in architectures
    )
    lines = [
        f"KiB of shared memory of a program, forward / backward (limits: {limits}):", "",
        "| head sizes | dtype | " + " | ".join(f"sm_{arch}" for arch in architectures) + " |",
        "| --- | --- |" + " ---: |" * len(architectures),
    ]  # fmt: skip
    for sizes in SIZES:
        for dtype in DTYPES:
            cells = [rows[FlexCase(arch, sizes, dtype)] for arch in architectures]
            text = [f"{c['forward'] / 1024:.0f} / {c['backward'] / 1024:.0f}" for c in cells]
            name = f"{sizes[0]}" if sizes[0] == sizes[1] else f"{sizes[0]}, {sizes[1]}"
            lines.append(f"| {name} | {dtype} | " + " | ".join(text) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Compile all cases. Returns 1 if one does not fit."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal.flex_kernels")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    options = parser.parse_args(arguments)
    load_fake_device()
    rows, bad = {}, 0
    wanted = options.arch or list(ARCHITECTURES)
    for case in CASES:
        if case.arch in wanted:
            rows[case] = generated(case.arch, list(case.sizes), case.dtype)
            bad += bool(rows[case]["faults"])
            print(case, rows[case], flush=True)
    print(f"{len(rows)} cases, {bad} with a kernel that cannot run")
    if options.write and not options.arch:
        page = options.write.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        text = table(rows, wanted)
        options.write.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
