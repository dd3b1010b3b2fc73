"""Files: what a disk refuses, told with the file that it refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within, a full disk is told with `path`: writing into an open file names none by itself.

    Raises:
        OSError: as within, with its `filename`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = os.fspath(path)
        raise
