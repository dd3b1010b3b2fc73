"""Structured answers of a model on two ranks, with a cache so small that requests are preempted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hocket.serving.request import SamplingParams
from tests.serving.test_http_ranks import weighted

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
STRUCTURES: list[dict[str, Any]] = [
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "regex", "pattern": r"[a-f]{3,9}-\d\d"},
]


def test_structured_answers_of_two_ranks(ranks: Any, tmp_path: Path) -> None:
    from hocket import LLM

    samplings = [
        SamplingParams(
            max_new_tokens=160,
            temperature=1.0,
            top_p=0.9,
            seed=i,
            structure=None if i % 3 == 2 else json.dumps(STRUCTURES[i % 3]),
            presence_penalty=i % 2 * 0.5,
        )
        for i in range(9)
    ]
    prompts = [f"prompt number {i}" for i in range(9)]
    found = {}
    for blocks in (400, 30):
        options = {"num_blocks": blocks, "block_size": 8, "max_model_len": 200, "max_num_seqs": 8}
        with LLM(weighted(tmp_path), "tp2", launcher=ranks.launcher, **options) as llm:
            found[blocks] = llm.generate(prompts, samplings)
    for roomy, cramped in zip(found[400], found[30], strict=True):
        assert (cramped.tokens, cramped.finish_reason) == (roomy.tokens, roomy.finish_reason)
    structured = [one for i, one in enumerate(found[400]) if i % 3 == 0]
    assert all(one.finish_reason == "stop" for one in structured)
    for one in structured:
        given = json.loads(one.text)
        assert set(given) == {"kind", "count"}
        assert given["kind"] in ("one", "two")
        assert given["count"] <= 99
    for i in (1, 4, 7):
        assert re.fullmatch(STRUCTURES[1]["pattern"], found[400][i].text)
