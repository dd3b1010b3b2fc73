"""Pages: what is read again and again lies in large pages of memory, where the system has them.

Of a weight that is read once a step, each 4 KB are another page, whose place the core has to look
up; rows of a tile of a product lie in as many pages as there are rows. In pages of 2 MB, products
of 1 to 32 rows of 302 MB of weights took 0.90 to 0.92 of the time on an Intel Xeon (a virtual
machine, where looking up takes twice the steps), torch's of 64 to 256 rows 0.99.

Linux gives them where they are asked for (`/sys/kernel/mm/transparent_hugepage/enabled`: madvise),
to everybody (always), or to nobody (never). Training does not ask: its activations come and go, and
its steps took 0.98 to 1.04 of the time with large pages for everything.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable

from torch import Tensor

LARGE = 2 << 20
"""Bytes of a large page."""
_HUGEPAGE, _COLLAPSE = 14, 25
"""Of <linux/mman.h>; the second since Linux 6.1. An older one moves them when it gets to it."""


def in_large_pages(tensors: Iterable[Tensor], *, written: bool = True) -> None:
    """Ask that what tensors on the CPU are stored in, all of it, lies in large pages from now on.

    It changes nothing else, and may be refused.

    Args:
        tensors: any; those on other devices are passed over.
        written: they have been, and are moved now. False: what is not written yet is in large
            pages once it is, and takes no memory before.
    """
    advise = _advise()
    if advise is None:
        return
    stored = {x.untyped_storage() for x in tensors if x.device.type == "cpu"}
    for begin, size in sorted({(one.data_ptr(), one.nbytes()) for one in stored}):
        # The pages of both ends are shared with a neighbour, mostly another weight.
        first = begin // LARGE * LARGE
        length = -(-(begin + size - first) // LARGE) * LARGE
        advise(first, length, _HUGEPAGE)
        if written:
            advise(first, length, _COLLAPSE)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """madvise(2); None where there is none that knows of large pages."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise
