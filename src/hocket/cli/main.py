"""The door: finds the verb, hands it the rest of the command line, and says what went wrong.

`hocket --help` and an unknown verb are answered from the table below, without loading a parser.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hocket.cli import installed
from hocket.spec import downloads
from hocket.spec.errors import HocketError, OptionError, unknown

VERBS = {
    "demo": "train a small Llama on this machine's own text, on eight ranks, end to end",
    "train": "train a model with data, tensor and pipeline parallelism",
    "check": "prove that a layout computes what one process computes",
    "compare": "run one model under every parallel strategy, side by side",
    "tour": "walk through the kinds of parallelism, each claim tested on this machine",
    "generate": "continue a text with a trained model",
    "serve": "serve a model over an OpenAI-compatible API",
    "export": "write a run's model as an ordinary Hugging Face directory",
    "rehearse": "execute a job on fake GPUs: whether it completes, and fits",
    "plan": "find the best layout of a model on a cluster, without a GPU",
    "validate": "predict the runs of a table of published measurements, and print the errors",
    "report": "show a run as one page: predicted above measured, and where they differ",
    "ledger": "show the prediction errors of all runs, by axis and machine",
    "doctor": "check this machine's environment, or write its GPU report card",
    "probe": "find this machine's devices, measure them and the links between them",
    "links": "estimate the communication of each axis on the links it crosses, and on others",
    "schedule": "print a pipeline schedule: rank by time",
    "template": "print a job file for Slurm, Kubernetes, Docker or SkyPilot, for a layout",
    "models": "list the models that come with hocket",
}
"""Each verb is a module of this room with a function `main(arguments) -> exit code`."""


def usage() -> str:
    """What `hocket --help` prints."""
    width = max(len(verb) for verb in VERBS)
    verbs = "\n".join(f"  {verb:<{width}}  {what}" for verb, what in VERBS.items())
    return (
        "usage: hocket VERB [OPTIONS]\n\n"
        "Train and serve any Hugging Face causal language model across many devices, from one "
        "layout.\n\n"
        f"{verbs}\n\n"
        "hocket VERB --help lists a verb's options; hocket --version prints the version.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0, 1 (a rank died, a check failed) or 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with downloads.shown(_download), warnings.catch_warnings():
            _show_renamed()
            code = _verb(arguments)
        sys.stdout.flush()
        return code
    except HocketError as error:
        print(f"hocket: {_printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone, as `| head` does: nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _THE_FILE_SYSTEMS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"hocket: {_printable(where)}{error.strerror}", file=sys.stderr)
        return HocketError.exit_code


def _show_renamed() -> None:
    """Print the warning of an old name as a line of hocket's own; others as Python does."""
    show = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if category.__name__ == "RenamedWarning":
            print(f"hocket: warning: {message}", file=sys.stderr, flush=True)
        else:
            show(message, category, *where, **options)

    warnings.showwarning = shown


def _download(download: downloads.Download) -> None:
    """Show a download; what does that is loaded with the first one."""
    from hocket.cli.progress import download_lines

    download_lines()(download)


_THE_FILE_SYSTEMS = frozenset(
    {
        errno.EACCES, errno.EDQUOT, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT,
        errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
"""What a path or a disk can refuse wherever it is touched; the user can mend each of them."""


def _printable(text: str) -> str:
    """The text with control characters written out: a file's name must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _verb(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from hocket import __version__

        print(f"hocket {__version__}")
        return 0
    if verb not in VERBS:
        message, hint = unknown("verb", verb, VERBS)
        raise OptionError(message, hint=hint)
    installed.require(verb, rest)
    module = importlib.import_module(f"hocket.cli.{verb}")
    from hocket.cli import spelling

    return int(module.main(spelling.current(verb, rest, spelling.flags_of(module))))
