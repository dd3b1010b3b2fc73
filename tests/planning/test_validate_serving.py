"""Serving prices against an extract of published runs: each row holds where it was read."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from hocket.cli.main import main
from hocket.planning.serving_load import load_columns
from hocket.planning.serving_table import (
    MODES,
    OPTIONAL,
    REQUIRED,
    parse_serving_row,
    read_serving_table,
)
from hocket.planning.validate_serving import (
    FIELDS,
    ServingValidationReport,
    ServingValidationScores,
    price_serving_rows,
    serving_report,
    validate_serving,
)
from hocket.spec.errors import OptionError

EXTRACT = Path(__file__).parent / "published_serving_extract.csv"


@pytest.fixture(scope="module")
def found() -> ServingValidationReport:
    return validate_serving(EXTRACT)


def test_errors_on_a100_h100_and_h200_stay_small(found: ServingValidationReport) -> None:
    overall = found.overall
    assert overall.rows_used >= 100
    assert overall.tpot_rows >= 40
    assert overall.throughput_rows >= 60
    assert overall.tpot_median_ape is not None
    assert overall.tpot_median_ape < 12
    assert overall.throughput_median_ape is not None
    assert overall.throughput_median_ape < 12
    assert overall.unfit == 0


def test_topology_decides_what_four_more_gpus_bring(found: ServingValidationReport) -> None:
    """Llama 3 70B from four to eight A100 under TensorRT-LLM 0.14: measured 1.77 times as fast over
    NVLink, 1.02 over PCIe (medians of the length mixes here)."""
    predicted, measured = {}, {}
    for gpu in ("A100-SXM-80", "A100-PCIe-80"):
        runs: dict[tuple[float, float], dict[int, tuple[float, float]]] = {}
        for p in found.predicted_rows:
            if p.row.gpu == gpu and p.row.model == "llama-3-70b" and p.row.throughput:
                by = runs.setdefault((p.row.prompt, p.row.output), {})
                by[p.row.prices.gpus] = (p.throughput, p.row.throughput)
        pairs = [by for by in runs.values() if {4, 8} <= set(by)]
        assert len(pairs) >= 8
        predicted[gpu] = statistics.median(by[8][0] / by[4][0] for by in pairs)
        measured[gpu] = statistics.median(by[8][1] / by[4][1] for by in pairs)
    assert measured["A100-SXM-80"] == pytest.approx(1.78, abs=0.05)
    assert measured["A100-PCIe-80"] == pytest.approx(1.03, abs=0.05)
    assert predicted["A100-SXM-80"] == pytest.approx(measured["A100-SXM-80"], rel=0.08)
    assert predicted["A100-PCIe-80"] == pytest.approx(measured["A100-PCIe-80"], rel=0.12)
    assert predicted["A100-SXM-80"] > 1.5 * predicted["A100-PCIe-80"]


def test_every_row_is_estimated_or_has_its_reason(found: ServingValidationReport) -> None:
    assert len(found.predicted_rows) + len(found.left_out) == len(found.ids)
    reasons = " | ".join(found.left_out.values())
    for words in ("linear attention", "dimensions", "number of workers", "MI250X"):
        assert words in reasons
    counted = sum(s.rows_used + s.rows_left_out for s in found.groups.values())
    assert counted == len(found.ids)


def test_other_gpus_are_reported_apart(found: ServingValidationReport) -> None:
    assert found.groups["other: B200-SXM-180"].rows_used == 2
    assert found.families["B200-SXM-180"].rows_used == 2
    main_rows = sum(1 for p in found.predicted_rows if p.row.mainstream)
    assert found.overall.rows_used == main_rows == len(found.predicted_rows) - 2


def test_equal_runs_are_scored_against_their_median() -> None:
    line = next(r for r in read_serving_table(EXTRACT) if r["mode"] == "agg")
    twice = [
        line | {"id": "a", "tpot_ms": "10"},
        line | {"id": "b", "tpot_ms": "30"},
        line | {"id": "c", "tpot_ms": ""},
    ]
    assert {p.row.id: p.targets["tpot"] for p in serving_report(twice).predicted_rows} == {
        "a": 0.02,
        "b": 0.02,
        "c": None,
    }


def test_rows_are_written_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    assert main(["validate", str(EXTRACT), "--infer", "--rows", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {f.name for f in dataclasses.fields(ServingValidationScores)}
    assert set(found["overall"]) == names
    assert all(set(s) == names for s in found["groups"].values())
    with out.open() as file:
        written = list(csv.DictReader(file))
    assert [w["id"] for w in written] == [r["id"] for r in read_serving_table(EXTRACT)]
    columns = ("predicted_tpot_ms", "predicted_ttft_ms", "predicted_out_tok_s_total")
    for row in written:
        assert set(row) == {"id", *columns, "assumed", "left_out"}
        if row["left_out"]:
            assert not any(row[c] for c in columns)
        else:
            assert all(float(row[c]) > 0 for c in columns)


def test_the_text_says_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(EXTRACT), "--infer"]) == 0
    text = capsys.readouterr().out
    assert "overall (A100, H100, H200)" in text
    assert "linear attention" in text
    assert "A100-PCIe-80" in text


def _line(**changes: str) -> dict[str, str]:
    line = next(
        r for r in read_serving_table(EXTRACT) if r["mode"] == "agg" and r["engine"] == "trtllm"
    )
    return line | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "dreaming"}, "unknown mode"),
        ({"gpu": "Abacus"}, "Abacus"),
        ({"engine": "abacus"}, "no constants"),
        ({"model": "Abacus-7B"}, "no shape"),
        ({"osl": ""}, "length of the outputs"),
        ({"concurrency_or_batch": ""}, "requests at once"),
        ({"precision": "fp12"}, "unknown precision"),
        ({"tpot_ms": "fast"}, "not a number"),
        ({"isl": "-5"}, "not between 0 and"),
        ({"osl": "nan"}, "no length of the outputs"),
        ({"concurrency_or_batch": "0"}, "requests at once"),
    ],
)
def test_what_a_row_lacks_is_said(changes: dict[str, str], words: str) -> None:
    reason = parse_serving_row(_line(**changes))
    assert isinstance(reason, str)
    assert words in reason


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,model\n1,x\n")
    with pytest.raises(OptionError, match="no column source"):
        validate_serving(path)
    with pytest.raises(OptionError, match="there is no file"):
        validate_serving(tmp_path / "none.csv")


def test_the_page_names_every_column_and_mode_and_its_example_is_predicted(tmp_path: Path) -> None:
    page = (EXTRACT.parents[2] / "docs" / "how-to" / "validate.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    columns = {c for c in (*REQUIRED, *OPTIONAL) if not c.startswith("decode_")}
    sides = {c for c in columns if re.match(r"prefill_(?!workers|bs|tp)", c)}
    assert not columns - sides - named
    assert not {*MODES} - named
    example = tmp_path / "servers.csv"
    (text,) = re.findall(r"```csv\n(.*?)```", page, re.DOTALL)
    example.write_text(text)
    report = validate_serving(example)
    assert not report.left_out
    assert report.overall.tpot_rows == report.overall.ttft_rows == 2


def test_a_table_without_rows_has_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(EXTRACT.read_text().splitlines()[0] + "\n")
    found = validate_serving(path)
    assert (found.overall.rows_used, found.overall.tpot_median_ape) == (0, None)


def test_degrees_named_twice_count_once() -> None:
    """InferenceX names eight GPUs as tp 8 and ep 8; a table multiplied them."""
    row = parse_serving_row(
        _line(id="x_cfg1", tp="64", ep="8", moe_tp="8", attn_dp="1", n_gpus="64")
    )
    assert not isinstance(row, str)
    assert row.prices.gpus == 8


def test_gpus_named_three_times_count_once() -> None:
    """Kimi K2.5 on four GPUs is in published tables twice, with the same milliseconds: as tp 4 with
    ep 4, and as tp 4 with 4 ranks of attention and ep 16, from which 16 GPUs were derived."""
    line = _line(id="x_cfg635", model="moonshotai/Kimi-K2.5", gpu="B200", precision="fp4", pp="1")
    once = {"tp": "4", "ep": "4", "moe_tp": "1", "attn_dp": "1", "n_gpus": "4"}
    rows = [
        parse_serving_row(line | degrees)
        for degrees in (once, once | {"ep": "16", "attn_dp": "4", "n_gpus": "16"})
    ]
    one, other = price_serving_rows([r for r in rows if not isinstance(r, str)])
    assert (one.row.prices.gpus, other.row.prices.gpus) == (4, 4)
    assert one.tpot == other.tpot
    # Two ranks of attention with two tensor ranks each, four GPUs, are what they say.
    four = parse_serving_row(
        line | {"tp": "2", "ep": "4", "moe_tp": "1", "attn_dp": "2", "n_gpus": "4"}
    )
    assert not isinstance(four, str)
    assert four.prices.gpus == 4


def test_more_requests_at_once_give_more_tokens_more_slowly() -> None:
    rows = [
        parse_serving_row(_line(id=str(c), concurrency_or_batch=str(c))) for c in (1, 4, 16, 64)
    ]
    predicted_rows = price_serving_rows([r for r in rows if not isinstance(r, str)])
    assert [p.throughput for p in predicted_rows] == sorted(p.throughput for p in predicted_rows)
    assert [p.tpot for p in predicted_rows] == sorted(p.tpot for p in predicted_rows)
    assert all(getattr(p, field) > 0 for p in predicted_rows for field in FIELDS)


def test_what_does_not_fit_waits_for_a_place() -> None:
    """Requests beyond what the cache holds wait: the first token comes late, not the others."""
    rows = [parse_serving_row(_line(id=str(c), concurrency_or_batch=str(c))) for c in (64, 20000)]
    near, far = price_serving_rows([r for r in rows if not isinstance(r, str)])
    assert far.ttft > 10 * near.ttft
    assert far.batch < 20000


def test_a_batch_that_does_not_fit_runs_in_turns() -> None:
    """Llama 3.1 405B in 8 bits on eight H100: twice as many requests as fit take twice as long."""
    rows = [
        parse_serving_row(
            _line(
                id=str(n), model="Llama 3.1 405B", gpu="H100-SXM-80", n_gpus="8", tp="8", ep="1",
                moe_tp="", attn_dp="",
                precision="fp8", mode="static_batch_offline", concurrency_or_batch=str(n),
                isl="2048", osl="2048",
            )
        )
        for n in (8, 512, 1024)
    ]  # fmt: skip
    few, many, twice = price_serving_rows([r for r in rows if not isinstance(r, str)])
    assert few.batch == 8
    assert 8 < many.batch < 512
    assert twice.throughput == pytest.approx(many.throughput)
    assert twice.ttft > 1.9 * many.ttft


def test_requests_of_unequal_length_do_not_run_in_waves() -> None:
    """Under SGLang equal ones that start together do; lengths that are means delay no whole one."""
    same = _line(engine="sglang", concurrency_or_batch="64", isl="4096", notes="")
    rows = [
        parse_serving_row(same | {"id": str(i), "notes": note})
        for i, note in enumerate(("", "ShareGPT", "lengths drawn at random"))
    ]
    equal, shared, drawn = [r for r in rows if not isinstance(r, str)]
    assert (equal.varied, shared.varied, drawn.varied) == (False, True, True)
    assert equal.prompt == shared.prompt == drawn.prompt
    first, second, third = price_serving_rows([equal, shared, drawn])
    assert second.ttft < first.ttft
    assert second.tpot == third.tpot != first.tpot


@pytest.mark.parametrize("notes", ["", " of ShareGPT"])
def test_a_run_that_ends_takes_as_long_as_its_steps(notes: str) -> None:
    """200 answers of equal lengths, and of lengths drawn one by one, step by step to the last."""
    line = _line(mode="inflight_max_load", isl="200", osl="200")
    rows = [
        parse_serving_row(line | {"id": str(n), "notes": f"{n} requests{notes} at once"})
        for n in (200, 10**7)
    ]
    run, endless = [row for row in rows if not isinstance(row, str)]
    assert (run.total, run.varied) == (200, notes != "")
    at = load_columns([run])
    random = np.random.default_rng(0)
    lengths = random.exponential(200, (50, 200)).round() if notes else np.full((1, 200), 200)
    alive = np.array([(lengths > token).sum(1) for token in range(int(lengths.max()))])
    numbers, none = np.arange(1, 201), np.zeros(1)
    seconds = np.array([at.step(none, none, none + n, 300.0)[0] for n in numbers])
    steps = np.where(alive > 0, seconds[np.maximum(alive, 1) - 1], 0.0).sum(0).mean()
    found = price_serving_rows([run])[0]
    prompts = at.step(at.prompt * 200, at.prompt / 2, none, at.prompt)[0]
    assert found.throughput == pytest.approx(200 * 200 / (steps + prompts), rel=0.03)
    steady = parse_serving_row(line | {"notes": ""})
    assert not isinstance(steady, str)
    many, always = price_serving_rows([endless, steady])
    assert many.throughput == pytest.approx(always.throughput, rel=0.01)
    assert found.throughput < always.throughput
    none_at_all = parse_serving_row(line | {"notes": "0 requests at once"})
    assert not isinstance(none_at_all, str)
    assert none_at_all.total == float("inf")


def test_a_prompt_that_is_not_stated_has_its_data_sets_length() -> None:
    """Assumed and listed, never left out; each data set has its own."""
    lengths = {}
    for source, name, mode in (
        ("MLPerf Inference v5.1", "Llama 2 70B Chat", "mlperf_offline"),
        ("MLPerf Inference v5.1", "Mixtral 8x7B Instruct", "mlperf_offline"),
        ("a leaderboard, gpqa", "openai/gpt-oss-20b", "steady_closed_loop"),
        ("nothing known", "Llama 3 8B", "agg"),
    ):
        row = parse_serving_row(
            _line(isl="", source=source, model=name, mode=mode, precision="fp8")
        )
        assert not isinstance(row, str), row
        assert row.assumed["isl"].startswith(f"{row.prompt:g} (")
        lengths[source, name] = row.prompt
    assert len(set(lengths.values())) == 4
    stated = parse_serving_row(_line())
    assert not isinstance(stated, str)
    assert not stated.assumed


def test_replicas_that_are_not_stated_hold_the_weights_and_a_cache() -> None:
    """Llama 2 70B in 8 bits: 69 GB are too many for one H100 of 80 GB, not for an H200."""
    line = _line(
        model="Llama 2 70B Chat", mode="mlperf_offline", precision="fp8", tp="", pp="", ep="",
        moe_tp="", attn_dp="", n_gpus="8", concurrency_or_batch="", isl="", osl="293",
    )  # fmt: skip
    for gpu, tp in (("H100-SXM-80", "2"), ("H200-SXM", "1"), ("MI300X", "1")):
        row = parse_serving_row(line | {"gpu": gpu})
        assert not isinstance(row, str), row
        assert row.assumed["tp"] == tp
        assert row.prices.gpus == int(tp)


def test_a_measured_number_of_running_requests_is_kept() -> None:
    """A steady closed loop states how many requests ran on average: no default bounds them."""
    rows = [
        parse_serving_row(
            _line(id=str(n), mode="steady_closed_loop", concurrency_or_batch=str(n), isl="")
        )
        for n in (64, 1500)
    ]
    few, many = price_serving_rows([r for r in rows if not isinstance(r, str)])
    assert (few.batch, many.batch) == (64, 1500)
    assert many.tpot > few.tpot


def test_drawing_tokens_by_sorting_takes_time_by_vocabulary() -> None:
    """A steady closed loop asks for top-p and a penalty, which vLLM computes in PyTorch: its sort
    alone was measured at 6.15 ms for 512 sequences of 131,072 logits."""
    seconds = {}
    for engine, version in (("vllm", "0.11.1"), ("trtllm", "1.0")):
        for model in ("Llama 3 8B", "openai/gpt-oss-20b"):
            row = parse_serving_row(
                _line(
                    model=model, mode="steady_closed_loop", concurrency_or_batch="512",
                    engine=engine, engine_version=version, tp="1", ep="1", moe_tp="1", attn_dp="1",
                    n_gpus="1", gpu="H100-SXM-80", pp="1",
                )
            )  # fmt: skip
            assert not isinstance(row, str), row
            greedy = dataclasses.replace(row, sampled=False)
            drawn, plain = price_serving_rows([row, greedy])
            seconds[engine, model] = drawn.tpot - plain.tpot
    assert seconds["trtllm", "Llama 3 8B"] == 0
    llama, gpt = seconds["vllm", "Llama 3 8B"], seconds["vllm", "openai/gpt-oss-20b"]
    assert gpt / llama == pytest.approx(201_088 / 128_256)
    assert 6.15e-3 * 128_256 / 131_072 < llama < 4 * 6.15e-3


MLPERF = (
    # mlcommons/inference_results_v4.1 and v5.1, closed division: GPU, GPUs, precision, tp, limit of
    # sequences, tokens of an answer, then mean ms per token and output tokens/s of all GPUs.
    ("H100-SXM-80", "8", "fp8", "2", "1024", "290.3", "server", 154.96, 21605.79),
    ("H200-SXM", "8", "fp8", "1", "2048", "292.7", "server", 171.23, 33164.39),
    ("H200-SXM", "8", "fp8", "1", "512", "292.8", "interactive", 35.19, 20432.07),
    ("B200", "8", "fp4", "1", "2048", "274.4", "server", 123.32, 99123.04),
    ("GB200", "4", "fp4", "1", "2048", "276.6", "server", 115.85, 49359.61),
)


@pytest.mark.parametrize("row", MLPERF, ids=lambda row: f"{row[0]}-{row[6]}")
def test_a_server_at_its_limit_has_its_batch_full(row: tuple[str | float, ...]) -> None:
    """Llama 2 70B: time per token of a saturated server, not of a request or two at once."""
    gpu, gpus, precision, tp, most, output, kind, tpot, tokens = row
    line = _line(
        id="mlperf", model="Llama 2 70B Chat", gpu=str(gpu), n_gpus=str(gpus), tp=str(tp),
        precision=str(precision), mode=f"mlperf_{kind}", concurrency_or_batch=str(most), isl="",
        osl=str(output), engine="TensorRT-LLM", engine_version="1.0", tpot_ms=str(tpot),
        out_tok_s_total=str(tokens), ep="", moe_tp="", attn_dp="", pp="1", notes="",
    )  # fmt: skip
    known = parse_serving_row(line)
    assert not isinstance(known, str), known
    (predicted_rows,) = price_serving_rows([known])
    assert 1e3 * predicted_rows.tpot == pytest.approx(tpot, rel=0.25)
    assert predicted_rows.throughput == pytest.approx(
        float(tokens) * int(str(tp)) / int(str(gpus)), rel=0.4
    )
    alone = parse_serving_row({**line, "mode": "agg", "isl": "294", "concurrency_or_batch": "8"})
    assert not isinstance(alone, str), alone
    (few,) = price_serving_rows([alone])
    assert few.tpot < 0.7 * predicted_rows.tpot
