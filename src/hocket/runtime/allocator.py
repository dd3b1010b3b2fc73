"""Heap: memory that one step frees is kept for the next one.

A training step allocates and frees the same activations again and again. glibc hands large freed
blocks back to the kernel, which then has to find and clear every page again: 2,000 page faults a
step of a 4M-parameter model on the CPU, 10,000 when weight gradients are deferred, which is 5 to
10% of the step. CUDA tensors are not touched: PyTorch keeps those itself.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks of up to 256 MiB, up to 1 GiB in all.

    For this process and once is enough. Returns whether the C library can do it (glibc can).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    done = [mallopt(_TRIM_THRESHOLD, 1 << 30), mallopt(_TOP_PAD, 64 << 20)]
    # Some versions of glibc take no threshold above 32 MB.
    done.append(mallopt(_MMAP_THRESHOLD, 256 << 20) or mallopt(_MMAP_THRESHOLD, 32 << 20))
    return all(done)
