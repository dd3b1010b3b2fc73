"""What is read again and again asks for large pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.hugepages import LARGE, in_large_pages  # noqa: E402

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="of Linux"),
]


def flags(address: int) -> set[str]:
    """Those of the mapping that holds an address, as the kernel tells them."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            found = begin <= address < end
        elif found and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:x}")


def resident() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not SETTING.exists(), reason="a kernel without large pages")
@pytest.mark.parametrize("written", [True, False])
def test_advice_reaches_all_that_a_tensor_is_stored_in(written: bool) -> None:
    stored = torch.arange(5 * LARGE // 4, dtype=torch.float32)
    part = stored[:100]
    in_large_pages([part, part.view(10, 10)], written=written)
    assert "hg" in flags(stored.data_ptr())
    assert "hg" in flags(stored[-1:].data_ptr())
    assert torch.equal(stored, torch.arange(len(stored), dtype=torch.float32))


def test_what_was_not_written_takes_no_memory() -> None:
    before = resident()
    stored = torch.empty(256 << 20, dtype=torch.uint8)
    in_large_pages([stored], written=False)
    assert resident() - before < 16 << 20
    assert not stored.zero_().any()


def test_small_ones_and_those_elsewhere_are_no_error() -> None:
    small = torch.ones(3)
    in_large_pages([small, torch.empty(0), torch.empty(4, device="meta")])
    in_large_pages([])
    assert small.eq(1).all()
