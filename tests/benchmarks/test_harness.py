"""The harness of the benchmarks: groups start, step, fail and end; figures are what they say."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.contenders import AXES, REFERENCE, contenders
from benchmarks.figures import Measured, best_peer, table
from benchmarks.groups import Contender, Group, GroupError, missing_packages
from benchmarks.peers import measure
from benchmarks.quiet import Watch
from benchmarks.workload import Workload

TINY = Workload(
    vocab=64, hidden=16, intermediate=32, layers=2, heads=2, kv_heads=1, seq_len=8, global_batch=4
)


def contender(name: str, entry: str, **fields: object) -> Contender:
    return Contender(name=name, axis="data", entry=entry, **fields)  # type: ignore[arg-type]


def measured(name: str, times: list[float], losses: list[float], ours: bool = False) -> Measured:
    found = Measured(contender(name, "m:f", ours=ours), rounds=[times], losses=losses)
    found.processor_seconds, found.disturbed = [0.5, 0.7], [0.0, 0.1]
    found.base_bytes, found.peak_bytes = [1_000_000] * 2, [3_000_000, 5_000_000]
    return found


def test_every_axis_has_peers_and_hocket_on_both_backends() -> None:
    every = contenders(4)
    assert len({c.name for c in every}) == len(every)
    for axis in AXES:
        assert any(c.axis == axis and not c.ours for c in every)
        if axis != "one":
            backends = {c.options["backend"] for c in every if c.axis == axis and c.ours}
            assert backends == {"shm", "gloo"}


def test_ratio_is_of_medians_to_the_best_peer_that_trains_the_same() -> None:
    rows = [
        measured("hocket", [0.1, 0.1, 0.4], [7.0, 7.1], ours=True),
        measured("slow", [0.2, 0.2, 0.2], [7.0, 7.1]),
        measured("wrong", [0.01, 0.01, 0.01], [7.0, 5.0]),
    ]
    reference = [7.0, 7.1]
    assert best_peer(rows, "data", reference) == pytest.approx(0.2)
    found = [m.row(TINY, 0.2, reference) for m in rows]
    assert found[0]["ratio_to_best_peer"] == pytest.approx(2.0)
    assert found[0]["tokens_per_second"] == pytest.approx(TINY.tokens / 0.1)
    assert found[0]["peak_bytes_above_imports"] == [2_000_000, 4_000_000]
    assert found[0]["processor_seconds"] == pytest.approx(0.6)
    assert found[2]["status"] == "computes something else"
    text = table(found, "data")
    assert "NOT THE SAME TRAINING" in text.splitlines()[-1]
    assert text.splitlines()[2].split()[1:5] == ["100.0", "150%", "320", "2.00"]


def test_a_missing_package_makes_a_contender_absent() -> None:
    assert missing_packages(sys.executable, ("json", "no_such_package")) == ["no_such_package"]
    nowhere = contender("nowhere", "m:f", requires=("no_such_package",))
    (found,) = measure(
        [nowhere],
        TINY,
        rounds=1,
        steps=1,
        warmup=0,
        pythons=[sys.executable],
        say=lambda text: None,
    )
    assert found.absent == "not installed: no_such_package"
    assert "absent" in table([found.row(TINY, None, [])], "data")


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_groups_take_turns_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.RESULTS", tmp_path)
    one = contender("one", "benchmarks.contenders.one_process:build", world_size=1)
    two = contender("two", "benchmarks.contenders.pytorch:data_parallel")
    broken = contender("broken", "benchmarks.contenders.one_process:no_such", world_size=1)
    found = measure(
        [one, two, broken],
        TINY,
        rounds=2,
        steps=1,
        warmup=1,
        pythons=[sys.executable],
        say=lambda text: None,
    )
    assert [len(m.losses) for m in found] == [3, 3, 0]
    assert found[1].loss_error(found[0].losses) < 1e-5
    assert len(found[1].peak_bytes) == 2
    assert len(found[1].processor_seconds) == 2
    assert min(found[1].processor_seconds) > 0
    assert min(found[1].disturbed) >= 0
    assert all(p >= b for p, b in zip(found[1].peak_bytes, found[1].base_bytes, strict=True))
    assert "no_such" in found[2].failed


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_group_that_dies_says_why_and_leaves_nobody(tmp_path: Path) -> None:
    dying = dataclasses.replace(contender("dying", "benchmarks.no_such_module:build"), world_size=2)
    with Group(dying, TINY, sys.executable, tmp_path / "log", timeout=80) as group:
        with pytest.raises(GroupError, match="no_such_module"):
            group.ready()
        pids = [p.pid for p in group.processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_watch_counts_others_and_not_its_own() -> None:
    spin = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        foreign, own = Watch([]), Watch([busy.pid])
        end = time.monotonic() + 60
        difference = 0.0
        while difference <= 0.1 and time.monotonic() < end:  # the more others run, the slower
            time.sleep(0.5)
            difference = foreign.foreign() - own.foreign()
        busy.kill()
    assert difference > 0.1


@pytest.mark.ranks
@pytest.mark.train
@pytest.mark.parametrize(
    ("axis", "names", "workload"),
    [
        ("context", {"PyTorch ring", "hocket cp2 ring on shm"}, TINY),
        ("expert", {"hocket dp2.ep2 on shm"}, dataclasses.replace(TINY, experts=4)),
    ],
)
def test_contenders_that_need_nothing_else_train_as_one_process(
    tmp_path: Path, axis: str, names: set[str], workload: Workload
) -> None:
    """Options of hocket that were renamed, and parts of PyTorch that were, show here."""
    workload = dataclasses.replace(workload, model_dir=str(tmp_path))
    workload.write_model(tmp_path)
    chosen = [c for c in contenders(4) if c.name in names | {REFERENCE} and c.axis in {axis, "one"}]
    assert len(chosen) == 1 + len(names)
    found = measure(chosen, workload, rounds=1, steps=2, warmup=1, pythons=[])
    assert not [m.failed or m.absent for m in found if m.failed or m.absent]
    for one in found[1:]:
        assert one.loss_error(found[0].losses) < 1e-4, (one.contender.name, one.losses)
