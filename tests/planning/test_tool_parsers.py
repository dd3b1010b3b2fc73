"""What is emitted, given to the tools' own argument checks, where those are installed.

`HOCKET_TOOLS` names folders that hold them, one for each tool, as in

    HOCKET_TOOLS=megatron=/src/Megatron-LM,accelerate=/tmp/accelerate pytest tests/planning
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.planning.layouts import layout_at
from hocket.planning.plan import plan_one
from hocket.planning.tools.emit import TOOLS, emit, reasons
from hocket.planning.tools.limits import division
from hocket.spec.layout import Layout
from tests.planning.test_tools import DENSE, EXPERTS, MODERN, facts
from tests.planning.tool_parsers import PARSERS

FOLDERS = dict(
    pair.split("=", 1) for pair in os.environ.get("HOCKET_TOOLS", "").split(",") if "=" in pair
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PARSERS)
def test_the_tool_itself_accepts_what_is_emitted(name: str) -> None:
    if name not in FOLDERS:
        pytest.skip(f"no folder of {name}: HOCKET_TOOLS={name}=DIR")
    limits = TOOLS[name].limits
    cases = []
    for problem in (DENSE, EXPERTS, MODERN):
        bounded = dataclasses.replace(problem, limits=(limits,), division=division([limits]))
        known = plan_one(problem, Layout(dp=32)).best
        rows = bounded.legal(32)
        for index in random.Random(5).sample(range(len(rows)), min(15, len(rows))):
            layout = layout_at(rows, index)
            if not limits.any_split and layout.pp > 1:
                layout = dataclasses.replace(layout, pipeline_split="even")
            size = 64 // layout.dp // (layout.microbatches or 1)
            context = limits.context[-1] if layout.cp > 1 else ""
            found = dataclasses.replace(known, layout=layout, microbatch=size, context=context)
            assert not reasons(limits, bounded, found)
            cases.append({"text": emit(name, bounded, found), **facts(problem, layout)})
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.tool_parsers", name],
        input=json.dumps(cases), capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": f"{FOLDERS[name]}{os.pathsep}{root / 'src'}"},
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(f"{name} cannot be imported: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert len(verdicts) == len(cases)
    wrong = [f"{c['text']}\n{v}" for c, v in zip(cases, verdicts, strict=True) if v]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[0]}"
