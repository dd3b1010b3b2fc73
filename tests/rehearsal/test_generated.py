"""Kernels that torch.compile generates for a GPU, compiled and run on fake tensors without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hocket.jobs.rehearsal_fit import require_fit
from hocket.jobs.rehearsal_text import rehearsal_report
from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.jobs.rehearse import Rehearsed, RehearsedJob, prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.spec.errors import OptionError
from tests.rehearsal.flex_kernels import CASES, FlexCase
from tests.rotation import part

pytest.importorskip("triton")
pytestmark = pytest.mark.ranks


def of(layout: str, *, compiled: bool = True, **options: Any) -> RehearsedJob:
    given = {"seq_len": 64, "dtype": "bf16", "device": "cuda", "compile": compiled, **options}
    return prepare_rehearsal(request({"model": "tiny-llama", "layout": layout, **given}), rows=2)


@pytest.fixture(scope="module")
def found(workers: RehearsalWorkers) -> Rehearsed:
    return rehearse_job(of("dp2.tp2"), workers=workers)


def test_layers_are_compiled_once_and_their_kernels_run(found: Rehearsed) -> None:
    generated = found.report.generated
    assert (generated["graphs"], generated["graph_breaks"], generated["faults"]) == (1, 0, [])
    # Four equal layers: each kernel at least once in each of them.
    assert generated["launches"] >= 4 * generated["kernels"] > 0
    assert generated["shared_bytes"] > 0
    assert "Generated for sm_90: " in rehearsal_report(found)


def test_collectives_of_graphs_are_those_of_theory(found: Rehearsed) -> None:
    rows = {(row["name"], row["axis"]): row for row in found.report.collectives}
    assert all(row["equal"] for row in rows.values())
    assert rows["all-reduce", "tp"]["count"] == 72  # 18 of each rank: 2 in a layer each way, loss
    assert found.verdicts["eager"].ok


def test_compiled_layers_keep_less_and_call_the_same_attention(
    found: Rehearsed, workers: RehearsalWorkers
) -> None:
    eager = rehearse_job(of("dp2.tp2", compiled=False), workers=workers)
    assert eager.report.generated == {}
    activations = [r.report.peak_bytes[0]["activations"] for r in (found, eager)]
    assert activations[0] < activations[1]
    for rehearsed in (found, eager):
        assert rehearsed.report.launches_per_step["attention"] == {"flash": 16}
    launches = [r.report.launches_per_step["kernels"][0] for r in (found, eager)]
    assert launches[0] < launches[1]


@pytest.mark.parametrize(
    "layout", ["dp1:recompute=full", "cp2", "pp2:microbatches=2", "dp2:zero=3"]
)
def test_every_layout_runs_compiled(layout: str, workers: RehearsalWorkers) -> None:
    report = rehearse_job(of(layout), workers=workers).report
    assert report.generated["launches"] > 0
    assert all(row["equal"] for row in report.collectives)


@pytest.mark.timeout(400)
def test_collectives_of_sequence_shards_run_in_chunks(inside: Callable[..., Any]) -> None:
    """Asynchronous tensor parallelism: torch found none of them, transposed as they were."""
    found = inside("in_chunks")
    assert found["ok"], found["reason"]
    assert found["collectives_at_batch_1"] == found["collectives_at_batch_2"] == 8


def test_a_kernel_that_cannot_run_rejects_the_job(found: Rehearsed) -> None:
    fault = "triton_poi (XBLOCK: 1) takes 200,000 bytes of shared memory"
    report = dataclasses.replace(
        found.report, generated={**found.report.generated, "faults": [fault]}
    )
    with pytest.raises(OptionError, match="200,000 bytes") as error:
        require_fit(dataclasses.replace(found, report=report))
    assert error.value.hint == "leave --compile out"


@pytest.mark.parametrize("case", part(CASES, 43), ids=str)
def test_kernels_of_flex_attention_fit(case: FlexCase, inside: Callable[..., Any]) -> None:
    """Heads of 160 to 256, of 128 in float32 and of latent attention did not, where a program has
    99 KiB."""
    found = inside("flex_kernels", arch=case.arch, sizes=list(case.sizes), dtype=case.dtype)
    assert found["faults"] == []
    assert found["forward"] > 0
    assert found["backward"] > 0


def test_a_tile_that_is_too_large_is_found(inside: Callable[..., Any]) -> None:
    """Head size 256 on sm_89 with PyTorch's own tiles."""
    (fault, *_) = inside("flex_kernels", arch=89, sizes=[256, 256], dtype="bfloat16", own=True)[
        "faults"
    ]
    assert "151,552 bytes of shared memory, and this GPU has 101,376" in fault
