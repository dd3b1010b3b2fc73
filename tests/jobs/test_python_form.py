"""Errors of the public functions name keywords, and what they offer is Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.jobs.python_form import in_python
from hocket.spec.errors import HocketError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("--layout dp2:zero=1", "layout='dp2:zero=1'"),
        ("--steps 4, or more data", "steps=4, or more data"),
        ("--lr 1e-4 or --min-lr -1", "lr=1e-4 or min_lr=-1"),
        ("--resume to continue it", "resume=True to continue it"),
        ("--trust-remote-code", "trust_remote_code=True"),
        ("leave --emit out", "leave emit out"),
        ("--data FILE, a directory", "data=FILE, a directory"),
        ("--prompt 'a b'", "prompt='a b'"),
        (
            "hocket train tiny-llama --data 'a b' c --steps 3",
            "hocket.train('tiny-llama', data=['a b', 'c'], steps=3)",
        ),
        ("hocket plan m --serve --cluster H100", "hocket.plan('m', serve=True, cluster='H100')"),
        ("hocket doctor --gpu --only a", "hocket doctor --gpu --only a"),
        ("hocket check m\n  or --tp 2", "hocket.check('m')\n  or tp=2"),
    ],
)
def test_a_hint_in_python(hint: str, shown: str) -> None:
    assert in_python(hint) == shown


def test_a_message_names_the_keyword() -> None:
    message = "--memory-per-rank is 3; --layout sets it"
    assert in_python(message, values=False) == "memory_per_rank is 3; layout sets it"


def test_every_hint_of_the_sources_has_no_flag_left() -> None:
    """Every constant hint below the public functions, as they would raise it."""
    seen = 0
    for file in sorted((ROOT / "src/hocket").rglob("*.py")):
        if "cli" in file.parts or "doctor" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                for text in _texts(node.value):
                    if "--" not in text or re.match(r"`?(hocket|hf|pip|curl|srun|torchrun) ", text):
                        continue
                    seen += 1
                    left = in_python(text)
                    assert not re.search(r"(^| )--[a-z]", left), f"{file}: {text!r}: {left!r}"
    assert seen > 80


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(p.value if isinstance(p, ast.Constant) else "3" for p in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return []


CALLS: dict[str, Callable[[], Any]] = {
    "train: data": lambda: hocket.train("tiny-llama", data=["nowhere.txt"]),
    "train: heads": lambda: hocket.train("tiny-llama", data=["README.md"], layout="tp3"),
    "train: batch": lambda: hocket.train("tiny-llama", ["README.md"], layout="dp3", global_batch=8),
    "train: lr": lambda: hocket.train("tiny-llama", ["README.md"], lr=-1),
    "train: lora": lambda: hocket.train("llama-3-8b", ["README.md"], lora_rank=4),
    "plan: fit": lambda: hocket.plan("llama-3-70b", cluster="1xA100-40", global_batch=8),
    "plan: layout": lambda: hocket.plan("llama-3-8b", cluster="8xH100", global_batch=8,
        layout="tp16"),
    "plan: serve": lambda: hocket.plan("llama-3-70b", serve=True, cluster="1xA100-40",
        tpot_ms=0.001),
    "check: no layout": lambda: hocket.check("tiny-llama"),
    "plan: no model": lambda: hocket.plan(),
    "parallelize: no module": lambda: hocket.parallelize(1, "dp1"),
    "check: layout": lambda: hocket.check("tiny-llama", layout="pp9"),
    "generate: weights": lambda: hocket.generate("tiny-llama", "a"),
    "serve: weights": lambda: hocket.serve("tiny-llama"),
    "export: run": lambda: hocket.export("nowhere", to="x"),
    "LLM: weights": lambda: hocket.LLM("tiny-llama", layout="tp2"),
    "LLM: layout": lambda: hocket.LLM("tiny-llama", layout="auto"),
}  # fmt: skip


@pytest.mark.train
@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_a_public_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HocketError) as caught:
        CALLS[name]()
    assert not re.search(r"(^|[ (`])--[a-z]", str(caught.value)), str(caught.value)
