"""Prices against an extract of published runs: each row holds its source and where it was read."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.planning.row_machine import row_cluster
from hocket.planning.table import MAINSTREAM, parse_training_row, read_training_table
from hocket.planning.validate import (
    FIELDS,
    ValidationReport,
    ranking,
    training_report,
    validate_training,
    write_training_predictions,
)
from hocket.spec.errors import OptionError

EXTRACT = Path(__file__).parent / "published_extract.csv"


@pytest.fixture(scope="module")
def found() -> ValidationReport:
    return validate_training(EXTRACT)


def test_errors_of_the_mainstream_stay_small(found: ValidationReport) -> None:
    overall = found.overall
    assert overall.rows_used >= 30
    assert overall.step_time_mape is not None
    assert overall.step_time_mape < 6
    assert overall.step_time_median_ape is not None
    assert overall.step_time_median_ape < 5
    assert overall.memory_median_ape is not None
    assert overall.memory_median_ape < 6
    assert overall.false_fits == 0


def test_layouts_of_one_run_are_ranked(found: ValidationReport) -> None:
    assert found.overall.kendall_tau is not None
    assert found.overall.kendall_tau > 0.6
    assert found.overall.mean_regret is not None
    assert found.overall.mean_regret < 3


def test_every_row_is_estimated_or_has_its_reason(found: ValidationReport) -> None:
    assert len(found.predicted_rows) + len(found.left_out) == len(found.ids)
    assert "LoRA" in found.left_out["nemo2407-031"]
    assert "neither dp nor n_gpus" in found.left_out["golden-013"]
    assert found.overall.rows_left_out == 2
    counted = sum(s.rows_used + s.rows_left_out for s in found.groups.values())
    assert counted == len(found.ids)


def test_rows_that_share_an_id_are_all_counted(tmp_path: Path) -> None:
    rows = [r for r in read_training_table(EXTRACT) if r["id"] in {"sc21t1-005", "nemo2407-031"}]
    both = training_report([*rows, *rows])
    assert both.overall.rows_used + both.overall.rows_left_out == 4
    assert (len(both.predicted_rows), len(both.left_out)) == (2, 2)
    write_training_predictions(both, tmp_path / "rows.csv")
    written = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [r["id"] for r in written] == [r["id"] for r in (*rows, *rows)]
    assert [bool(r["left_out"]) for r in written].count(True) == 2


STATED = ("zb-010", "bloom-074", "sc21t1-005", "sc21t2-001", "llmfoundry-036", "golden-001")


def _stated(**change: str) -> list[dict[str, str]]:
    return [r | change for r in read_training_table(EXTRACT) if r["id"] in STATED]


def test_a_microbatch_that_is_not_stated_is_not_the_whole_share() -> None:
    """Rows whose microbatch is known, without it: as near as with it, and far from the whole."""
    known, blank = training_report(_stated()), training_report(_stated(micro_batch=""))
    assert len(blank.predicted_rows) == len(known.predicted_rows) == len(STATED)
    for one, before in zip(blank.predicted_rows, known.predicted_rows, strict=True):
        at = one.row.layout
        assert at["microbatch"] * at["microbatches"] == pytest.approx(
            before.row.layout["microbatch"] * before.row.layout["microbatches"]
        )
        assert set(one.row.resolved) == {"micro_batch"}
        assert float(one.row.resolved["micro_batch"]) == at["microbatch"]
        assert one.error is not None
        assert abs(one.error) < 0.15, one.row.id
        assert one.fits


@pytest.mark.parametrize("name", ["bloom-074", "sc21t1-005", "zb-010", "golden-001"])
def test_what_is_resolved_is_the_fastest_that_fits(name: str) -> None:
    row = next(r for r in read_training_table(EXTRACT) if r["id"] == name)
    share = int(float(row["global_batch"]) / float(row["dp"]))
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    each = training_report(
        [row | {"id": str(n), "micro_batch": str(n)} for n in sizes]
    ).predicted_rows
    fastest = min((p for p in each if p.fits), key=lambda p: p.step)
    chosen = training_report([row | {"micro_batch": ""}]).predicted_rows[0]
    assert chosen.row.resolved == {"micro_batch": fastest.row.id}
    assert chosen.step == pytest.approx(fastest.step)


def test_recompute_that_is_not_stated_is_none_only_where_that_fits() -> None:
    row = next(r for r in read_training_table(EXTRACT) if r["id"] == "golden-001") | {
        "recompute": ""
    }
    small, large = (
        parse_training_row(row),
        parse_training_row(row | {"micro_batch": "32", "global_batch": "2048"}),
    )
    assert not isinstance(small, str)
    assert not isinstance(large, str)
    assert small.resolved == {"recompute": "none"}
    assert large.resolved == {"recompute": "full"}


def test_resolved_knobs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "table.csv", tmp_path / "rows.csv"
    rows = _stated(micro_batch="")
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert main(["validate", str(table), "--rows", str(out)]) == 0
    assert "resolved, since rows do not state it: micro_batch=" in capsys.readouterr().out
    for row in csv.DictReader(out.open()):
        assert row["resolved"].startswith("micro_batch=")


@pytest.mark.parametrize(
    ("layers", "pp", "vp", "fewer"),
    [("94", "8", "4", 1), ("126", "16", "4", 1), ("61", "16", "1", 1.5), ("96", "8", "1", 0),
     ("90", "32", "1", 0), ("94", "1", "1", 0)],
)  # fmt: skip
def test_ends_lack_the_layers_that_stages_cannot_share(
    layers: str, pp: str, vp: str, fewer: float
) -> None:
    """94 layers of 32 stages are 96 less one at each end, which have embedding and loss."""
    line = next(r for r in read_training_table(EXTRACT) if r["id"] == "zb-025")
    changes = {"layers": layers, "pp": pp, "vp": vp, "n_gpus": pp, "dp": "1", "notes": ""}
    row = parse_training_row(line | changes)
    assert not isinstance(row, str), row
    assert row.layout["lighter"] == fewer
    unstated = parse_training_row(line | changes | {"recompute": ""})
    assert not isinstance(unstated, str), unstated
    assert unstated.layout["lighter"] == fewer


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("4x Omni-Path 100Gb/s per node", 200),  # half of which messages through the host reach
        ("InfiniBand 8x400Gb/s per node", 3200), ("8x HDR IB 200Gb/s per node", 1600),
        ("IB 800Gb/s per node", 800), ("400 Gb/s RDMA per GPU", 3200),
        ("GPUDirect-TCPXO 8x200Gb/s per node", 1600), ("InfiniBand NDR 400Gb/s", 3200),
    ],
)  # fmt: skip
def test_the_network_of_a_row_is_that_of_its_node(text: str, gigabits: float) -> None:
    cluster = row_cluster("H100-80 SXM", text, gpus=16, per_node=8)
    assert cluster.node.network == gigabits * 1e9 / 8


def test_transformer_engine_under_fsdp_keeps_its_own_kernels() -> None:
    line = next(r for r in read_training_table(EXTRACT) if r["id"] == "zb-025")
    line |= {"pp": "1", "dp": "8", "zero_stage": "3", "gpu": "H100-80 SXM"}
    own, plain = (
        parse_training_row(line | {"notes": f"FSDP2{more}"}) for more in (", TransformerEngine", "")
    )
    assert not isinstance(own, str)
    assert not isinstance(plain, str)
    assert own.stack == plain.stack == "fsdp"
    assert own.constants.flash_rate > plain.constants.flash_rate
    assert own.constants.traffic < plain.constants.traffic
    assert own.constants.network == plain.constants.network


def test_experts_come_from_the_model_of_that_name() -> None:
    row = next(r for r in read_training_table(EXTRACT) if r["id"] == "golden-013") | {
        "n_gpus": "64",
        "dp": "",
    }
    known = parse_training_row(row)
    assert not isinstance(known, str)
    assert (known.shape.name, known.shape.experts) == ("mixtral-8x7b", 8)
    assert known.kind == "experts, H100 bf16"
    assert "layers 31 is not mixtral-8x7b's 32" in str(parse_training_row(row | {"layers": "31"}))
    assert "number of experts" in str(parse_training_row(row | {"model": "my-moe-3b"}))


def test_a_name_stands_for_dimensions_that_are_left_out() -> None:
    row = next(r for r in read_training_table(EXTRACT) if r["id"] == "nemo2407-023")
    blank = {"model": "GPT3-20B", "layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": ""}
    known = parse_training_row(row | blank)
    assert not isinstance(known, str)
    assert (len(known.shape.layers), known.shape.hidden, known.shape.heads) == (44, 6144, 48)
    assert parse_training_row(row | blank | {"model": "GPT3-21B"}) == "layers is not given"


def test_eight_bits_are_reported_apart(found: ValidationReport) -> None:
    kinds = {p.row.id: p.row.kind for p in found.predicted_rows}
    assert kinds["nemo2407-023"] == "H100 fp8"
    assert kinds["sc21t1-001"] == MAINSTREAM
    assert "other: H100 fp8" in found.groups


def test_equal_runs_are_scored_against_their_median() -> None:
    rows = [r for r in read_training_table(EXTRACT) if r["id"] == "bloom-074"]
    again = [rows[0] | {"id": "again", "measured_iter_s": "120.48"}]
    both = training_report(rows + again)
    middle = (float(rows[0]["measured_iter_s"]) + 120.48) / 2
    assert [p.target for p in both.predicted_rows] == [pytest.approx(middle)] * 2
    assert both.overall.kendall_tau is None  # one run is no ranking


def test_regret_is_what_the_pick_loses() -> None:
    base = next(r for r in read_training_table(EXTRACT) if r["id"] == "vtrainN-001")
    slow = base | {"id": "slow", "tp": "8.0", "dp": "8.0", "measured_iter_s": "9.0"}
    predicted_rows = training_report([base, slow]).predicted_rows
    assert ranking(predicted_rows) == ([1.0], [0.0])
    assert predicted_rows[0].target is not None
    swapped = [
        dataclasses.replace(predicted_rows[0], target=9.0),
        dataclasses.replace(predicted_rows[1], target=6.0),
    ]
    assert ranking(swapped) == ([-1.0], [pytest.approx(0.5)])


def test_rows_are_written_in_the_units_of_their_source(
    found: ValidationReport, tmp_path: Path
) -> None:
    out = tmp_path / "rows.csv"
    assert main(["validate", str(EXTRACT), "--rows", str(out), "--json"]) == 0
    rows = {r["id"]: r for r in csv.DictReader(out.open())}
    assert list(rows) == list(found.ids)
    assert float(rows["golden-001"]["predicted_mem_gb"]) == pytest.approx(56.33, rel=0.1)  # GiB
    assert rows["golden-001"]["fits"] == "true"
    assert rows["golden-013"]["predicted_iter_s"] == ""
    assert rows["golden-013"]["left_out"]


def test_json_holds_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(EXTRACT), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"overall", "groups"}
    for scores in (data["overall"], *data["groups"].values()):
        assert tuple(scores) == FIELDS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": ""}, "layers is not given"),
        ({"gpu": "H10O-80 SXM"}, "unknown GPU"),
        ({"dp": "3.0"}, "is not n_gpus"),
        ({"n_gpus": "", "dp": ""}, "neither dp nor n_gpus"),
    ],
)
def test_a_row_that_lacks_something_says_what(change: dict[str, str], reason: str) -> None:
    row = next(r for r in read_training_table(EXTRACT) if r["id"] == "sc21t1-005")
    said = parse_training_row(row | change)
    assert isinstance(said, str)
    assert reason in said


def test_a_table_without_columns_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("id,model\n1,gpt\n")
    with pytest.raises(OptionError, match="has no column source, gpu") as found:
        read_training_table(bad)
    command, then = (found.value.hint or "").splitlines()
    assert subprocess.run(shlex.split(command)).returncode == 0
    assert (
        then.strip()
        == "then a value of source, gpu, layers, hidden, heads, seq, global_batch in each row"
    )
    assert bad.read_text().splitlines()[0] == f"id,model,{then.strip()[16:-12].replace(', ', ',')}"
    bad.write_text(bad.read_text().replace("hidden,heads", "hiden,headz"))
    with pytest.raises(OptionError, match="has no column hidden, heads") as found:
        read_training_table(bad)
    assert subprocess.run(shlex.split(found.value.hint or "")).returncode == 0
    assert read_training_table(bad)
    bad.write_text(bad.read_text().replace("global_batch", "global_batc/e;", 1))
    with pytest.raises(OptionError, match="has no column global_batch") as found:
        read_training_table(bad)
    assert "/e" not in (found.value.hint or "")  # no part of a name becomes part of a command
    with pytest.raises(OptionError, match="there is no file"):
        read_training_table(tmp_path / "none.csv")


def test_every_column_is_explained_below_the_table() -> None:
    from hocket.jobs.accuracy import accuracy_text

    text = accuracy_text(validate_training(EXTRACT))
    legend = text.rpartition("\n\n")[2]
    for column in text.splitlines()[0].split():
        assert re.search(rf"^([a-z]+, )?{column}(, [a-z]+)?: |; {column}: ", legend, re.M), column
