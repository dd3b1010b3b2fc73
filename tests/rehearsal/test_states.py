"""Recurrent layers over context ranks, rehearsed on GPUs: a step completes under both of NCCL's
rules for communicators, communicates what theory says, and reads nothing on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.simulation.nccl import RULES
from tests.families import HYBRIDS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("bamba", "cp2"),
        ("bamba", "cp4:recompute=full"),
        ("qwen3_5_text", "cp2:recompute=full"),
        ("qwen3_5_text", "cp4"),
        ("lfm2", "cp2"),
    ],
)
def test_a_step_completes_and_communicates_as_in_theory(
    workers: RehearsalWorkers, tmp_path: Path, family: str, layout: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRIDS[family]))
    asked = request(
        {
            "model": str(tmp_path), "layout": layout, "seq_len": 64, "dtype": "bf16",
            "device": "cuda", "context_parallel": "ring",
        }
    )  # fmt: skip
    found = rehearse_job(prepare_rehearsal(asked, rows=1), ranks="all", workers=workers)
    for rule in RULES:
        assert getattr(found.report, rule)["ends"] is True
    assert all(row["equal"] for row in found.report.collectives), found.report.collectives
    assert found.report.host_reads == []
