"""What joins a machine's devices lands in the run folder; that its probe was disturbed is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hocket.jobs import machine, topology
from hocket.jobs.measured_cluster import measured_cluster
from hocket.spec.measured import MachineMeasurements
from hocket.spec.run import RunFolder
from tests.jobs.test_forecast import here


def cluster(folder: Path, *, load: float) -> tuple[MachineMeasurements, str]:
    made = here()
    made = dataclasses.replace(made, host=dataclasses.replace(made.host, load=load))
    machine.save_machine(measured_cluster(made), folder / "cluster.toml")
    return made, str(folder / "cluster.toml")


@pytest.mark.parametrize("load", [0.0, 1.2])
def test_it_is_kept_without_what_is_not_about_links(tmp_path: Path, load: float) -> None:
    made, file = cluster(tmp_path, load=load)
    folder = RunFolder(tmp_path)
    said = topology.keep(folder, file)
    kept = MachineMeasurements.from_json(folder.topology_file.read_text())
    assert (kept.host, kept.devices, kept.pairs) == (made.host, made.devices, made.pairs)
    assert not kept.products
    assert not kept.curves
    assert ("1.2 of 2 cores" in said) == bool(load)


def test_nothing_is_kept_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = cluster(tmp_path, load=0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path)
    Path(file).write_text("half a fi")
    for asked in ("none", "auto", file):
        assert topology.keep(folder, asked) == ""
        assert not folder.topology_file.exists()
