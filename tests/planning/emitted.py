"""Emitted: texts of `hocket plan --emit`, given to the argument checks of the tools themselves.

    python -m tests.planning.emitted megatron=/src/Megatron-LM automodel=DIR vllm=DIR:DIR ...

A tool's folders hold its package (`pip install --no-deps --target DIR ...`). Prints a row for each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from hocket.planning.layouts import layout_at
from hocket.planning.plan import plan_one
from hocket.planning.service import emit as service
from hocket.planning.tools.emit import TOOLS, emit, tool_reasons
from hocket.planning.tools.limits import division
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.recompute import CHEAP
from tests.planning.test_service_emit import LLAMA
from tests.planning.test_tools import DENSE, EXPERTS, MODERN, facts
from tests.planning.tool_parsers import PARSERS

ROOT = Path(__file__).resolve().parents[2]


class Unavailable(Exception):
    """A tool that cannot be imported, and why."""


def cases(name: str, count: int = 15) -> list[dict[str, Any]]:
    """Texts for one tool and the facts that they were made from: `count` of each problem."""
    return _served(name, 3 * count) if name in service.SERVERS else _trained(name, count)


def _trained(name: str, count: int) -> list[dict[str, Any]]:
    limits, found = TOOLS[name].limits, []
    for problem in (DENSE, EXPERTS, MODERN):
        bounded = dataclasses.replace(problem, limits=(limits,), division=division([limits]))
        known = plan_one(problem, Layout(dp=32)).best
        rows = bounded.legal(32)
        for index in random.Random(5).sample(range(len(rows)), min(count, len(rows))):
            layout = layout_at(rows, index)
            if not limits.any_split and layout.pp > 1:
                layout = dataclasses.replace(layout, pipeline_split="even")
            if problem is EXPERTS and CHEAP in limits.recompute and index % 2:
                layout = dataclasses.replace(layout, recompute="norm+activation")
            size = 64 // layout.dp // (layout.microbatches or 1)
            context = limits.context[-1] if layout.cp > 1 else ""
            one = dataclasses.replace(known, layout=layout, microbatch=size, context=context)
            assert not tool_reasons(limits, bounded, one)
            text = emit(name, bounded, one)
            found.append({"text": text, "dp": layout.dp, **facts(problem, layout)})
    return found


def _served(name: str, count: int) -> list[dict[str, Any]]:
    draw, found = random.Random(7), []
    while len(found) < count:
        one = dataclasses.replace(
            LLAMA,
            tp=draw.choice([1, 2, 4, 8, 16]),
            pp=draw.choice([1, 1, 2, 3]),
            replicas=draw.choice([1, 2, 3, 8]),
            max_num_batched_tokens=draw.choice([512, 2048, 8192]),
            max_sequences=draw.choice([3, 256, 1024, 4000]),
            precision=draw.choice(["bf16", "fp16", "fp8"]),
            cache_precision=draw.choice(["bf16", "fp8"]),
            experts=draw.choice([0, 128]),
        )
        one = dataclasses.replace(one, ep=draw.choice([1, 2, 8]) if one.experts else 1)
        try:
            text = service.server_command(name, one)
        except OptionError:
            continue
        facts = {name: getattr(one, name) for name in ("tp", "pp", "heads", "layers", "experts")}
        found.append({"text": text, **facts})
    return found


def verdicts(name: str, folders: str, texts: list[dict[str, Any]]) -> list[str]:
    """What the tool answers to each text: empty, or its error.

    Raises:
        Unavailable: it cannot be imported from these folders.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.tool_parsers", name],
        input=json.dumps(texts), capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folders}{os.pathsep}{ROOT / 'src'}"},
    )  # fmt: skip
    if done.returncode == 3:
        raise Unavailable(done.stderr.strip()[-200:])
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(texts)
    return answers


def main() -> int:
    """Returns 0 where every text was accepted."""
    wrong = 0
    print("| tool | texts | accepted |\n|---|---|---|")
    for pair in sys.argv[1:]:
        name, _, folders = pair.partition("=")
        if name not in PARSERS:
            sys.exit(f"unknown tool {name!r}; known: {', '.join(PARSERS)}")
        texts = cases(name)
        try:
            answers = verdicts(name, folders, texts)
        except Unavailable as error:
            print(f"| {name} | {len(texts)} | cannot be imported: {error} |")
            wrong += 1
            continue
        rejected = [(c, a) for c, a in zip(texts, answers, strict=True) if a]
        wrong += len(rejected)
        print(f"| {name} | {len(texts)} | {len(texts) - len(rejected)} |", flush=True)
        for case, answer in rejected[:5]:
            print(f"{case['text']}\n{answer}", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
