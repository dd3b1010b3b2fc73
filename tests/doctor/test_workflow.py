"""The job definitions for GPU runners: they call targets of the Makefile and verbs that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hocket.cli.doctor import Doctor
from hocket.cli.flags import parse_flags

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())


def runs() -> list[str]:
    return [
        step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step
    ]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):[^=]", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {shlex.split(run)[1] for run in runs() if run.startswith("make ")}
    assert called == {"setup", "test-gpu"}
    assert called <= targets


def test_a_runner_without_its_gpus_fails() -> None:
    """Its tests would be skipped, and the job would pass; so would those in fp8 without torchao."""
    for gpus, job in enumerate(WORKFLOW["jobs"].values(), start=1):
        _, first, packages, *_ = [step["run"] for step in job["steps"] if "run" in step]
        assert f"assert torch.cuda.device_count() >= {gpus}," in first
        assert shlex.split(packages)[-1] == ".[gpu]"


def test_every_verb_parses() -> None:
    verbs = [shlex.split(run) for run in runs() if run.startswith(".venv/bin/hocket")]
    assert len(verbs) == len(WORKFLOW["jobs"]) == 2
    for words in verbs:
        assert words[1] == "doctor"
        assert parse_flags(Doctor, "doctor", words[2:], Doctor()).gpu


def test_runners_are_chosen_by_variables() -> None:
    for job in WORKFLOW["jobs"].values():
        name = re.search(r"vars\.(\w+)", job["if"])
        assert name is not None
        assert f"fromJSON(vars.{name[1]}" in job["runs-on"]
        assert job["timeout-minutes"] <= 90
