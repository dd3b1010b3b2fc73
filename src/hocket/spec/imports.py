"""Imports of packages that would do more than they are asked for."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def plain_bitsandbytes() -> Iterator[None]:
    """While bitsandbytes is imported, by peft too: where the package `kernels` is installed, the
    import would download and run a kernel of the Hub on some CPUs, and without it print a warning.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    absent = sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if absent is None:
            del sys.modules["kernels"]
