"""The page as a file: complete in itself, and nothing in it but what we wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.report import html, report_records
from hocket.reporting.decomposition import PARTS
from hocket.reporting.payload import MOST_EVENTS, _timeline
from hocket.spec.timeline import Event, Timeline
from tests.reporting.run_folders import gpus, make

HOSTILE = '</script><script>owned=1</script><img src=x onerror="owned=1">\u2028&amp;$title'


class Tags(HTMLParser):
    """Every start tag, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            self.inside[self.cdata_elem][-1] += data


def page_of(*paths: Path) -> str:
    return html(report_records(paths))


def data_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Tags(text).inside["script"][0])
    return found


def test_nothing_is_loaded(tmp_path: Path) -> None:
    text = page_of(make(tmp_path / "run"))
    tags = Tags(text).tags
    assert not [tag for tag, attrs in tags if {"src", "href", "action"} & set(attrs)]
    assert {tag for tag, _ in tags} <= {
        "html", "head", "meta", "title", "style", "body", "main", "noscript", "pre", "script",
    }  # fmt: skip
    style = "".join(Tags(text).inside["style"])
    assert not re.search(r"url\(|@import|@font-face", style)
    assert not re.search(r"fetch\(|XMLHttp|import\(|innerHTML|eval\(", text)


def test_the_policy_names_the_script_and_the_style_by_their_hash(tmp_path: Path) -> None:
    text = page_of(make(tmp_path / "run"))
    found = Tags(text)
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for code in (found.inside["script"][1], found.inside["style"][0]):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_a_hostile_name_stays_a_name(tmp_path: Path) -> None:
    run = make(tmp_path / "<b>run<!--", model=HOSTILE, data=HOSTILE, reason=HOSTILE)
    text = page_of(run)
    found = Tags(text)
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not [tag for tag, _ in found.tags if tag in ("img", "b")]
    assert "<!--" not in text
    (shown,) = data_of(text)["runs"]
    assert shown["model"] == HOSTILE
    assert shown["name"] == "<b>run<!--"
    assert shown["alternatives"][1]["reason"] == HOSTILE


def test_what_the_page_says(tmp_path: Path) -> None:
    (shown,) = data_of(page_of(make(tmp_path / "run")))["runs"]
    figures = {figure["title"]: figure for figure in shown["figures"]}
    assert figures["Time of a step"]["measured"] == 0.2
    assert figures["Time of a step"]["predicted"] == 0.18
    assert figures["Memory"]["measured"] == figures["Memory"]["predicted"] == 9_000_000
    assert figures["Throughput"]["measured"] == pytest.approx(16 * 128 / 0.2)
    assert set(shown["parts"]["measured"]["mean"]) == set(PARTS)
    assert "too low" in shown["verdict"]
    assert "difference is in compute" in shown["verdict"]
    assert shown["memory"]["capacity"] == 20_000_000
    axes = {row["axis"]: row for row in shown["traffic"]}
    assert axes["pp"]["count"] == 32
    assert axes["pp"]["link"] == "shared memory"
    assert axes["tp"]["measured"] > 0
    assert shown["curves"]["held_out"] == [[20, 2.5]]
    assert shown["mesh"]["ranks"][5] == {"tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert "2 replicas" in shown["words"]


def test_numbers_that_json_does_not_know_leave_gaps(tmp_path: Path) -> None:
    (shown,) = data_of(page_of(make(tmp_path / "run", metrics={"loss": float("nan")})))["runs"]
    assert shown["curves"]["loss"] == []
    assert "Loss" not in {figure["title"] for figure in shown["figures"]}


def test_a_run_without_a_prediction_says_so(tmp_path: Path) -> None:
    (shown,) = data_of(page_of(make(tmp_path / "run", predicted=False)))["runs"]
    assert set(shown["timelines"]) == {"measured"}
    assert shown["notes"] == ["nothing was predicted: the folder holds no forecast.json"]


def test_two_runs_stand_in_one_page(tmp_path: Path) -> None:
    text = page_of(make(tmp_path / "a"), make(tmp_path / "b", layout="dp4:microbatches=1"))
    one, two = data_of(text)["runs"]
    assert (one["name"], two["name"]) == ("a", "b")
    assert "Bubble" not in {figure["title"] for figure in two["figures"]}
    assert "<title>a and b: hocket report</title>" in text


def test_thousands_of_events_keep_the_page_small(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    events = [
        Event(
            rank=n % 8, lane="communication", kind="all-reduce", name="all-reduce tp",
            start=n * 1.234567e-5, end=n * 1.234567e-5 + 1.1e-5, axis="tp", bytes=131072,
        )
        for n in range(10_000)
    ]  # fmt: skip
    (run / "timeline.json").write_text(Timeline.of("measured", 8, events).to_json())
    assert len(page_of(run)) < 1_000_000


def test_beyond_its_limit_a_timeline_loses_the_shortest_events_and_says_so() -> None:
    events = [
        Event(rank=0, lane="compute", kind="F", name="f", start=n, end=n + (0.1 if n % 2 else 0.9))
        for n in range(MOST_EVENTS + 100)
    ]
    found = _timeline(Timeline.of("measured", 1, events))
    assert found["left_out"] == 100
    assert len(found["events"]["start"]) == MOST_EVENTS
    assert found["events"]["start"] == sorted(found["events"]["start"])
    assert found["events"]["length"].count(0.9e6) == (MOST_EVENTS + 100) // 2


def test_the_machine_is_drawn_with_its_ranks(tmp_path: Path) -> None:
    run = make(tmp_path / "run", layout="dp2.tp2", machine=gpus("<b>GPU</b>"))
    found = data_of(page_of(run))["runs"][0]["machine"]
    assert found["names"] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert found["ranks"] == [[0], [1], [2], [3]]
    bridge, beyond = found["cells"][0][1], found["cells"][0][2]
    assert (bridge["path"], bridge["rate"], bridge["measured"]) == ("NV4", 50e9, True)
    assert (beyond["path"], beyond["measured"]) == ("SYS", False)
    assert found["cells"][0][0] is None
    assert found["bracketed"]
    assert "<b>GPU" not in page_of(run)


def test_a_machine_that_was_not_probed_is_said_to_be_unknown(tmp_path: Path) -> None:
    from hocket.jobs.report import report_words

    run = make(tmp_path / "run")
    assert data_of(page_of(run))["runs"][0]["machine"] is None
    assert "not known, it was not probed" in report_words(report_records([run]))
    probed = make(tmp_path / "probed", machine=gpus())
    said = report_words(report_records([probed]))
    assert "links of a machine, each way, measured 2026-11-20" in said
    assert "NV4 50 GB/s" in said
    assert "SYS (31.5 GB/s)" in said
