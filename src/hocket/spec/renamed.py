"""Renamed names: each name of the previous release that is still accepted, and its successor.

One table for each place where users write names. A name that a user writes is accepted with a
`RenamedWarning`; a name in a file of the previous release is accepted in silence.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from hocket.spec.errors import OptionError
from hocket.spec.synonyms import meant

Value = TypeVar("Value")

OPTIONS = {
    "cut": "pipeline_split",
    "links": "emulate_links",
    "held_out": "eval_fraction",
    "clip": "max_grad_norm",
    "max_rows": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_waiting": "max_queue",
    "served_name": "served_model_name",
    "usable": "gpu_memory_utilization",
    "ways": "strategies",
    "precision": "dtype",
}
"""Flags, keys of `--config` and `run.json`, keywords, fields of a layout's text and pins."""

RANGE = {"mid": "median"}
FORECAST = {"lacks": "unsupported", "alike": "num_similar"}
PLAN = {"beyond": "unsupported_layouts"}
"""Attributes of what `hocket.plan` returns."""

SWITCHES = {
    "text": ("format", "text"),
    "png": ("format", "png"),
    "trace": ("format", "trace"),
}
"""Switches that are values of an option now."""

JSON_KEYS = {**RANGE, **FORECAST, **PLAN, "ways": "strategies", "way": "strategy"}
"""Keys of what `--json` prints, where the verb printed the old one."""

EXPORTS = {"Sampling": "SamplingParams"}
"""Public names of the package."""

COMPLETION = {"finish": "finish_reason"}
"""Attributes of `hocket.LLM`'s completions."""

PARALLEL = {"arrive": "unshard", "release": "reshard", "publish": "begin_unshard"}
"""Methods of a parallelized model, by FSDP2's words."""


VERBS = {"links": ("plan", "--links"), "ledger": ("report", "--history")}
"""Verbs of the command line that are a flag of another one now."""


class RenamedWarning(FutureWarning):
    """A name of the previous release was used."""


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is now called `new`."""
    warnings.warn(
        f"{old} is now {new}; the next release rejects the old name",
        RenamedWarning,
        stacklevel=stacklevel,
    )


def present_verb(arguments: Sequence[str]) -> list[str]:
    """The words of a command with the present name of its verb, with a warning for an old one."""
    if not arguments or arguments[0] not in VERBS:
        return list(arguments)
    new = VERBS[arguments[0]]
    warn(f"hocket {arguments[0]}", " ".join(("hocket", *new)))
    return [*new, *arguments[1:]]


def present_options(
    values: Mapping[str, Value], known: Collection[str], *, spelled: Callable[[str], str] = str
) -> dict[str, Value]:
    """Options by their present names, with a warning for each old one; synonyms without.

    Args:
        values: options by name. known: names that are accepted where `values` come from.
        spelled: a name as the user writes it, for the warning.

    Raises:
        OptionError: an option under both of its names.
    """
    found: dict[str, Value] = {}
    for name, value in values.items():
        new = _successor(name, known)
        if new != name:
            warn(spelled(name), spelled(new), stacklevel=4)
        new = meant(new, known)
        if new != name and new in values:
            raise OptionError(
                f"{spelled(name)} and {spelled(new)} are the same option",
                hint=f"leave {spelled(name)} out",
            )
        found[new] = value
    return found


def stored_options(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Options of a file that a previous release wrote, by their present names."""
    return {_successor(name, known): value for name, value in values.items()}


def layout_text(text: str) -> str:
    """A layout's text of a file that a previous release wrote, with the present names."""
    return re.sub(r"(?<=[:,])cut=", "pipeline_split=", text)


def attribute(owner: str, name: str, table: Mapping[str, str]) -> str:
    """The present name of an attribute, with a warning. For `__getattr__`.

    Raises:
        AttributeError: the table does not have the name.
    """
    if name not in table:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")
    warn(f"{owner}.{name}", f"{owner}.{table[name]}", stacklevel=4)
    return table[name]


def with_old_keys(value: Any) -> Any:
    """Plain data to print, each renamed key also under its old name.

    At the top level `renamed_keys` lists those that occur, old to new: the warning of a reader that
    sees only JSON.
    """
    used: dict[str, str] = {}
    found = _doubled(value, used)
    if used and isinstance(found, dict):
        found["renamed_keys"] = dict(sorted(used.items()))
    return found


def _doubled(value: Any, used: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        found = {key: _doubled(item, used) for key, item in value.items()}
        for old, new in JSON_KEYS.items():
            if new in found and old not in found:
                found[old] = found[new]
                used[old] = new
        return found
    if isinstance(value, list | tuple):
        return [_doubled(item, used) for item in value]
    return value


def _successor(name: str, known: Collection[str]) -> str:
    new = OPTIONS.get(name, name)
    return new if name not in known and new in known else name
