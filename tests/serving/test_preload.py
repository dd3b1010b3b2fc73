"""Ranks of a warm server import nothing of hocket's: whatever they start with was there before."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys

import pytest

from hocket.jobs import train
from hocket.ranks import serving

pytestmark = pytest.mark.train


def imported_within(module: object) -> set[str]:
    """Modules that functions of a module import, without those for annotations alone."""
    functions = [
        node for node in ast.walk(ast.parse(inspect.getsource(module)))  # type: ignore[arg-type]
        if isinstance(node, ast.FunctionDef)
    ]  # fmt: skip
    return {
        node.module
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module
    }


def test_a_server_s_rank_finds_its_modules_imported() -> None:
    """Also the rules by which transformers renames stored weights, which take longest."""
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "from transformers import conversion_mapping as rules\n"
        "assert rules._checkpoint_conversion_mapping_cache\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    names = json.dumps([*serving.PRELOAD, "hocket.ranks.serving"])
    done = subprocess.run(
        [sys.executable, "-c", code, names], capture_output=True, text=True, check=True
    )
    late = imported_within(serving) - set(json.loads(done.stdout))
    # The parent's timeline of a recorded window, and a tokenizer where answers obey a structure.
    assert late <= {"hocket.spec.timeline", "hocket.training.tokenizer"}
    # A rank of training renames weights where it reads them and where it exports them.
    assert "hocket.models.conversion_rules" in {*train.PRELOAD} & {*serving.PRELOAD}
