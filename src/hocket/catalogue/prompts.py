"""Prompt lengths of the data sets that published serving figures were measured on."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from importlib import resources


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLength:
    """Mean prompt of a data set.

    Attributes:
        name: of the data set. prompt: tokens.
        basis: `derived` from how the data set is made, or `fitted` to published throughput.
        note: one line for a person.
    """

    name: str
    prompt: float
    basis: str
    note: str


@functools.cache
def _entries() -> tuple[tuple[str, str, PromptLength], ...]:
    file = resources.files("hocket.catalogue") / "data" / "prompts.toml"
    found = []
    for name, values in tomllib.loads(file.read_text()).items():
        length = PromptLength(
            name=name,
            prompt=float(values["prompt"]),
            basis=values["basis"],
            note=values["note"],
        )
        found.append((values["where"], values["model"], length))
    return tuple(found)


def prompt_length(where: str, model: str) -> PromptLength:
    """The prompts of the data set behind a figure.

    Args:
        where: the words of its source and of its way of measuring. model: its model's name.
    """
    return next(
        length
        for source, name, length in _entries()
        if re.search(source, where, re.I) and re.search(name, model, re.I)
    )
