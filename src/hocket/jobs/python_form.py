"""Errors of the public functions: their fixes as keywords of Python instead of flags.

A flag and a keyword are the same word, so one rewriting at the boundary covers every message below.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import typing
from collections.abc import Iterator

from hocket.spec.errors import HocketError

FUNCTIONS = ("train", "plan", "check", "generate", "serve", "export")
"""Verbs that are functions as well."""
_SHELL = re.compile(r"\s*(hocket|hf|pip|curl|python|torchrun|srun|export) ")
"""A line that is a command of another kind, which stays one."""
_FLAG = re.compile(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
_WORDS = {
    "a", "and", "as", "at", "both", "but", "for", "from", "has", "have", "in", "instead", "is",
    "it", "leave", "names", "needs", "of", "on", "or", "out", "sets", "takes", "the", "to", "where",
    "which", "with", "without",
}  # fmt: skip
"""What follows a flag in a sentence, and is not its value."""


@contextlib.contextmanager
def errors_in_python(enabled: bool = True) -> Iterator[None]:
    """Within the block, or the function that it decorates, errors name keywords."""
    try:
        yield
    except HocketError as error:
        if enabled:
            error.message = in_python(error.message, values=False)
            error.hint = None if error.hint is None else in_python(error.hint)
            error.args = (error.message, *error.args[1:])
        raise


def in_python(text: str, *, values: bool = True) -> str:
    """A text with `--lr 1e-4` as `lr=1e-4`, and `hocket train MODEL --lr 1e-4` as a call.

    Args:
        values: the word after a flag is its value, as in a hint.
    """
    lines = []
    for line in text.split("\n"):
        call = _call(line) if values else None
        if call is None:
            call = line if values and _SHELL.match(line) else _keywords(line, values)
        lines.append(call)
    return "\n".join(lines)


def _call(line: str) -> str | None:
    """A command of a verb that is a function, as its call; None for any other line."""
    try:
        words = shlex.split(line.strip())
    except ValueError:
        return None
    if len(words) < 3 or words[0] != "hocket" or words[1] not in FUNCTIONS:
        return None
    given: list[str] = []
    named: dict[str, list[str]] = {}
    last = None
    for word in words[2:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = name.replace("-", "_")
            named[last] = [value] if equals else []
        elif last is None:
            given.append(_literal(word))
        else:
            named[last].append(word)
    for name, found in named.items():
        parts = [_literal(one) for one in found]
        listed = f"[{', '.join(parts)}]" if name == "data" or len(parts) > 1 else None
        given.append(f"{name}={listed or (parts[0] if parts else True)}")
    return f"hocket.{words[1]}({', '.join(given)})"


def _keywords(line: str, values: bool) -> str:
    found = []
    end = 0
    for flag in _FLAG.finditer(line):
        if flag.start() < end or line[: flag.start()].endswith(("-", "`hocket ", "/")):
            continue
        name = flag[1].replace("-", "_")
        value = re.match(r"[ =]('[^']*'|\"[^\"]*\"|[^\s,;)]+)", line[flag.end() :])
        found.append(line[end : flag.start()])
        end = flag.end()
        if value is not None and values and not _in_words(value[1]):
            word = value[1].strip("'\"")
            found.append(f"{name}={_literal(word)}")
            end += value.end()
        else:
            found.append(f"{name}=True" if values and name in _switches() else name)
    return "".join([*found, line[end:]])


def _in_words(word: str) -> bool:
    return word in _WORDS or word.startswith("--") or not re.search(r"\w", word)


def _literal(word: str) -> str:
    """A word of a command as Python has it; one in capitals stands for a value."""
    if re.fullmatch(r"[A-Z][A-Z_/.]*", word) or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", word):
        return word
    return repr(word)


def _switches() -> frozenset[str]:
    """Options that are on or off."""
    from hocket.spec.run import TrainOptions
    from hocket.spec.serving import ServeOptions

    kinds = (typing.get_type_hints(kind) for kind in (TrainOptions, ServeOptions))
    own = {name for hints in kinds for name, hint in hints.items() if hint is bool}
    return frozenset(own | {"sequence_parallel", "merge", "overwrite", "serve"})
