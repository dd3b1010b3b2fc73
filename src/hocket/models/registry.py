"""What the installed transformers knows, read from its source files without importing it.

Importing transformers costs seconds and brings torch along; a launch must be refused in
milliseconds. Its tables of model types and the class defaults of its configurations are literals,
so they can be read as text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

from hocket.spec.errors import ModelError
from hocket.spec.install import install_line

_PAIR = re.compile(r'\(\s*"([^"]+)",\s*"([^"]+)",?\s*\)')


@dataclasses.dataclass(frozen=True)
class ModelDefaults:
    """Class defaults of one configuration class, and its aliases (canonical name to own name)."""

    values: dict[str, Any]
    aliases: dict[str, str]


@functools.cache
def package() -> Path:
    """The folder of the installed transformers.

    Raises:
        ModelError: it is not installed.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise ModelError("transformers is not installed", hint=install_line("train"))
    return Path(found.origin).parent


@functools.cache
def causal_classes() -> dict[str, str]:
    """Model type to the class of its causal language model, of every type that has one."""
    text = (package() / "models" / "auto" / "modeling_auto.py").read_text()
    start = text.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(")
    return dict(_PAIR.findall(text, start, text.index("\n)\n", start)))


@functools.cache
def config_classes() -> dict[str, str]:
    """Model type to the name of its configuration class, of every type."""
    text = (package() / "models" / "auto" / "auto_mappings.py").read_text()
    start = text.index("CONFIG_MAPPING_NAMES = OrderedDict(")
    return dict(_PAIR.findall(text, start, text.index("\n)\n", start)))


@functools.cache
def renamed_types() -> dict[str, str]:
    """Model types that transformers reads as another one, whose configuration class they share:
    `gpt-sw3` is `gpt2`."""
    text = (package() / "models" / "auto" / "configuration_auto.py").read_text()
    found = re.findall(r'"([^"]+)": "(\w+)"[^=]*\*\*CONFIG_MAPPING_NAMES', text)
    types = {name: kind for kind, name in reversed(config_classes().items())}
    return {old: types[name] for old, name in found if name in types}


@functools.cache
def defaults(model_type: str) -> ModelDefaults:
    """The class defaults of a model type's configuration; empty where they cannot be found."""
    name = config_classes().get(model_type)
    if name is None:
        return ModelDefaults({}, {})
    head = f"class {name}("
    own = model_type.replace("-", "_")
    named = [f"{part}/configuration_{part}.py" for part in (own, own.removesuffix("_text"))]
    folders = package() / "models"
    # Hundreds of families are listed only where a type's own file holds no such class.
    for file in itertools.chain(map(folders.joinpath, named), folders.glob("*/configuration_*.py")):
        if file.exists() and head in (text := file.read_text()):
            return _read(text, name)
    return ModelDefaults({}, {})


def _read(text: str, name: str) -> ModelDefaults:
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.ClassDef) and node.name == name):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                key, value = item.target.id, item.value
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                key, value = item.targets[0].id, item.value
            else:
                continue
            if value is None:
                continue
            try:
                literal = ast.literal_eval(value)
            except ValueError:  # a default that is computed: `interval(...)(default=0.02)`
                continue
            if key == "attribute_map":
                aliases = literal
            else:
                values[key] = literal
    return ModelDefaults(values, aliases)


def modeling_module(model_type: str) -> str | None:
    """The transformers module that holds a model type's code; None where there is none."""
    for name in (model_type, model_type.removesuffix("_text")):
        if name.isidentifier() and (package() / "models" / name / f"modeling_{name}.py").is_file():
            return f"transformers.models.{name}.modeling_{name}"
    return None
