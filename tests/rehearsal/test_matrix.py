"""The rehearsal matrix: what it covers, how cells are judged, a part of it, and its page."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs.rehearsal_matrix import (
    chosen_cases,
    judged,
    memory_error,
    rehearse_matrix,
    rehearsed,
)
from hocket.jobs.rehearsal_workers import RehearsalWorkers
from hocket.jobs.rehearse import prepare_rehearsal, rehearse_job
from hocket.jobs.request import request
from hocket.simulation.nccl import OrderVerdict
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.rehearsal_matrix import (
    CASES,
    CRASHED,
    DIFFERENT,
    FLAT,
    HANGS,
    MODELS,
    OK,
    OPTIONS,
    REJECTED,
    SCHEDULES,
    MatrixJob,
    RehearsalCell,
    RehearsalMatrix,
)
from tests.rotation import part

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def _case(layout: str = "dp2", schedule: str = "", option: str = "bf16") -> MatrixJob:
    return MatrixJob(model="tiny-llama", layout=layout, schedule=schedule, option=option)


def test_every_schedule_and_layout_class_is_under_every_option() -> None:
    assert len(set(CASES)) == len(CASES)
    for model in MODELS:
        mine = [case for case in CASES if case.model == model]
        for option in set(OPTIONS) - {"offload=params"}:
            covered = {c.schedule for c in mine if c.option == option}
            assert len(covered) > 4
            assert model != MODELS[0] or covered == {"", *SCHEDULES}
            assert {c.layout for c in mine if c.option == option} >= set(FLAT)
        degrees = [Layout.parse(case.layout) for case in mine]
        assert {(each.cp > 1, each.pp > 1) for each in degrees} == {
            (cp, pp) for cp in (False, True) for pp in (False, True)
        }
        assert any(each.ep > 1 and each.pp > 1 for each in degrees) == (model == "tiny-mixtral")
        for schedule in SCHEDULES:
            layouts = [Layout.parse(c.layout) for c in mine if c.schedule == schedule]
            assert {each.zero for each in layouts if each.dp > 1} >= {1, 2, 3}
            tensor = [each for each in layouts if each.tp > 1]
            assert {each.sequence_parallel for each in tensor} == {False, True}
            assert any(each.dp > 1 and each.zero for each in tensor)
    deepest = {c.schedule for c in CASES if Layout.parse(c.layout).pp == 8}
    assert deepest == set(SCHEDULES)


def test_the_command_of_a_job_sets_what_its_request_does() -> None:
    case = _case("pp2.tp2", "zb-v", "lora")
    assert case.command() == (
        "hocket rehearse tiny-llama --layout pp2.tp2 --seq-len 64 --dtype bf16 --schedule zb-v "
        "--microbatches 4 --virtual-stages 2 --lora-rank 4 --rows 2 --layers 4"
    )
    assert _case("pp8", "interleaved").request()["microbatches"] == 8
    assert "--layers 16" in _case("pp8", "interleaved").command()


def test_cells_have_an_inverse() -> None:
    cell = RehearsalCell(case=_case(), outcome=OK, memory=0.01, ranks=2, executed=1)
    assert RehearsalCell.from_json(cell.to_json()) == cell
    assert RehearsalMatrix(cells=(cell,)).ok
    crashed = dataclasses.replace(cell, outcome=CRASHED)
    assert not RehearsalMatrix(cells=(cell, crashed)).ok
    assert not RehearsalMatrix(cells=()).ok


def test_a_part_is_chosen_by_name() -> None:
    found = chosen_cases(["tiny-gpt2"], ["zb-v"], ["lora"])
    assert found
    assert {(c.model, c.schedule, c.option) for c in found} == {("tiny-gpt2", "zb-v", "lora")}
    with pytest.raises(OptionError, match="zero-buble"):
        chosen_cases(schedules=["zero-buble"])


def _found(layout: str = "dp2", **changes: Any) -> Any:
    """A rehearsal as the judge sees it, in which all is well but for `changes`."""
    changes = dict(changes)
    verdict = changes.pop(
        "verdict", OrderVerdict(rule="eager", waiting=(), mismatches=(), cycle=())
    )
    report = {
        "host_reads": [], "collectives": [], "peak_bytes": [{"total": 100}],
        "predicted_peak_bytes": [104], "generated": {}, **changes,
    }  # fmt: skip
    spec = SimpleNamespace(layout=Layout.parse(layout), config={"num_hidden_layers": 4})
    return SimpleNamespace(
        verdicts={"eager": verdict},
        report=SimpleNamespace(**report),
        reasons={},
        job=SimpleNamespace(spec=spec),
    )


COMPILED = {"launches": 1, "faults": []}
READ = {"what": "item", "where": "hocket/runtime/clip.py:1", "count": 1}
ROW = {
    "name": "all-reduce", "axis": "dp", "phase": "step", "count": 1, "bytes": 4,
    "expected_count": 2, "expected_bytes": 8, "equal": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, OK, ""),
        ({"predicted_peak_bytes": [94]}, DIFFERENT, "memory: predicted -6.0%"),
        ({"predicted_peak_bytes": [106]}, DIFFERENT, "memory: predicted +6.0%"),
        ({"host_reads": [READ]}, DIFFERENT, "host reads: 1 x item"),
        ({"host_reads": [READ], "layout": "dp2:offload=optimizer"}, OK, ""),
        ({"host_reads": [READ, READ], "layout": "dp2:offload=optimizer"}, DIFFERENT, "item"),
        # A layer that is recomputed keeps the sizes of its first run: no read more.
        ({"host_reads": [READ] * 4, "layout": "dp2.ep2:recompute=full"}, OK, ""),
        ({"host_reads": [READ] * 5, "layout": "dp2.ep2:recompute=full"}, DIFFERENT, "item"),
        ({"collectives": [ROW]}, DIFFERENT, "1 of 4 bytes, expected 2 of 8"),
        # Of compiled layers, which keep and gather less, predictions are upper limits.
        ({"generated": COMPILED, "predicted_peak_bytes": [130], "collectives": [ROW]}, OK, ""),
        ({"generated": COMPILED, "predicted_peak_bytes": [94]}, DIFFERENT, "memory: predicted -6."),
        ({"generated": {"faults": ["too large"]}}, DIFFERENT, "too large"),
        (
            {"generated": COMPILED, "collectives": [{**ROW, "bytes": 9}]},
            DIFFERENT,
            "1 of 9 bytes, expected 2 of 8",
        ),
    ],
)
def test_a_difference_is_named_with_its_numbers(
    changes: dict[str, Any], outcome: str, reason: str
) -> None:
    found = judged(_found(**changes))
    assert found[0] == outcome
    assert reason in found[1]
    assert bool(found[1]) == (outcome != OK)


def test_what_hangs_is_no_mere_difference() -> None:
    verdict = OrderVerdict(rule="eager", waiting=("rank 0",), mismatches=(), cycle=(0, 1))  # type: ignore[arg-type]
    assert judged(_found(verdict=verdict, predicted_peak_bytes=[1]))[0] == HANGS


def test_the_page_is_what_its_cells_say() -> None:
    path = REFERENCE / "write_rehearsals.py"
    loaded = importlib.util.spec_from_file_location("write_rehearsals", path)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    found = module.read([module.CELLS])
    assert module.page(found) == module.PAGE.read_text()
    cases = [cell.case for cell in found.cells]
    assert cases == [case for case in CASES if case in set(cases)]
    assert not [cell for cell in found.cells if cell.outcome not in (OK, REJECTED)]


# --- rehearsed here -------------------------------------------------------------------------------

_FP8 = importlib.util.find_spec("torchao") is not None  # whose matmuls fp8 takes
_SMALL = [
    case
    for case in CASES
    if Layout.parse(case.layout).world_size <= 4 and (_FP8 or case.option != "fp8")
]
_RECORDED = REFERENCE / "rehearsals.jsonl"


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_part_is_as_the_page_says(workers: RehearsalWorkers) -> None:
    """Of the jobs of up to 4 ranks that the page has, one in 24, chosen by the commit: what the
    page calls ok is."""
    known = {}
    for line in _RECORDED.read_text().splitlines():
        if "case" in json.loads(line):
            cell = RehearsalCell.from_json(line)
            known[cell.case] = cell.outcome
    for case in part([case for case in _SMALL if case in known], 24):
        cell = rehearsed(case, workers)
        assert cell.outcome in (known[case], OK), cell


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("model", "layout", "schedule", "option"),
    [
        # Gemma's norms behind matmuls open a bucket before inner gradients of the layer are there.
        ("tiny-gemma3", "dp2.pp2:zero=3", "zb-v", "recompute=norm+activation"),
        # Gradients of experts over ranks are sharded over fewer ranks than the others.
        ("tiny-mixtral", "dp4.ep2:zero=1", "", "bf16"),
    ],
)
def test_predicted_memory_is_within_3_percent(
    workers: RehearsalWorkers, model: str, layout: str, schedule: str, option: str
) -> None:
    case = dataclasses.replace(_case(layout, schedule, option), model=model)
    cell = rehearsed(case, workers)
    assert cell.outcome == OK, cell
    assert cell.memory is not None
    assert abs(cell.memory) < 0.03


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_predicted_memory_of_experts_at_their_real_size(workers: RehearsalWorkers) -> None:
    """What their outputs are weighted with is gone when their weights have gradients."""
    given = {"model": "qwen3-30b-a3b", "layout": "dp1", "seq_len": 4096, "dtype": "bf16"}
    job = prepare_rehearsal(request({**given, "device": "cuda"}), layers=2, rows=2)
    error = memory_error(rehearse_job(job, workers=workers))
    assert error is not None
    assert abs(error) < 0.03


@pytest.mark.ranks
def test_a_mistake_that_a_rank_finds_is_rejected(workers: RehearsalWorkers) -> None:
    """GPT-2 has no layer that multiplies in fp8, and the worker goes on with the next job."""
    pytest.importorskip("torchao")
    cell = rehearsed(dataclasses.replace(_case(option="fp8"), model="tiny-gpt2"), workers)
    assert cell.outcome == REJECTED
    assert "no linear layer" in cell.reason
    assert rehearsed(_case("tp2"), workers).outcome == OK


@pytest.mark.ranks
def test_an_error_of_ours_keeps_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """What only a rank finds: LoRA adapts the last stage alone."""
    job = ["tiny-llama", "--layout", "pp2", "--lora-rank", "4", "--lora-targets", "lm_head"]
    assert main(["rehearse", *job]) != 0
    said = capsys.readouterr().err
    assert "holds none of the layers that LoRA adapts" in said
    assert "--lora-targets all-linear\n        or fewer pipeline stages" in said
    assert "Traceback" not in said


@pytest.mark.ranks
def test_what_cannot_be_is_rejected_and_the_rest_goes_on() -> None:
    experts = dataclasses.replace(_case("dp1:recompute=mlp"), model="tiny-mixtral")
    cases = [_case("dp1:recompute=norm+moe"), experts, _case("tp2")]
    found = rehearse_matrix(cases, workers=1)
    assert [cell.outcome for cell in found.cells] == [REJECTED, REJECTED, OK]
    assert "unknown recompute 'moe'" in found.cells[0].reason
    assert "no layer of the model has a feed-forward module (mlp)" in found.cells[1].reason


@pytest.mark.ranks
def test_the_command_prints_cells_and_what_made_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import hocket.jobs.rehearsal_matrix as job

    monkeypatch.setattr(job, "CASES", (_case("tp2"), _case("dp2", option="lora")))
    assert main(["rehearse", "--matrix", "--options", "bf16", "--json"]) == 0
    first, last = capfd.readouterr().out.splitlines()
    assert RehearsalCell.from_json(first).case == _case("tp2")
    assert set(json.loads(last)) == {"versions", "date", "seconds"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--matrix", "--models", "tiny-lama"], "tiny-llama"),
        (["--matrix", "--dtype", "fp32"], "dtype sets another"),
        (["tiny-llama", "--matrix"], "tiny-llama sets another"),
        (["tiny-llama", "--options", "lora"], "--options chooses jobs of a matrix"),
    ],
)
def test_mistakes_of_the_user(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", *arguments]) != 0
    assert message in capfd.readouterr().err
