"""Figures of the house, by names and syntax trees: what the ceilings in budget.toml hold."""

from __future__ import annotations

import ast
import collections
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hocket"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax tree, made once for all tests of this folder."""
    return ast.parse(file.read_text())


@functools.cache
def definitions() -> tuple[tuple[str, Definition], ...]:
    """Every class and function at the top of a module, with the module's name below `hocket`."""
    return tuple(
        (".".join(file.relative_to(SOURCE).with_suffix("").parts), node)
        for file in sorted(SOURCE.rglob("*.py"))
        for node in parsed(file).body
        if isinstance(node, Definition)
    )


def repeated(kind: type | tuple[type, ...]) -> dict[str, list[str]]:
    """Public names of one kind that more than one module defines, with these modules."""
    modules: dict[str, set[str]] = collections.defaultdict(set)
    for module, node in definitions():
        if isinstance(node, kind) and not node.name.startswith("_") and node.name != "main":
            modules[node.name].add(module)
    return {name: sorted(which) for name, which in sorted(modules.items()) if len(which) > 1}


def classes() -> dict[str, list[str]]:
    """Public class names that more than one module defines."""
    return repeated(ast.ClassDef)


def functions() -> dict[str, list[str]]:
    """Public function names that more than one module defines; `main` does not count."""
    return repeated((ast.FunctionDef, ast.AsyncFunctionDef))


def lines() -> dict[str, int]:
    """Lines of Python by package."""
    packages = [folder for folder in sorted(SOURCE.iterdir()) if (folder / "__init__.py").is_file()]
    return {
        folder.name: sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))
        for folder in packages
    }


def where(name: str) -> list[str]:
    """Modules that define a function of this name at their top."""
    return [module for module, node in definitions() if node.name == name]
