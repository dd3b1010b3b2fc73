"""The table of GPU checks: executed on GPUs, and rehearsed without one.

Both parametrisations are generated from `hocket.doctor.table`, as the report card is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hocket.doctor.check import CPU, FAKE, GPU, GpuCheck
from hocket.doctor.present import present
from hocket.doctor.runner import Worker
from hocket.doctor.table import CHECKS
from tests.rotation import part

ON_GPU = [check for check in CHECKS if check.gpus]
REHEARSED = [(check, form) for check in CHECKS for form in check.rehearsals]
HERE = present()


def needs(check: GpuCheck) -> str:
    """Why a check is skipped; empty where it is executed."""
    if len(HERE.gpus) >= check.gpus:
        return ""
    count = f"{check.gpus} GPU{'s' if check.gpus > 1 else ''}"
    return f"needs {count}: {HERE.why_none or f'{len(HERE.gpus)} here'}"


QUICK = [case for case in REHEARSED if not case[0].slow]
SLOW = [case for case in REHEARSED if case[0].slow]


def worker_of(form: str) -> Iterator[Worker]:
    with Worker(fake=form == FAKE) as worker:
        yield worker


@pytest.fixture(scope="module")
def real() -> Iterator[Worker]:
    yield from worker_of(CPU)


@pytest.fixture(scope="module")
def fake() -> Iterator[Worker]:
    yield from worker_of(FAKE)


def name(case: tuple[GpuCheck, str]) -> str:
    return f"{case[0].id}-{case[1]}"


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [pytest.param(c, marks=pytest.mark.skipif(bool(needs(c)), reason=needs(c))) for c in ON_GPU],
    ids=lambda check: check.id,
)
def test_on_a_gpu(check: GpuCheck, real: Worker) -> None:
    found = real.run(check.id, GPU, check.timeout)
    if found["cannot"]:
        pytest.skip(found["reason"])
    assert found["ok"], found["reason"]


def rehearsed(case: tuple[GpuCheck, str], real: Worker, fake: Worker) -> None:
    check, form = case
    found = (fake if form == FAKE else real).run(check.id, form, 100.0)
    if found["cannot"]:
        pytest.skip(found["reason"])
    assert found["ok"], found["reason"]


@pytest.mark.torch
@pytest.mark.parametrize("case", part(QUICK, 4), ids=name)
def test_a_rehearsal(case: tuple[GpuCheck, str], real: Worker, fake: Worker) -> None:
    rehearsed(case, real, fake)


@pytest.mark.ranks
@pytest.mark.parametrize("case", part(SLOW, 48), ids=name)
def test_a_rehearsal_of_several_ranks(
    case: tuple[GpuCheck, str], real: Worker, fake: Worker
) -> None:
    if os.environ.get("HOCKET_TESTS") != "all" and case[0].gpus > 4:
        pytest.skip("eight ranks are rehearsed by HOCKET_TESTS=all")
    rehearsed(case, real, fake)


@pytest.mark.torch
def test_a_check_that_dies_or_hangs_fails_alone(real: Worker) -> None:
    """What a worker's child does to itself: the same worker executes the next check."""
    assert real.run("env-limits", CPU, 30.0)["ok"]
    first = real._process
    late = real.run("kernel-adamw-fp32", CPU, 0.01)
    assert not late["ok"]
    assert "still running after 0 s, ended" in late["reason"]
    assert real.run("kernel-adamw-fp32", CPU, 60.0)["ok"]
    assert real._process is first


def test_sixty_checks_wait_for_a_gpu_and_give_a_reason() -> None:
    assert len(ON_GPU) >= 60
    for check in ON_GPU:
        assert check.rehearsals or check.unrehearsed, check.id
        assert needs(check) or HERE.gpus, check.id
