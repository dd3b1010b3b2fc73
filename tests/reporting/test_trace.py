"""The trace holds to the trace-event format: what Perfetto needs to draw it rightly."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hocket.reporting.record import read_run
from hocket.reporting.trace import trace_events, trace_json
from hocket.spec.layout import Layout
from hocket.spec.timeline import Event, Timeline
from tests.reporting.run_folders import make, measured

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check(events: list[dict[str, Any]]) -> None:
    """The rules of the format for the phases that are written."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[Any, list[str]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            assert event["name"] in METADATA
            key = "name" if event["name"].endswith("name") else "sort_index"
            assert set(event["args"]) == {key}
        else:
            assert event["ph"] in "sf"
            flows[event["id"]].append(event["ph"])
    for spans in threads.values():
        stack: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3, "spans of a thread overlap"
            stack.append(end)
    assert all(phases == ["s", "f"] for phases in flows.values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named


def test_all_ranks_of_both_timelines(tmp_path: Path) -> None:
    record = read_run(make(tmp_path / "run"))
    assert record.measured is not None
    assert record.predicted is not None
    trace = json.loads(trace_json([record]))
    events = trace["traceEvents"]
    check(events)
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(record.measured.events) + len(record.predicted.events)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"{s} rank {r}" for s in ("predicted", "measured") for r in range(8)}
    sends = sum(e.kind.startswith("SEND") for e in record.measured.events)
    assert sum(e["ph"] == "s" for e in events) == 2 * sends > 0


def test_a_flow_ends_in_the_receive_it_belongs_to(tmp_path: Path) -> None:
    record = read_run(make(tmp_path / "run", layout="pp2:microbatches=2"))
    assert record.measured is not None
    events = trace_events(record.measured, record.layout)
    ends = [e for e in events if e["ph"] == "f"]
    for end in ends:
        inside = [
            e
            for e in events
            if e["ph"] == "X"
            and (e["pid"], e["tid"]) == (end["pid"], end["tid"])
            and e["ts"] <= end["ts"] <= e["ts"] + e["dur"] + 1e-3
        ]
        assert any(e["cat"].startswith("RECV") for e in inside)


def test_spans_that_overlap_get_threads_of_their_own() -> None:
    spans = [(0, 4), (1, 3), (2, 6), (5, 7)]
    events = [
        Event(rank=0, lane="communication", kind="all-reduce", name=str(at), start=a, end=b)
        for at, (a, b) in enumerate(spans)
    ]
    found = trace_events(Timeline.of("measured", 1, events))
    check(found)
    threads = {e["name"]: e["tid"] for e in found if e["ph"] == "X"}
    assert threads["0"] == threads["1"] != threads["2"]


def test_the_check_sees_an_overlap() -> None:
    wrong = {"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 0, "dur": 5}
    with pytest.raises(AssertionError, match="overlap"):
        check([wrong, {**wrong, "ts": 3}])


def test_further_steps_follow_on_the_same_ranks(tmp_path: Path) -> None:
    layout = Layout.parse("dp2.pp2.tp2:microbatches=4")
    run = make(tmp_path / "run")
    steps = [measured(layout, 4, slower) for slower in (1.0, 1.3)]
    rows = [{"step": 8 + i, "timeline": json.loads(one.to_json())} for i, one in enumerate(steps)]
    (run / "timeline.later.json").write_text(json.dumps(rows))
    record = read_run(run)
    assert [step for step, _ in record.later] == [8, 9]
    events = json.loads(trace_json([record]))["traceEvents"]
    check(events)
    alone = [e for e in events if e["ph"] == "X" and e["pid"] == 8]  # rank 0, measured
    starts = [e["ts"] for e in alone if e["cat"] == "F" and e["args"]["microbatch"] == 0]
    assert record.measured is not None
    first, second = record.measured.duration * 1e6, steps[0].duration * 1e6
    assert starts == pytest.approx([0.0, first, first + second])
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(flows) == len(set(flows))


def test_later_steps_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "timeline.later.json").write_text('[{"step": 8, "timel')
    record = read_run(run)
    assert record.later == ()
    assert any("timeline.later.json" in note for note in record.notes)
