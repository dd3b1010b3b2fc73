"""This machine as `--cluster auto`: kept, measured once at a time, and not another one."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue import hardware
from hocket.cli.main import main
from hocket.jobs import machine, probe
from hocket.probing import devices
from hocket.probing.devices import FoundDevices
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.measured import (
    Curve,
    Host,
    LatencyFit,
    MachineMeasurements,
    MeasuredMatmul,
    MeasuredStream,
)
from tests.probing import nvml

HOST = Host(name="here", cpu="EPYC", cores=2, memory=2**34)
MEASURED = MachineMeasurements(
    device="cpu",
    date="2026-11-20T12:00:00Z",
    torch="2.13.0",
    hocket="0.1.0",
    host=HOST,
    products=(MeasuredMatmul(dtype="fp32", form="nt", m=64, n=64, k=64, seconds=1e-5),),
    streams=(MeasuredStream(operation="copy", bytes=2**26, seconds=1e-2),),
)
CURVES = tuple(
    Curve(
        backend="shm",
        operation=operation,
        ranks=2,
        world=2,
        sizes=(64, 2**20),
        seconds=(1e-5, 1e-3),
        lines=(LatencyFit(bytes=2**20, latency=1e-5, rate=1e9),),
    )
    for operation in ("all-reduce", "all-gather", "reduce-scatter", "send")
)


class Here:
    """A machine that can be changed between two calls; counts how often it is measured."""

    def __init__(self) -> None:
        self.kind, self.host, self.found, self.count = "cpu", HOST, FoundDevices(), 0
        self.measured = MEASURED

    def present(self, device: str = "auto") -> probe.ProbeTarget:
        return probe.ProbeTarget(self.kind if device != "cpu" else "cpu", self.host, self.found)

    def measure(self, **options: Any) -> MachineMeasurements:
        self.count += 1
        return dataclasses.replace(self.measured, quick=options["quick"])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Here:
    found = Here()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "present_machine", found.present)
    monkeypatch.setattr(machine, "measure_machine", found.measure)
    monkeypatch.setattr(machine, "_require_torch", lambda: None)
    return found


def test_auto_measures_once_in_the_quick_form(here: Here) -> None:
    assert machine.kept() is None
    first = machine.named_cluster("auto")
    assert first.measured is not None
    assert first.measured.quick
    assert machine.named_cluster("auto") == first == machine.kept()
    assert here.count == 1


def test_another_machine_is_measured_again(here: Here) -> None:
    machine.named_cluster("auto")
    here.host = dataclasses.replace(HOST, load=1.5)
    machine.named_cluster("auto")
    assert here.count == 1
    here.host = dataclasses.replace(HOST, cores=1)
    machine.named_cluster("auto")
    here.found = devices.read_nvml(nvml.bridged_3090(), Path("/nowhere"))
    machine.named_cluster("auto")
    assert here.count == 3


def test_a_full_probe_is_kept_for_auto(here: Here) -> None:
    machine.probe()
    found = machine.named_cluster("auto")
    assert found.measured is not None
    assert not found.measured.quick
    assert here.count == 1
    machine.probe(quick=True)
    assert machine.named_cluster("auto") == found


def test_a_full_probe_that_was_disturbed_gives_way_to_a_quiet_quick_one(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter((1.2, 0.5, 0.0))

    def measure(*, quick: bool, **_: Any) -> MachineMeasurements:
        host = dataclasses.replace(HOST, load=next(loads))
        return dataclasses.replace(MEASURED, quick=quick, host=host)

    monkeypatch.setattr(machine, "measure_machine", measure)
    full = machine.probe()
    machine.probe(quick=True)
    assert machine.kept() == full, "one that was disturbed as well tells less"
    quiet = machine.probe(quick=True)
    assert machine.kept() == quiet != full


def test_what_was_cut_off_is_measured_again(here: Here) -> None:
    first = machine.named_cluster("auto")
    (file,) = machine.machine_folder().glob("*.toml")
    for text in ("", "name = ", file.read_text()[:-200], "\x00\xff"):
        file.write_text(text, encoding="latin-1")
        assert machine.named_cluster("auto") == first
    assert here.count == 5


def test_a_cache_that_cannot_be_written_costs_only_time(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine.named_cluster("auto") == machine.named_cluster("auto")
    assert here.count == 2


def test_one_probe_at_a_time(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.machine_folder().mkdir(parents=True)
    with open(machine.machine_folder() / "lock", "a+") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OptionError, match=r"another probe \(process 4711\)"):
            machine.probe()
        monkeypatch.setattr(machine, "PATIENCE", 0.3)
        with pytest.raises(OptionError, match="another probe"):
            machine.named_cluster("auto")
    assert here.count == 0
    machine.probe()
    assert (machine.machine_folder() / "lock").read_text() == str(os.getpid())


def test_ranks_beyond_the_cores(here: Here) -> None:
    four = machine.named_cluster("auto", ranks=4)
    assert (four.num_gpus, four.measured.host.cores) == (4, 2)  # type: ignore[union-attr]
    assert machine.named_cluster("2x8xH100-SXM", ranks=4).num_gpus == 16


def test_a_machine_that_is_not_this_one(here: Here) -> None:
    found = machine.named_cluster("auto")
    machine.require_here(found)
    machine.require_here(hardware.cluster("2x8xH100-SXM"))
    here.host = dataclasses.replace(HOST, cores=1)
    with pytest.raises(OptionError, match="measured with 2 cores on 2026-11-20") as caught:
        machine.require_here(found)
    assert "hocket probe" in str(caught.value)
    here.host = dataclasses.replace(HOST, name="there")
    with pytest.raises(OptionError, match="measured on here"):
        machine.require_here(found)


def test_gpus_that_vanish(here: Here) -> None:
    recorded = nvml.dgx_a100()
    here.kind, here.found = "cuda", devices.read_nvml(recorded, Path("/nowhere"))
    renamed = dataclasses.replace(
        MEASURED, device="cuda", devices=here.found.devices, pairs=here.found.pairs
    )
    found = machine.measured_cluster(renamed)
    machine.require_here(found)
    recorded.devices.pop()
    here.found = devices.read_nvml(recorded, Path("/nowhere"))
    with pytest.raises(OptionError, match=r"measured on 8 x NVIDIA A100.* shows 7 x NVIDIA A100"):
        machine.require_here(found)
    machine.require_here(found, ranks=4)
    here.found = devices.read_nvml(nvml.bridged_3090(), Path("/nowhere"))
    with pytest.raises(OptionError, match="shows 2 x NVIDIA GeForce RTX 3090"):
        machine.require_here(found, ranks=2)
    here.kind, here.found = "cpu", FoundDevices()
    with pytest.raises(OptionError, match="shows no GPU that torch can use"):
        machine.require_here(found)


# --- the verb -------------------------------------------------------------------------------------


@pytest.mark.train
def test_the_verb_writes_a_file_that_others_read(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here.measured = dataclasses.replace(MEASURED, curves=CURVES)
    out, drawing = tmp_path / "my cluster.toml", tmp_path / "topology.svg"
    assert main(["probe", "--quick", "--out", str(out), "--svg", str(drawing)]) == 0
    said = capsys.readouterr().out
    assert "2 cores of EPYC" in said
    assert str(out) in said
    assert machine.named_cluster(out) == machine.kept()
    assert drawing.read_text().startswith("<svg ")
    words = ["plan", "tiny-llama", "--cluster", str(out), "--seq-len", "64"]
    assert main([*words, "--global-batch", "4", "--dtype", "fp32"]) == 0
    assert "tiny-llama on here" in capsys.readouterr().out


def test_json_ends_with_the_measurement(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--quick", "--json"]) == 0
    *events, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(event["event"] in ("phase", "progress", "note") for event in events)
    assert (last.pop("event"), last.pop("schema")) == ("result", 1)
    assert MachineMeasurements.from_dict(last).host == HOST


def test_files_that_cannot_be_written_are_reported_before_anything_is_measured(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    places = [tmp_path, tmp_path / "no" / "such.toml", Path("/proc/cluster.toml")]
    if os.geteuid() != 0:  # who may write anywhere
        places.append(locked / "c.toml")
    for place in places:
        assert main(["probe", "--out", str(place)]) == 2
        assert main(["probe", "--svg", str(place)]) == 2
        assert str(place.name) in capsys.readouterr().err
    assert here.count == 0


def test_devices_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--device", "tpu"]) == 2
    assert "unknown device 'tpu'" in capsys.readouterr().err
    with pytest.raises(HocketError):
        probe.present_machine("tpu")


def put(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('bandwidth = "6.711 GB/s"', 'bandwidth = "-6.711 GB/s"', "is not a bandwidth"),
        ('bandwidth = "6.711 GB/s"', 'bandwidth = "0 GB/s"', "of 0 GB/s cannot be"),
        ('bandwidth = "6.711 GB/s"', 'bandwidth = "nan GB/s"', "is not a bandwidth"),
        ('bandwidth = "6.711 GB/s"', "bandwidth = nan", "is not a bandwidth"),
        ('bandwidth = "6.711 GB/s"', 'bandwidth = "1e300 GB/s"', "cannot be"),
        ('bandwidth = "6.711 GB/s"', 'bandwidth = "6.711 Gbps"', "is not a bandwidth"),
        ('bandwidth = "6.711 GB/s"\n', "", "has no bandwidth"),
        ('{ fp32 = "52.43 GFLOP/s" }', "3", "it is a rate for each precision"),
        ('{ fp32 = "52.43 GFLOP/s" }', "{}", "it is a rate for each precision"),
        ('"52.43 GFLOP/s"', '"0 GFLOP/s"', "fp32 of .* of 0 GFLOP/s cannot be"),
        ("num_gpus = 2", "num_gpus = 0", "at least 1"),
        ("num_gpus = 2", f"num_gpus = {'9' * 30}", "at most 1,000,000"),
        ("num_gpus = 2", f"num_gpus = {'9' * 5000}", "is not TOML"),
        ("num_gpus = 2", "num_gpus = 2.5", "whole number"),
        ("num_gpus = 2", 'num_gpus = "two"', "whole number"),
        ("num_nodes = 1", "num_nodes = 2", "2 nodes need a network"),
        ('usable = "8589934592 B"', 'usable = "80 GB"', "usable is 80 GB, of 8589934592 B"),
        ('memory = "8589934592 B"', 'memory = "8 B"', "cannot be"),
        ("domain = 2", "domain = -2", "at least 1"),
        ("domain = 2, generation = 0 }", "domain = 2", "is not TOML"),
        ("[gpu]", "[gqu]", "did you mean 'gpu'"),
        ("nvlink = 0", "nvlink = -3", "-3 is unknown"),
        ("cores = 2", "cores = 0", "cores of measured.host is 0"),
        ("cores = 2", "", "has no cores"),
        ('device = "cpu"', "device = 3", "must be a text"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_a_file_with_figures_that_cannot_be(
    here: Here, tmp_path: Path, old: str, new: str, words: str
) -> None:
    file = tmp_path / "c.toml"
    text = hardware.to_toml(machine.named_cluster("auto"))
    file.write_text(put(text, old, new))
    with pytest.raises(OptionError, match=words):
        machine.named_cluster(file)


def test_a_file_that_is_no_text_or_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    with pytest.raises(OptionError, match="there is no file") as caught:
        machine.named_cluster(file)
    assert f"hocket probe --out {file}" in str(caught.value)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="cannot be read"):
        machine.named_cluster(file)
    file.write_text("a=" + "[" * 5000)
    with pytest.raises(OptionError, match="is not TOML"):
        machine.named_cluster(file)
