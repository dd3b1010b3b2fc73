"""Model configurations by name: Hugging Face configurations as data files, each with its source."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from importlib import resources
from typing import Any

from hocket.spec.errors import ModelError, unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogueModel:
    """One model of the catalogue.

    Attributes:
        name: what it is asked for by.
        note: one line for a person.
        source: where its figures were published.
        config: its Hugging Face configuration.
        quantized: in what its checkpoint on the Hub is quantised; empty where it is not.
    """

    name: str
    note: str
    source: str
    config: dict[str, Any]
    quantized: str = ""

    @property
    def hub_id(self) -> str | None:
        """Its name on the Hugging Face Hub, as its source has it; None where it is not there."""
        found = re.search(r"huggingface\.co/([\w.-]+/[\w.-]*\w)", self.source)
        return found[1] if found else None


@functools.cache
def _entries() -> dict[str, CatalogueModel]:
    folder = resources.files("hocket.catalogue") / "data" / "models"
    found = {}
    for file in folder.iterdir():
        if file.name.endswith(".json"):
            name = file.name.removesuffix(".json")
            found[name] = CatalogueModel(name=name, **json.loads(file.read_text()))
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith("tiny"), item[0])))


def model_names() -> tuple[str, ...]:
    """Every name: those for laptops first, then by name."""
    return tuple(_entries())


def entry(name: str) -> CatalogueModel:
    """One model.

    Raises:
        ModelError: the catalogue has no such name; the nearest one is suggested.
    """
    if name not in _entries():
        message, hint = unknown("model", name, model_names())
        raise ModelError(message, hint=hint)
    return _entries()[name]


def config(name: str) -> dict[str, Any]:
    """The Hugging Face configuration, a fresh copy. Raises ModelError as `entry`."""
    return json.loads(json.dumps(entry(name).config))


def model_note(name: str) -> str:
    """One line about the model, with the source of its figures. Raises ModelError as `entry`."""
    found = entry(name)
    return f"{found.note} ({found.source})"
