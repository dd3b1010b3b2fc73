"""The entry point: finds the verb, hands it the rest of the command line, and prints errors.

`hocket --help` and an unknown verb are answered from the table below, without loading a parser.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hocket.cli import installed
from hocket.spec import downloads, renamed
from hocket.spec.errors import CUTOFF, ONE_OF_THEM, HocketError, OptionError, nearest

GROUPS = {
    "Run": {
        "train": "train a model with data, tensor and pipeline parallelism",
        "serve": "serve a model over an OpenAI-compatible API",
        "generate": "continue a text with a trained model",
        "export": "write a run's model as an ordinary Hugging Face directory",
        "template": "print a job file for Slurm, Kubernetes, Docker or SkyPilot, for a layout",
    },
    "Plan": {
        "plan": "find the best layout of a model on a cluster, without a GPU",
        "rehearse": "execute a job on fake GPUs: whether it completes, and fits",
        "schedule": "print a pipeline schedule: rank by time",
        "models": "list the models that come with hocket",
    },
    "Verify": {
        "check": "compare what a layout computes with what one process computes",
        "chaos": "inject faults into training jobs, and compare the end with an undisturbed run",
        "compare": "run one model under every parallel strategy, side by side",
        "validate": "predict the runs of a table of published measurements, and print the errors",
        "doctor": "check this machine's environment, or write its GPU report card",
    },
    "Inspect": {
        "report": "show a run as one page: predicted above measured, and where they differ",
        "probe": "find this machine's devices, measure them and the links between them",
        "config": "print every option of a command, resolved, as a --config file",
        "completion": "print a completion script for bash, zsh or fish",
    },
    "Learn": {
        "demo": "train a small Llama on this machine's own text, on two ranks, end to end",
        "tour": "walk through the kinds of parallelism, each claim tested on this machine",
    },
}
"""The verbs by what they are for."""

VERBS = {verb: what for verbs in GROUPS.values() for verb, what in verbs.items()}
"""Each verb is a module of this package with a function `main(arguments) -> exit code`."""

MEANT = {
    "gpus": "hocket models --gpus",
    "hardware": "hocket models --gpus",
    "env": "hocket doctor",
    "chat": "hocket generate MODEL --chat",
    "run": "hocket generate MODEL --chat",
    "download": "hf download ORG/NAME",
    "finetune": "hocket train MODEL --data DATA",
    "pretrain": "hocket train MODEL --data DATA",
    "launch": "hocket train MODEL --layout dp2",
    "bench": "hocket probe",
    "tune": "hocket train MODEL --layout auto",
}
"""Verbs of other tools, and the command here."""

EXIT_CODES = {
    0: "done",
    1: "a check failed, a rank died, or a second signal cut off requests of a server",
    2: "the command cannot be carried out as it is; the hint is what to change",
    70: "an error of hocket itself; the message names a file with its traceback (EX_SOFTWARE)",
    75: "a signal stopped training; the same command continues (EX_TEMPFAIL)",
    130: "interrupted with Ctrl-C",
    141: "the reader of stdout has gone, as with `| head`",
}


def usage() -> str:
    """What `hocket --help` prints."""
    width = max(len(verb) for verb in VERBS)
    groups = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {verb:<{width}}  {what}" for verb, what in verbs.items())
        for title, verbs in GROUPS.items()
    )
    return (
        "usage: hocket VERB [OPTIONS]\n\n"
        "Plan, train and serve Hugging Face causal language models across many devices, from one "
        "layout.\n\n"
        f"{groups}\n\n"
        "For every verb:\n"
        "  --config FILE   options from a TOML or YAML file, by flag name; flags override it\n"
        "  --set NAME=VALUE  one option, as in --set training.lr=1e-4\n"
        "  --quiet, -q     no progress and no notes: results, warnings and errors only\n\n"
        "hocket VERB --help shows a verb's most used options, hocket VERB --help all every one;\n"
        "hocket -V prints the version.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, one of `EXIT_CODES`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _code(arguments)
    except BrokenPipeError:
        # The reader of stdout has gone, as `| head` does: nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _code(arguments: list[str]) -> int:
    """Run one command, its errors printed."""
    try:
        with downloads.download_listener(_download), warnings.catch_warnings():
            _show_renamed()
            arguments = renamed.present_verb(arguments)
            code = _verb(arguments)
        sys.stdout.flush()
        return code
    except HocketError as error:
        return print_error(error, arguments)
    except KeyboardInterrupt:
        exec("")  # resets CPython's mark of an interrupted exec(), which would end it by SIGINT
        return print_error(HocketError("interrupted"), arguments, code=130)
    except OSError as error:
        if error.errno not in _THE_FILE_SYSTEMS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return print_error(HocketError(f"{where}{error.strerror}"), arguments)


def _show_renamed() -> None:
    """Print hocket's own warnings as lines, without a place in its code; others as Python does."""
    show = warnings.showwarning
    ours = os.path.dirname(os.path.dirname(__file__))

    def shown(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if category.__name__ == "RenamedWarning" or str(where[0]).startswith(ours):
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


def print_error(error: HocketError, arguments: list[str], code: int | None = None) -> int:
    """Print an error, its hint as a whole command where it is one of flags; with --json also as an
    object on stdout. Returns its exit code, or `code`."""
    code = error.exit_code if code is None else code
    hint = error.hint
    flags = (hint or "").startswith(("--", "leave --"))
    if hint is not None and flags and arguments and arguments[0] in VERBS:
        from hocket.cli import spelling

        hint = spelling.pasted(arguments, hint)
    near = re.fullmatch(r"did you mean (?:the catalogue's )?'?([^' ]+)'?\?", hint or "")
    if near is not None:
        hint = _with_near(arguments, error.message, near[1]) or hint
    elif hint == ONE_OF_THEM:
        hint = _help_of(arguments, error.message)
    text = str(type(error)(error.message, hint=hint))
    if "--json" in arguments:
        from hocket.cli.events import print_event

        found = {"message": error.message, "hint": hint, "exit_code": code}
        print_event({"event": "error", "error": found})
    print(f"hocket: {_printable(text)}", file=sys.stderr)
    return code


def _with_near(arguments: list[str], message: str, near: str) -> str | None:
    """The command with a name that the message calls unknown replaced by the nearest; None where
    the name is not an argument of its own."""
    named = {
        word
        for word in arguments[1:]
        if f"{word!r}" in message or f" {word}:" in message or message.startswith(f"{word} ")
    }
    if not named:  # a part of one argument, as of a layout
        parts = {name for name in re.findall(r"'([\w.-]+)'", message) if _among(arguments, name)}
        named = {name for name in parts if len(_among(arguments, name)) == 1}
    if len(named) != 1 or (wrong := named.pop()).startswith("-"):
        return None
    part = re.compile(rf"(?<![\w-]){re.escape(wrong)}(?![\w-])")
    return shlex.join(["hocket", *(part.sub(near, word) for word in arguments)])


def _among(arguments: list[str], name: str) -> list[int]:
    """The places of the arguments that a name is a part of."""
    part = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return [at for at, word in enumerate(arguments) if at and part.search(word)]


def _help_of(arguments: list[str], message: str) -> str:
    """The help of the flag whose value the message calls unknown, else that of the verb."""
    for name in re.findall(r"'([^']+)'", message):
        for at in _among(arguments, name):
            for flag in arguments[at], arguments[at - 1]:
                if flag.startswith("--"):
                    return f"hocket {arguments[0]} --help {flag[2:].partition('=')[0]}"
    return f"hocket {arguments[0]} --help"


def _verb(arguments: list[str]) -> int:
    match arguments:
        case []:
            print(usage(), end="", file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help"]:
            print(usage(), end="")
            return 0
        case ["-V" | "--version" | "version", *_]:
            from hocket import __version__

            print(f"hocket {__version__}")
            return 0
        case ["help", verb, *words]:
            arguments = [verb, "--help", *words[:1]]
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        near = nearest(verb, (*VERBS, "version", "help"), cutoff=CUTOFF)
        if verb.startswith("-") and rest and rest[0] in VERBS:  # options come after the verb
            near, rest = rest[0], [*rest[1:], verb]
        raise OptionError(
            f"unknown verb {verb!r}",
            hint=MEANT.get(verb, "hocket --help")
            if near is None or verb in MEANT
            else shlex.join(["hocket", near, *rest]),
        )
    topic = _help_topic(rest)
    if topic is None:
        installed.require_extra(verb)
    module = importlib.import_module(f"hocket.cli.{verb}")
    from hocket.cli import config, progress, spelling

    if topic is not None:
        from hocket.cli.help_page import help_text

        print(help_text(verb, module, topic), end="")
        return 0

    rest, quiet = _switch(rest, "--quiet", "-q")
    if getattr(module, "FLAGS_OF_OTHERS", False):
        return int(module.main(rest))
    known = spelling.flags_of(module)
    rest = config._expanded_settings(verb, spelling.current(verb, rest, known), known)
    rest = spelling.checked_arguments(verb, rest, known)
    with progress.silenced(quiet):
        return int(module.main(rest))


def _help_topic(arguments: Sequence[str]) -> str | None:
    """What follows --help, "" where nothing does; None where help is not asked for."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument.startswith("--help="):
            return argument.partition("=")[2]
        if argument in ("-h", "--help"):
            return "".join(arguments[index + 1 : index + 2])
    return None


def _switch(arguments: list[str], *names: str) -> tuple[list[str], bool]:
    """The arguments up to `--` without a switch, and whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument not in names]
    return kept + arguments[end:], len(kept) < end
