"""What is emitted, given to the tools' own argument checks, where those are installed.

`HOCKET_TOOLS` names folders that hold them, one or more for each tool, as in

    HOCKET_TOOLS=megatron=/src/Megatron-LM,vllm=/tmp/vllm:/tmp/more pytest tests/planning
"""

from __future__ import annotations

import os

import pytest

from tests.planning.emitted import Unavailable, cases, verdicts
from tests.planning.tool_parsers import PARSERS

FOLDERS = dict(
    pair.split("=", 1) for pair in os.environ.get("HOCKET_TOOLS", "").split(",") if "=" in pair
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PARSERS)
def test_the_tool_itself_accepts_what_is_emitted(name: str) -> None:
    if name not in FOLDERS:
        pytest.skip(f"no folder of {name}: HOCKET_TOOLS={name}=DIR")
    texts = cases(name)
    try:
        answers = verdicts(name, FOLDERS[name], texts)
    except Unavailable as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    wrong = [f"{c['text']}\n{v}" for c, v in zip(texts, answers, strict=True) if v]
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[0]}"
