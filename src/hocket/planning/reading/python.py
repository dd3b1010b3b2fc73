"""Python: the literal assignments of a configuration in Python, read from its syntax tree.

The file is parsed and never imported or executed. A value that is no literal (a call, a name) is
kept as its source text, for a person to see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from hocket.spec.errors import OptionError


def assignments(text: str) -> dict[str, Any]:
    """Dotted names to values: `c.training.seq_len = 4096`, and `TrainingConfig(seq_len=4096)` as
    the keyword `training=` of another call. Of a name that is set twice the last one counts.

    Raises:
        OptionError: text that is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OptionError(f"the file is not Python: {str(error)[:200]}") from None
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = _name(node.targets[0])
            if name and "." in name:
                _into(found, name.partition(".")[2], node.value)
        elif isinstance(node, ast.keyword) and node.arg in _SECTIONS:
            _into(found, node.arg, node.value)
    return found


_SECTIONS = ("parallelism", "training", "activation_checkpoint")


def _into(found: dict[str, Any], name: str, node: ast.expr) -> None:
    if isinstance(node, ast.Call) and name in _SECTIONS:
        kind = _name(node.func) or ""
        if name == "activation_checkpoint":
            modes = {
                "FullAC": "full",
                "SelectiveAC": "selective",
                "MemoryBudgetAC": "memory-budget",
            }
            mode = next((m for key, m in modes.items() if key in kind), None)
            found[f"{name}.mode"] = mode or ast.unparse(node)
        for keyword in node.keywords:
            if keyword.arg is not None:
                found[f"{name}.{keyword.arg}"] = _value(keyword.value)
        return
    found[name] = _value(node)


def _name(node: ast.expr) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr) -> Any:
    """A literal, or products and sums of whole numbers; else the source text."""
    number = _number(node, 0)
    if number is not None:
        return number
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return f"<{ast.unparse(node)[:60]}>"


def _number(node: ast.expr, depth: int) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**12:
        return node.value
    if isinstance(node, ast.BinOp) and depth < 8:
        left, right = _number(node.left, depth + 1), _number(node.right, depth + 1)
        if left is None or right is None or max(abs(left), abs(right)) > 10**12:
            return None
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
    return None


def edit_python(
    text: str, changes: dict[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> str:
    """The text with other values of dotted names; what it does not set is added before its last
    `return`. None leaves a name as it is.

    Args:
        defaults: None is a value as any other, and what the text sets and `changes` does not gets
            the value that it has here.
    """
    every = _places(ast.parse(text))
    written = {name: value for name, value in changes.items() if value is not None}
    if defaults is not None:
        back = {name: value for name, value in defaults.items() if name in every}
        named = {name: value for name, value in changes.items() if name in every}
        changes = written = back | written | named
    places = {name: node for name, node in every.items() if name in written}
    lines = text.split("\n")
    for name, node in sorted(places.items(), key=lambda item: -item[1].lineno):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # Columns of the syntax tree are bytes.
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = [f"{head}{changes[name]!r}{tail}"]
    added = [name for name in written if name not in places]
    ends = [i for i, line in enumerate(lines) if re.match(r"\s+return \w+\s*$", line)]
    if added and ends:
        indent, variable = re.match(r"(\s+)return (\w+)", lines[ends[-1]]).groups()  # type: ignore[union-attr]
        lines[ends[-1] : ends[-1]] = [
            f"{indent}{variable}.{name} = {changes[name]!r}" for name in added
        ]
    return "\n".join(lines)


def _places(tree: ast.AST) -> dict[str, ast.expr]:
    """Dotted names, as `assignments` has them, to the nodes of their values."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            name = _name(node.targets[0])
            if name and "." in name:
                found[name.partition(".")[2]] = node.value
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords if node.arg in _SECTIONS else ():
                if keyword.arg is not None:
                    found[f"{node.arg}.{keyword.arg}"] = keyword.value
    return found
