"""A service on this machine: its GPUs are taken as they are there, CPU cores are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hocket.jobs import machine, probe
from hocket.jobs.measured_cluster import measured_cluster
from hocket.jobs.serving import plan as serve_plan
from hocket.probing.devices import FoundDevices
from hocket.spec.errors import OptionError
from tests.jobs.test_forecast import here
from tests.reporting.run_folders import gpus


def test_cores_are_refused_and_not_estimated_as_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.save_machine(measured_cluster(here()), tmp_path / "cpu.toml")
    with pytest.raises(OptionError, match="is CPU cores"):
        serve_plan.serve_plan("llama-3-8b", cluster=str(tmp_path / "cpu.toml"))
    host = here().host
    monkeypatch.setattr(
        probe, "present_machine", lambda: probe.ProbeTarget("cpu", host, FoundDevices())
    )
    with pytest.raises(OptionError, match="has no GPU that torch can use"):
        serve_plan.serve_plan("llama-3-8b", cluster="auto")


def test_the_gpus_that_are_there_are_all_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_cluster(gpus("NVIDIA A100-SXM4-80GB"))
    host = found.measured.host if found.measured else here().host
    monkeypatch.setattr(
        probe, "present_machine", lambda: probe.ProbeTarget("cuda", host, FoundDevices())
    )
    monkeypatch.setattr(
        machine, "named_cluster", lambda text: dataclasses.replace(found, name=text)
    )
    cluster, bounded = serve_plan._cluster("auto")
    assert bounded
    assert cluster.num_gpus == 4
