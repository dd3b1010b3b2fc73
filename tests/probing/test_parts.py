"""The parent's side of a probe: parts that are missing are said to be, and nothing more is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hocket.launch
from hocket.jobs import probe
from hocket.jobs.measured_cluster import measured_cluster
from hocket.launch.failure import Failure, to_error
from hocket.probing import devices
from hocket.probing.devices import FoundDevices
from hocket.spec.errors import OptionError, RankFailure
from hocket.spec.measured import Host
from tests.probing import nvml

PRODUCTS = {
    "event": "measured",
    "key": "products",
    "rows": [["fp32", "nt", 64, 64, 64, 1e-5, 0.1]],
}
STREAMS = {"event": "measured", "key": "streams", "rows": [["copy", 2**26, 1e-2, 0.1]]}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ranks say, in order; an exception among it ends them. What they are asked comes last."""
    said: list[Any] = []

    class Launcher:
        def __init__(self, device: str, **options: Any) -> None:
            self.device = device

        def __enter__(self) -> Launcher:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(
            self, entry: str, size: int, payload: Any, *, on_event: Callable[[Any], None]
        ) -> None:
            asked = {"entry": entry, "size": size, "device": self.device, **payload}
            for event in list(said):
                if isinstance(event, Exception):
                    said.append(asked)
                    raise event
                on_event(event)
            said.append(asked)

    monkeypatch.setattr(hocket.launch, "Launcher", Launcher)
    return said


def see(monkeypatch: pytest.MonkeyPatch, found: probe.ProbeTarget) -> None:
    monkeypatch.setattr(probe, "present_machine", lambda device="auto": found)


HERE = probe.ProbeTarget(
    "cpu", Host(name="here", cpu="EPYC", cores=2, memory=2**34), FoundDevices()
)


@pytest.mark.train
def test_everything_that_ranks_say_is_kept(
    monkeypatch: pytest.MonkeyPatch, ranks: list[dict[str, Any]]
) -> None:
    see(monkeypatch, HERE)
    heard: list[Any] = []
    ranks += [PRODUCTS, {"event": "lacking", "what": "the moon"}, STREAMS]
    ranks += [{"event": "load", "cores": 0.02}]
    found = probe.measure_machine(quick=True, on_event=heard.append)
    assert len(found.products) == len(found.streams) == 1
    assert found.unknown[0] == "the moon"
    assert found.host.load == 0.02
    assert not any("other programs" in text for text in found.unknown)
    assert heard[0] == PRODUCTS
    asked = ranks[-1]
    assert (asked["size"], asked["worlds"], asked["device"]) == (4, (2, 4), "cpu")


@pytest.mark.train
def test_a_load_is_said(monkeypatch: pytest.MonkeyPatch, ranks: list[dict[str, Any]]) -> None:
    see(monkeypatch, HERE)
    ranks += [PRODUCTS, {"event": "load", "cores": 1.5}]
    assert "other programs took 1.5 of its 2 cores" in probe.measure_machine().unknown[-1]


@pytest.mark.train
def test_a_rank_that_dies_costs_what_comes_after(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any]
) -> None:
    see(monkeypatch, HERE)
    killed = [Failure(rank=0, pid=3, time=1.0, report=None, code=-9)]
    killed += [Failure(rank=1, pid=4, time=2.0, report=None, code=-15)]
    ranks += [PRODUCTS, STREAMS, to_error(killed, 2)]
    found = probe.measure_machine()
    assert found.unknown[0] == (
        "what comes after streams, where a rank failed: rank 0 of 2 (process 3) was killed by "
        "SIGKILL (out of memory, unless a user killed it: a smaller batch, or more tp or pp)"
    )
    assert measured_cluster(found).num_gpus == 2


def test_ranks_that_die_at_once_fail(monkeypatch: pytest.MonkeyPatch, ranks: list[Any]) -> None:
    see(monkeypatch, HERE)
    ranks += [RankFailure("rank 0 died")]
    with pytest.raises(RankFailure, match="rank 0 died"):
        probe.measure_machine()


@pytest.mark.train
def test_nothing_can_be_estimated_without_products(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any]
) -> None:
    see(monkeypatch, HERE)
    ranks += [STREAMS]
    with pytest.raises(OptionError, match="no matmul was measured"):
        measured_cluster(probe.measure_machine())


@pytest.mark.train
def test_what_nvml_says_and_what_was_measured_come_together(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any]
) -> None:
    recorded = devices.read_nvml(nvml.dgx_a100(), Path("/nowhere"))
    see(monkeypatch, probe.ProbeTarget("cuda", HERE.host, recorded))
    rows = [[0, 1, "", False, 0, 2.5e11, 2e-5, True], [2, 7, "", False, 0, 2.4e11, 2e-5, True]]
    ranks += [PRODUCTS, {"event": "measured", "key": "pairs", "rows": rows}]
    found = probe.measure_machine()
    assert len(found.pairs) == 28
    by_ends = {(p.first, p.second): p for p in found.pairs}
    assert (by_ends[0, 1].path, by_ends[0, 1].rate, by_ends[0, 1].measured) == (
        "NV12",
        2.5e11,
        True,
    )
    assert (by_ends[0, 2].path, by_ends[0, 2].rate, by_ends[0, 2].measured) == ("NV12", 0.0, False)
    asked = ranks[-1]
    assert (asked["size"], asked["worlds"], asked["pairs"]) == (8, (2, 4, 8), 8)


def test_a_launcher_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(OptionError, match="starts its own ranks"):
        probe.measure_machine()
