"""A plan for measured CPU cores says what is predicted of a run there, and rejects GPU options."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs import forecast, link_prices, machine, prepare
from hocket.jobs import plan as job
from hocket.jobs.measured_cluster import measured_cluster
from hocket.jobs.request import request
from hocket.jobs.validate import validate_layout
from hocket.models.source import resolve_model
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec
from tests.jobs.test_forecast import here

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm"), pytest.mark.timeout(120)]

SIZES: dict[str, Any] = {"seq_len": 64, "global_batch": 16}
ASKED = ["tiny-llama", "--seq-len", "64", "--global-batch", "16"]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster file of the made machine; the model is traced once for all that is asked of it."""
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HOCKET_LEDGER", "")
        machine.save_machine(measured_cluster(here()), folder / "cluster.toml")
        yield str(folder / "cluster.toml")


def run_spec() -> RunSpec:
    """Of the job that is planned, as `hocket compare` prices it."""
    source = resolve_model("tiny-llama", weights=False)
    asked = request({"model": "tiny-llama", **SIZES, "device": "cpu"})
    config = prepare.trained_config(source, 257, 256)  # of bytes and their end
    return prepare.job_spec(source, asked, Layout(), config, "train")


def test_adapters_are_planned_as_they_are_predicted(cluster: str) -> None:
    adapters = {"lora_rank": 4, "lora_targets": "q_proj-v_proj"}
    whole = job.plan_training("tiny-llama", cluster=cluster, **SIZES, layout="dp2")
    found = job.plan_training("tiny-llama", cluster=cluster, **SIZES, layout="dp2", **adapters)
    assert any(note.startswith("LoRA: ") for note in found.notes)
    assert shlex.join(job.train_command(found)).endswith(
        "--lora-rank 4 --lora-targets q_proj-v_proj"
    )
    assert found.best.step_seconds.median < 0.9 * whole.best.step_seconds.median
    # Of a model of 1.8M parameters two moments; gradients come when activations have gone.
    assert whole.best.memory - found.best.memory > 8 * 1.7e6
    spec = run_spec()
    options = dataclasses.replace(spec.options, **adapters)
    one = dataclasses.replace(spec, layout=found.best.layout, options=options)
    assert forecast.forecast_run(one, cluster).step_seconds == found.best.step_seconds.median
    spared = dataclasses.replace(one, layout=Layout.parse("dp2:zero=3"))
    predicted = forecast.forecast_run(spared, cluster)
    assert predicted.known, predicted.why
    assert max(predicted.peak_bytes) < found.best.memory
    kept = job.plan_training(
        "tiny-llama", cluster=cluster, **SIZES, layout="dp2:zero=2", lora_rank=4
    )
    assert kept.best.layout.zero == 2


def test_it_says_what_a_run_is_predicted(cluster: str) -> None:
    found = job.plan_training("tiny-llama", cluster=cluster, **SIZES, top=5)
    assert found.precision == "fp32"
    assert found.machine.startswith("2 cores of")
    assert len(found.layouts) == 5
    spec = run_spec()
    for one in found.layouts:
        predicted = forecast.forecast_run(dataclasses.replace(spec, layout=one.layout), cluster)
        assert one.step_seconds.low == one.step_seconds.median == predicted.step_seconds
        assert one.memory == max(predicted.peak_bytes)
        assert one.bubble == predicted.bubble
        assert sum(one.parts.values()) == pytest.approx(predicted.step_seconds)


def test_it_chooses_what_layout_auto_chooses(cluster: str) -> None:
    found = job.plan_training("tiny-llama", cluster=cluster, **SIZES)
    spec, source = run_spec(), resolve_model("tiny-llama", weights=False)
    predicted, _ = forecast.best_forecast(
        spec,
        here(),
        (),
        legal=lambda one: validate_layout(source.dimensions, one, spec.workload),
    )
    assert str(found.best.layout) == predicted.layout
    assert found.best.step_seconds.median == predicted.step_seconds


def test_it_plans_the_model_that_train_would_make(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two verbs with equal flags: one vocabulary, one list of layouts, one answer."""
    data = tmp_path / "text.txt"
    data.write_text("the same layout from both verbs. " * 400)
    asked = request(
        {"model": "tiny-llama", **SIZES, "device": "cpu", "data": [str(data)], "layout": "auto",
         "cluster": cluster}
    )  # fmt: skip
    made = prepare.prepare_job(asked)
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run").mkdir()
    _, _, config = prepare.data(made, folder)
    spec = prepare.job_spec(made.source, asked, Layout(), config, "train")
    predicted, _ = forecast.best_forecast(
        spec,
        here(),
        (),
        legal=lambda one: validate_layout(made.source.dimensions, one, spec.workload),
    )
    found = job.plan_training("tiny-llama", cluster=cluster, **SIZES)
    assert found.best.step_seconds.median == pytest.approx(predicted.step_seconds)
    assert str(found.best.layout) == predicted.layout
    assert any("257 ids" in note for note in found.notes)


def test_pins_are_kept(cluster: str) -> None:
    found = job.plan_training("tiny-llama", cluster=cluster, **SIZES, pin=["pp=2", "microbatch=4"])
    assert found.layouts
    for one in found.layouts:
        assert (one.layout.pp, one.microbatch) == (2, 4)
        assert one.layout.dp * one.microbatch * (one.layout.microbatches or 0) == 16


def test_the_least_memory_comes_first_where_it_is_asked_for(cluster: str) -> None:
    least = job.plan_training("tiny-llama", cluster=cluster, **SIZES, objective="memory", top=200)
    assert least.num_legal == len(least.layouts) == least.num_fitting
    held = [one.memory for one in least.layouts]
    assert held == sorted(held)
    assert held[0] < max(held)


def test_the_table_shows_no_range_and_a_command(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *ASKED, "--cluster", cluster, "--top", "3", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "percentile" not in said
    assert "GPU" not in said
    (line,) = [one for one in said.splitlines() if " train tiny-llama " in one]
    command = line.split()
    assert command[-2:] == ["--dtype", "fp32"]
    assert main(["plan", *ASKED, "--cluster", cluster, "--layout", "pp2", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["layouts"]
    assert one["layout"].startswith("pp2:")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--objective", "tokens-per-dollar"], "unknown objective"),
        (["--dtype", "fp8"], "unknown precision 'fp8'"),
        (["--stack", "megatron"], "estimated from measurements"),
        (["--pin", "tp=3"], "with tp=3"),
        (["--pin", "virtual_stages=2", "schedule=zero-bubble"], "virtual_stages is 2"),
        (["--seq-len", "4096"], "the model has 1024 positions"),
        (["--layout", "tp8"], "do not divide over tp 8"),
        (["--top", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    flags: list[str], said: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *ASKED, "--cluster", cluster, *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_fits_nowhere_is_refused_with_the_least_that_it_needs(tmp_path: Path) -> None:
    small = dataclasses.replace(here(), host=dataclasses.replace(here().host, memory=200_000_000))
    machine.save_machine(measured_cluster(small), tmp_path / "cluster.toml")
    with pytest.raises(HocketError, match="fits in no layout of this machine: the least is"):
        job.plan_training(
            "gpt2", cluster=str(tmp_path / "cluster.toml"), seq_len=64, global_batch=1
        )


def test_cores_that_nobody_measured_are_not_estimated_as_gpus(cluster: str) -> None:
    from pathlib import Path

    head, _, _ = Path(cluster).read_text().partition("[measured]")
    by_hand = Path(cluster).with_name("hand.toml")
    by_hand.write_text(head)
    with pytest.raises(HocketError, match="CPU cores without measurements"):
        job.plan_training("tiny-llama", cluster=str(by_hand), **SIZES)


def test_links_of_cores_carry_what_a_run_counts(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout.parse("dp2.tp2:microbatches=2")
    found = link_prices.links("tiny-llama", cluster=cluster, layout=layout, **SIZES)
    predicted = forecast.forecast_run(dataclasses.replace(run_spec(), layout=layout), cluster)
    assert found.step_seconds == predicted.step_seconds
    assert found.pool is None
    for one in found.axes:
        counted = [row for row in predicted.collectives if row["axis"] == one.axis]
        assert one.link == "shared memory"
        # All ranks of this layout hand over the same.
        assert 4 * one.bytes == sum(row["bytes"] for row in counted)
        assert 4 * one.messages == sum(row["count"] for row in counted)
        assert 0 < one.on["nvlink4"] < one.on["net100g"]
        assert one.seconds > 0
    assert {"tp", "dp"} <= {one.axis for one in found.axes}
    command = ["plan", "--links", *ASKED, "--cluster", cluster, "--layout", "pp2:microbatches=4"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "shared memory" in said
    assert "share one memory" in said
