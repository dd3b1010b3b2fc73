"""Runs on GPUs are predicted by the planner, with the figures of `hocket plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import hocket.launch.launcher
from hocket.catalogue.hardware import cluster as catalogue_cluster
from hocket.cost.measured_memory import gpu_memory_rows
from hocket.jobs import (
    forecast,
    forecast_policy,
    gpu_run,
    machine,
    prepare,
    probe,
    rehearsal_fit,
)
from hocket.jobs.measured_cluster import measured_cluster
from hocket.jobs.plan import plan_training
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import JobRequest, request
from hocket.jobs.serving import forecast as serving_forecast
from hocket.jobs.serving import request as serve_request
from hocket.jobs.validate import validate_layout
from hocket.launch import Launcher
from hocket.models.source import resolve_model
from hocket.probing import devices
from hocket.probing.devices import FoundDevices
from hocket.schedules.registry import build_schedule
from hocket.spec.errors import LayoutError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions
from hocket.spec.timeline import Timeline
from tests.jobs.served_model import model
from tests.jobs.test_forecast import here
from tests.reporting.run_folders import gpus

pytestmark = [pytest.mark.train, pytest.mark.ranks, pytest.mark.usefixtures("warm")]

LLAMA = {"model": "llama-3-8b", "seq_len": 4096, "global_batch": 64}


@pytest.fixture(autouse=True)
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight H100 that were not probed, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rehearsal_fit, "gpu_here", lambda: "H100-SXM-80")
    monkeypatch.setattr(devices, "visible_gpus", lambda: 8)
    monkeypatch.setattr(machine, "kept", lambda device="auto": None)


def job(**values: Any) -> tuple[JobRequest, RunSpec]:
    asked = request({"dtype": "bf16", "device": "cuda", **LLAMA, **values})
    source = resolve_model(asked.model, weights=False)
    layout = asked.layout
    if not asked.auto:
        layout = validate_layout(source.dimensions, layout, asked.workload)
    return asked, prepare.job_spec(source, asked, layout, source.config, "train")


def prepared(asked: JobRequest) -> prepare.PreparedJob:
    return prepare.PreparedJob(
        request=asked,
        source=resolve_model(asked.model, weights=False),
        layout=asked.layout,
        schedule=prepare.scheduled(Layout(microbatches=1)),
    )


LAYOUTS = (
    "dp4.tp2:zero=1,microbatches=8,sequence_parallel=true",
    "dp4.pp2:schedule=zero-bubble,microbatches=16,zero=1",
    "dp2.pp2.cp2:microbatches=16,zero=1",
    "dp8:zero=3,microbatches=2,recompute=full",
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_run_and_its_plan_have_the_same_figures(text: str) -> None:
    _, spec = job(layout=text)
    found, timeline = forecast.predicted_run(spec, forecast.run_target(spec))
    plan = plan_training(
        "llama-3-8b", cluster="8xH100-SXM", seq_len=4096, global_batch=64, layout=text,
        precision="bf16",
    ).best  # fmt: skip
    assert found.known, found.why
    assert found.step_seconds == plan.step_seconds.median
    assert found.step_range == (plan.step_seconds.low, plan.step_seconds.high)
    assert found.bubble == plan.bubble
    assert found.capacity == 85_520_809_984
    hidden = sum(v for k, v in plan.parts.items() if k.startswith("communication"))
    assert sum(found.exposed.values()) == pytest.approx(hidden, rel=1e-6)
    assert set(found.exposed) == set(found.links)
    assert timeline is not None
    assert timeline.num_ranks == len(found.memory) == 8
    assert timeline.peak_bytes == found.peak_bytes
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert 0.9 < timeline.duration / found.step_seconds <= 1.0001
    assert Forecast.from_json(found.to_json()) == found


def test_memory_is_what_its_own_execution_allocates() -> None:
    """By the replay that the rehearsal is held against, and the plan's within 3% of it."""
    _, spec = job(layout=LAYOUTS[0])
    found = forecast.forecast_run(spec)
    shape = gpu_run.planner_shape(spec)
    board = build_schedule(spec.layout, spec.layout.microbatches or 1)
    rows = gpu_memory_rows(shape, spec, board)
    assert list(found.memory) == rows
    (plan,) = plan_training(
        "llama-3-8b", cluster="8xH100-SXM", seq_len=4096, global_batch=64, layout=LAYOUTS[0]
    ).layouts
    kinds = {k: v for k, v in plan.memory_by_kind.items() if k != "buffers and context"}
    assert sum(kinds.values()) == pytest.approx(max(found.peak_bytes), rel=0.03)


def test_the_norm_is_summed_whether_or_not_it_clips() -> None:
    """A run reports the norm, so that its ranks sum it with `--max-grad-norm 0` as well."""
    _, spec = job(layout=LAYOUTS[0])
    free = dataclasses.replace(spec, options=dataclasses.replace(spec.options, max_grad_norm=0.0))
    assert forecast.forecast_run(free).collectives == forecast.forecast_run(spec).collectives


def test_the_layout_that_is_chosen_is_the_plans_first() -> None:
    asked, spec = job(layout="auto")
    assert asked.auto
    record = JobRecorder(None)
    (found, _), chosen = forecast_policy.auto_layout(prepared(asked), dict(spec.config), record)
    plan = plan_training(
        "llama-3-8b", cluster="8xH100-SXM", seq_len=4096, global_batch=64, precision="bf16", top=50
    )
    legal = next(
        one
        for one in plan.layouts
        if one.fits and validate_layout(chosen.source.dimensions, one.layout, asked.workload)
    )
    assert chosen.layout.world_size == 8
    assert str(legal.layout) == found.layout == str(chosen.layout)
    assert found.step_seconds == pytest.approx(legal.step_seconds.median)
    (mine,) = [one for one in found.alternatives if one.chosen]
    assert found.alternatives[0] == mine
    assert mine.memory == max(found.peak_bytes)
    assert len(found.alternatives) == forecast_policy.CONSIDERED


def test_what_is_given_is_kept() -> None:
    asked, spec = job(layout="auto", tp=2, micro_batch_size=1)
    (found, _), chosen = forecast_policy.auto_layout(
        prepared(asked), dict(spec.config), JobRecorder(None)
    )
    assert chosen.layout.tp == 2
    assert chosen.layout.dp * (chosen.layout.microbatches or 1) == 64
    assert found.layout == str(chosen.layout)


def test_a_batch_that_no_layout_takes_is_rejected() -> None:
    asked, spec = job(layout="auto", global_batch=64, tp=7)
    with pytest.raises(OptionError, match="no layout of llama-3-8b"):
        forecast_policy.auto_layout(prepared(asked), dict(spec.config), JobRecorder(None))


def test_gpus_that_nothing_is_known_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal_fit, "gpu_here", lambda: None)
    asked, spec = job(layout="auto")
    (found, timeline), chosen = forecast_policy.auto_layout(
        prepared(asked), dict(spec.config), JobRecorder(None)
    )
    assert (found.known, timeline) == (False, None)
    assert "hocket probe" in found.why
    assert chosen.layout.axes_text() == "dp8"
    assert chosen.layout.zero == 1
    _, given = job(layout="dp8")
    forecast_policy.before(RunFolder(tmp_path), given, JobRecorder(None))
    assert "hocket probe" in json.loads((tmp_path / "forecast.json").read_text())["why"]


def test_the_prediction_is_in_the_run_folder(tmp_path: Path) -> None:
    _, spec = job(layout="dp8:zero=2,microbatches=8")
    events: list[dict[str, Any]] = []
    record = JobRecorder(events.append)
    forecast_policy.before(RunFolder(tmp_path), spec, record)
    known = forecast.read_forecast(RunFolder(tmp_path))
    assert known is not None
    found, timeline = known
    assert found.known
    assert timeline is not None
    assert found.cluster == "1x8xH100-SXM-80"
    assert "80% within" in str(events)
    events.clear()
    forecast_policy.before(RunFolder(tmp_path), spec, record)
    assert not events  # it was predicted already


def test_a_forecast_of_before_there_were_ranges_is_read() -> None:
    old = json.loads(Forecast(layout="dp1", step_seconds=1.0).to_json())
    del old["step_range"]
    assert Forecast.from_json(json.dumps(old)).step_range == ()


@pytest.mark.parametrize(
    ("environment", "ranks", "name"),
    [
        ({}, 1, "1x8xH100-SXM-80"),
        ({}, 4, "1x8xH100-SXM-80"),
        ({}, 16, "2x8xH100-SXM-80"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 16, "2x8xH100-SXM-80"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 1, "2x8xH100-SXM-80"),
        ({"SLURM_STEP_NUM_NODES": "4"}, 32, "4x8xH100-SXM-80"),
    ],
)
def test_the_gpus_of_a_run(
    environment: dict[str, str], ranks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    found = gpu_run.gpu_cluster("auto", at_least=ranks)
    assert found is not None
    assert found.name == name


def test_a_launcher_s_number_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(LayoutError, match="WORLD_SIZE is 'x' in the environment") as caught:
        gpu_run.gpu_cluster("auto", at_least=1)
    assert caught.value.hint == "unset WORLD_SIZE"


def test_a_run_on_some_gpus_of_a_probed_machine_is_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `hocket plan --cluster auto --layout dp2` is; a layout is chosen for as many as asked."""
    probed = measured_cluster(gpus("NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(machine, "kept", lambda device="auto": probed)
    _, spec = job(model="llama-3.2-1b", layout="dp2:microbatches=8", seq_len=2048, global_batch=32)
    assert forecast.run_target(spec) == probed
    assert gpu_run.gpu_cluster("auto") == probed
    fewer = gpu_run.gpu_cluster("auto", exactly=2)
    assert fewer is not None
    assert fewer.num_gpus == 2


def test_a_probed_machine_has_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a probe, `auto` and a run: the same problem, the same figures."""
    probed = measured_cluster(gpus("NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(machine, "kept", lambda device="auto": probed)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 4)
    machine.save_machine(probed, tmp_path / "probed.toml")
    values = {"global_batch": 32, "seq_len": 2048}
    asked, spec = job(model="llama-3.2-1b", layout="auto", **values)
    (found, _), _ = forecast_policy.auto_layout(
        prepared(asked), dict(spec.config), JobRecorder(None)
    )
    plan = plan_training(
        "llama-3.2-1b", cluster=str(tmp_path / "probed.toml"), precision="bf16", top=50, **values
    )
    assert probed.measured is not None
    assert (found.cluster, found.measured) == (plan.cluster, probed.measured.date)
    first = next(one for one in plan.layouts if str(one.layout) == found.layout)
    assert found.step_seconds == pytest.approx(first.step_seconds.median)
    assert first == next(one for one in plan.layouts if one.fits and one.runs_here)


def test_clusters_that_a_run_is_predicted_for(tmp_path: Path) -> None:
    cuda, cpu = TrainOptions(device="cuda"), TrainOptions(device="cpu")
    forecast_policy.reject_cluster("2x8xH200-SXM", cuda)
    with pytest.raises(OptionError, match="contains no measurements"):
        forecast_policy.reject_cluster("2x8xH200-SXM", cpu)
    cores = tmp_path / "cores.toml"
    machine.save_machine(measured_cluster(here()), cores)
    with pytest.raises(OptionError, match="is CPU cores"):
        forecast_policy.reject_cluster(str(cores), cuda)


@pytest.mark.torch
def test_a_model_that_the_catalogue_does_not_have_is_traced() -> None:
    """With the vocabulary of the run's own tokenizer, and as mixtures are split."""
    _, spec = job(
        model="tiny-mixtral", layout="dp4.ep2:microbatches=2", seq_len=64, global_batch=16
    )
    spec = dataclasses.replace(spec, config={**spec.config, "vocab_size": 257})
    gpus = catalogue_cluster("8xA100-SXM-80")
    shape = gpu_run.planner_shape(spec)
    assert shape.vocab == 257
    found, timeline = gpu_run.predicted_gpu_run(spec, gpus, considered=4)
    assert timeline is not None
    assert timeline.num_ranks == 4
    assert {"expert", "dp"} <= set(found.links)
    assert sum(one.chosen for one in found.alternatives) == 1
    assert {row["axis"] for row in found.collectives} >= {"expert", "dp"}


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["auto", "dp2.tp2"])
def test_servers_are_predicted_too(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the alternatives; `auto` takes the GPUs that are there."""
    seen = FoundDevices(devices=gpus("NVIDIA H100").devices)
    target = probe.ProbeTarget("cuda", here().host, seen)
    monkeypatch.setattr(hocket.launch.launcher, "cuda_shows", lambda: True)
    monkeypatch.setattr(probe, "present_machine", lambda device="auto": target)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 4)
    server = serve_request.server(
        {"model": str(model(tmp_path / "model")), "layout": layout, "device": "cuda",
         "dtype": "bf16"}
    )  # fmt: skip
    with Launcher("cpu", 1) as launcher:
        settled, found = serving_forecast.settle_layout(server, launcher, JobRecorder(None))
    assert found.known, found.why
    assert found.layout == str(settled.layout)
    assert found.cluster == "1x4xH100-SXM-80"
    assert settled.layout.world_size == 4
    assert found.decode
    assert found.memory[0]["total"] <= found.capacity
    assert [one.layout for one in found.alternatives if one.chosen] == [found.layout]
    assert len(found.alternatives) > 4
    if layout == "auto":
        assert found.alternatives[0].chosen
        assert settled.layout.axes_text() == "dp4"  # the model is small


def test_no_failure_of_a_prediction_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of an estimate")

    _, spec = job(layout="dp8")
    monkeypatch.setattr(gpu_run, "predicted_gpu_run", fails)
    forecast_policy.before(RunFolder(tmp_path), spec, JobRecorder(None))
    why = json.loads((tmp_path / "forecast.json").read_text())["why"]
    assert why == "the prediction failed: ZeroDivisionError: of an estimate"


@pytest.mark.parametrize(
    ("name", "left", "smaller"),
    [
        ("8xH100-SXM", 3, "3xH100-SXM"), ("2x8xH100-SXM", 12, "2x6xH100-SXM"),
        ("2x8xH100-SXM", 15, "2x7xH100-SXM"), ("2x8xH100-SXM", 16, "2x8xH100-SXM"),
        ("8xH100-SXM", 16, "8xH100-SXM"), ("4x8xH100-SXM@aws-p5", 4, "1x4xH100-SXM@aws-p5"),
    ],
)  # fmt: skip
def test_a_named_cluster_is_cut_to_the_gpus_that_are_left(
    tmp_path: Path, name: str, left: int, smaller: str
) -> None:
    found = gpu_run.gpu_cluster(name, exactly=left)
    assert found == catalogue_cluster(smaller)
    file = tmp_path / "own.toml"
    machine.save_machine(dataclasses.replace(catalogue_cluster(name), name="own"), file)
    own = gpu_run.gpu_cluster(str(file), exactly=left)
    assert own is not None
    assert (own.num_nodes, own.node.num_gpus, own.node.nics, own.node.network) == (
        found.num_nodes, found.node.num_gpus, found.node.nics, found.node.network,
    )  # fmt: skip


@pytest.mark.parametrize("left", [1, 2, 3, 7])
def test_an_elastic_run_with_a_named_cluster_is_planned_for_what_is_left(left: int) -> None:
    asked, spec = job(layout="auto", elastic=True, cluster="8xH100-SXM")
    asked = dataclasses.replace(asked, ranks=left)
    (found, _), chosen = forecast_policy.auto_layout(
        prepared(asked), dict(spec.config), JobRecorder(None)
    )
    assert found.known
    assert 1 <= chosen.layout.world_size <= left
    assert all(Layout.parse(one.layout).world_size <= left for one in found.alternatives)


def test_an_elastic_run_continues_on_fewer_gpus_than_its_cluster_was_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = measured_cluster(gpus("NVIDIA A100-SXM4-80GB"))
    assert probed.measured is not None
    then = probed.measured.devices
    machine.save_machine(probed, tmp_path / "probed.toml")
    there = FoundDevices(then[:-1])
    shown = dataclasses.replace(machine.present_machine("cpu"), kind="cuda", found=there)
    monkeypatch.setattr(machine, "present_machine", lambda device: shown)
    monkeypatch.setattr(devices, "visible_gpus", lambda: len(then) - 1)
    run = TrainOptions(device="cuda")
    with pytest.raises(OptionError, match=f"and {len(then)} are needed"):
        forecast_policy.reject_cluster(str(tmp_path / "probed.toml"), run)
    elastic = dataclasses.replace(run, elastic=True)
    forecast_policy.reject_cluster(str(tmp_path / "probed.toml"), elastic)
