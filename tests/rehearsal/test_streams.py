"""Streams of a training step on fake CUDA: a safe order, and no read of the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

JOBS: list[dict[str, Any]] = [
    {"layout": "dp2.tp2"},
    {"layout": "dp2.tp2:sequence_parallel=true"},
    {"layout": "dp4:zero=1,microbatches=2"},
    {"layout": "dp4:zero=2,microbatches=2"},
    {"layout": "dp4:zero=3,shard=2,microbatches=2"},
    {"layout": "dp2.tp4:zero=1"},
    {"layout": "dp2.tp2:zero=3,sequence_parallel=true,recompute=full", "dropout": 0.1},
    {"layout": "dp2:offload=activations", "seq_len": 512},
    {"layout": "pp2.tp2:microbatches=4"},
    {"layout": "dp2.pp2:zero=2,microbatches=4,schedule=zero-bubble"},
    {"layout": "tp2", "model": "tiny-mixtral"},
    {"layout": "cp2.pp2:microbatches=2", "context_parallel": "ring"},
    {"layout": "dp2", "packed": True},
    {"layout": "dp2", "counted": True},
]
ON_HOST: list[tuple[dict[str, Any], int]] = [
    ({"layout": "dp2:offload=optimizer"}, 1),  # the gradients that the host steps from
    ({"layout": "dp2:zero=3,offload=params"}, 4),  # and the norm there and back, and the flag
    ({"layout": "dp2.ep2", "model": "tiny-mixtral"}, 4),  # the rows of each of four layers
]
BROKEN: list[dict[str, Any]] = [
    {"layout": "dp2", "broken": "of collectives"},
    {"layout": "dp2:zero=1", "broken": "of collectives"},
    {"layout": "dp2:zero=3", "broken": "of collectives"},
    {"layout": "tp2:sequence_parallel=true", "broken": "of collectives"},
    {"layout": "cp2", "context_parallel": "ring", "broken": "of collectives"},
    {"layout": "dp2:offload=activations", "seq_len": 512, "broken": "for copies"},
    {"layout": "dp2:offload=activations", "seq_len": 512, "broken": "of copies"},
    {"layout": "dp2:zero=3,offload=params", "broken": "of copies"},
    {"layout": "dp2:offload=optimizer", "broken": "of the host"},
    {"layout": "dp2", "broken": "for events"},
]


def executed(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.stream_cases", json.dumps(jobs)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_streams_are_in_order_and_no_step_reads_the_device() -> None:
    for job, found in zip(JOBS, executed(JOBS), strict=True):
        assert found["conflicts"] == {}, job
        assert found["reads"] == {}, job


def test_what_the_host_steps_it_waits_for_a_few_times() -> None:
    found = executed([job for job, _ in ON_HOST])
    for (job, waits), row in zip(ON_HOST, found, strict=True):
        assert row["conflicts"] == {}, job
        assert sum(row["reads"].values()) == waits * row["steps"], (job, row["reads"])


def test_every_wait_that_is_left_out_is_found() -> None:
    for job, found in zip(BROKEN, executed(BROKEN), strict=True):
        assert found["conflicts"], job
