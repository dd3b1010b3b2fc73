"""Split sequences that are packed, adapted, or rejected, beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.check import CheckReport


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("llama", "cp2", {"packing": "documents", "context_parallel": "ring"}),
        ("gemma3", "cp2", {"packing": "documents", "context_parallel": "ulysses"}),
        ("llama", "cp2", {"lora_rank": 4}),
    ],
)
def test_documents_and_adapters(
    ranks: Any, tmp_path: Path, family: str, layout: str, options: dict[str, Any]
) -> None:
    found = ranks.run(
        "tests.check.context_cases:trained", world_size=2, folder=str(tmp_path), family=family,
        layout=layout, options=options, timeout=200.0,
    )  # fmt: skip
    report = CheckReport.from_json(json.dumps(found[0]))
    assert report.ok, report


def test_what_cannot_be_split_is_named(ranks: Any) -> None:
    types = ["llama", "mamba", "bloom", "gpt_neo"]
    found = dict(
        zip(
            types,
            ranks.run("tests.check.context_cases:reasons", world_size=2, types=types)[0],
            strict=True,
        )
    )
    assert found["llama"] == ""
    assert "hands a state on along the sequence" in found["mamba"]
    assert "attention in code of its own" in found["bloom"]
    assert found["gpt_neo"]
