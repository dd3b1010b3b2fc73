"""Functions that are named in strings, `module:function`, exist: ranks, workers and checks are
started by them, and no linter reads them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"(?:hocket|tests|benchmarks)(?:\.\w+)+:\w+")
WRONG_ON_PURPOSE = {
    "tests.launch.cases:nowhere",
    "benchmarks.contenders.one_process:no_such",
    "benchmarks.no_such_module:build",
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def names(module: str) -> frozenset[str] | None:
    """What a module defines or imports at its top; None where there is no such module."""
    base = ROOT / ("src" if module.startswith("hocket") else "") / module.replace(".", "/")
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.exists()), None)
    if file is None:
        return None
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Strings of a file with their lines; `_HERE + "name"` and `f"{_HERE}:name"` of a constant of
    the file as one."""
    tree = ast.parse(file.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }

    def value(node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue):
            return value(node.value)
        if isinstance(node, ast.Constant):
            return str(node.value)
        return constants.get(node.id, "?") if isinstance(node, ast.Name) else "?"

    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield node.lineno, value(node.left) + value(node.right)
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(value, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_an_entry_that_a_string_names_exists(folder: str) -> None:
    known, unknown = 0, []
    for file in sources(folder):
        for line, text in texts(file):
            if not ENTRY.fullmatch(text) or text in WRONG_ON_PURPOSE:
                continue
            module, _, name = text.partition(":")
            defined = names(module)
            if defined is None or name not in defined:
                unknown.append(f"{file.relative_to(ROOT)}:{line}: {text}")
            known += 1
    assert not unknown
    assert known > 5
