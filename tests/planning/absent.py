"""Absent packages: empty modules in the place of those that a tool's argument checks do not use.

GPU kernels, tokenizers and loggers of another tool are not installed where only its configuration
is parsed. What is imported from a module here is a class that accepts anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Anything(type):
    """A class of which every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _class(name: str) -> type:
    def decorated(cls: type, *given: Any, **named: Any) -> Any:
        # A decorator without arguments gives its function back.
        if len(given) == 1 and not named and isinstance(given[0], types.FunctionType):
            return given[0]
        return object.__new__(cls)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        return given[0] if given else None

    def schema(cls: type, source: Any, handler: Any) -> Any:
        return {"type": "any"}  # pydantic's: a field of this type takes any value

    members = {
        "__new__": decorated,
        "__init__": lambda self, *given, **named: None,
        "__call__": called,
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return _Anything(name, (), members)


class _Module(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _class(name)
        setattr(self, name, found)
        return found


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and every module in them, as empty ones."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        inside = [n for n in self.names if fullname == n or fullname.startswith(f"{n}.")]
        if not inside:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


def leave_out(names: Sequence[str]) -> None:
    """Import these packages as empty modules, those that are installed as well."""
    sys.meta_path.insert(0, Absent(names))
