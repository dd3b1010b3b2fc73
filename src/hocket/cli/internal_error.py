"""An error of hocket's own: one line for the user, the traceback in a file."""

from __future__ import annotations

import os
import shlex
import tempfile
import traceback
from collections.abc import Sequence

INTERNAL = 70  # EX_SOFTWARE
"""Exit code of an error that is hocket's, not the user's."""


def report_internal_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print what failed and where its traceback is; with --json also as an `error` event. Returns
    the exit code."""
    from hocket import __version__
    from hocket.cli.main import print_error
    from hocket.spec.errors import HocketError

    last = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(str(error).split())[:200]
    found = HocketError(
        f"internal error at {os.path.basename(last.filename)}:{last.lineno}: "
        f"{type(error).__name__}{': ' * bool(what)}{what}",
        hint=_written(error, f"hocket {__version__}: hocket {shlex.join(arguments)}"),
    )
    return print_error(found, list(arguments), code=INTERNAL)


def _written(error: Exception, head: str) -> str:
    text = f"{head}\n{''.join(traceback.format_exception(error))}"
    try:
        file, path = tempfile.mkstemp(prefix="hocket-error-", suffix=".txt")
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError:
        return f"report this error of hocket with its traceback:\n{text}"
    return f"this is an error of hocket; report it with {path}"
