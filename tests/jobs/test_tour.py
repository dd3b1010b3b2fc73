"""The tour: every stop is run, predicts, measures and is told in two languages."""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs.tour import ATTEMPTS, judge_stop, rendered
from hocket.jobs.tour_runner import SIZES, WIDE
from hocket.jobs.tour_stops import STOPS, TIMED, column_stop
from hocket.reporting.tour import page_markdown, stop_text, tour_words
from hocket.spec.errors import OptionError
from hocket.spec.tour import LANGUAGES, VERDICTS, Stop

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_both_languages_tell_the_same_stops_with_the_same_numbers() -> None:
    english, korean = (tour_words(language) for language in LANGUAGES)
    assert list(english["stops"]) == list(korean["stops"])
    assert set(STOPS) <= set(english["stops"])
    assert set(english["verdicts"]) == set(korean["verdicts"]) == set(VERDICTS)
    for key, stop in english["stops"].items():
        for name, sentence in stop.items():
            assert fields(sentence) == fields(korean["stops"][key][name]), (key, name)


def fields(sentence: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(sentence) if field}


def test_an_unknown_stop_or_language_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tour", "--stops", "half_layer"]) == 2
    assert "half_layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "said"),
    [(".", "is a folder"), ("nowhere/page.md", "no folder"), ("/proc/p.md", "/proc")],
)
def test_a_page_that_cannot_be_written_is_reported_before_the_walk(
    out: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tour", "--stops", "pool", "--out", out]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""
    with pytest.raises(OptionError, match="kor"):
        rendered(None, 0, "kor")


def test_the_split_by_columns_is_exact_and_by_rows_is_not() -> None:
    stop = column_stop(None)  # type: ignore[arg-type]  needs nothing that runs
    assert stop.verdict == "true"
    assert float(stop.values["columns"]) < 1e-12 < float(stop.values["rows"])


def test_a_stop_is_reported_in_korean_within_the_width() -> None:
    import unicodedata

    text = rendered(column_stop(None), 5, "ko", 80)  # type: ignore[arg-type]
    assert "판정" in text
    for line in text.splitlines():
        assert sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line) <= 80, line


def three_bars() -> Stop:
    bars = (("m=1 {predicted}", 0.5, "50%"), ("{measured}", 0.25, "25%"))
    values = {"predicted": "1", "measured": "1"}
    return Stop(key="microbatches", command="x", verdict="true_if", values=values, bars=bars)


def test_a_condition_that_was_not_seen_stays_one() -> None:
    missed = dataclasses.replace(three_bars(), verdict="false")
    assert "true, if: the stages take equally long" in stop_text(three_bars(), 1, "en", 200)
    assert "not seen here; true, if: the stages take" in stop_text(missed, 1, "en", 200)


class Noted:
    """A guide that counts how often it is asked to measure again."""

    forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize(
    ("key", "seen", "cores", "verdict", "again"),
    [
        ("microbatches", ["true_if"], 1.0, "true_if", 0),
        ("microbatches", ["false", "true_if"], 1.0, "true_if", 1),
        ("crossover", ["false"] * ATTEMPTS, 1.0, "busy", ATTEMPTS - 1),
        ("crossover", ["false"] * ATTEMPTS, 0.0, "false", ATTEMPTS - 1),
        ("threads", ["false"], 1.0, "false", 0),
    ],
)
def test_a_claim_about_times_is_measured_again_and_not_judged_on_a_busy_machine(
    key: str,
    seen: list[str],
    cores: float,
    verdict: str,
    again: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.jobs.tour.BackgroundLoad.cores", lambda _: cores)
    guide, left = Noted(), list(seen)

    def stop(_: object) -> Stop:
        return dataclasses.replace(three_bars(), key=key, verdict=left.pop(0))

    done = judge_stop(key, stop, guide)  # type: ignore[arg-type]  all that it is asked for
    assert (done.verdict, guide.forgotten, left) == (verdict, again, [])
    assert set(STOPS) > TIMED


def test_the_page_holds_every_stop() -> None:
    stop = column_stop(None)  # type: ignore[arg-type]
    page = page_markdown([stop, stop], 2)
    assert page.count("## ") == 2
    assert "{" not in page_markdown([three_bars()], 2, "ko")
    assert "hocket check tiny-llama --layout tp2" in page
    assert "{" not in page


def test_the_pages_in_the_docs_hold_every_stop() -> None:
    for language, page in (("en", "tour.md"), ("ko", "tour.ko.md")):
        text = (DOCS / page).read_text()
        titles = [tour_words(language)["stops"][key]["title"] for key in STOPS]
        assert [t for t in text.splitlines() if t.startswith("## ")] == [
            f"## {number}. {title}" for number, title in enumerate(titles, 1)
        ]


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(240)
def test_stops_that_judge_times_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They measure and speak; what they find is this machine's, at this moment."""
    monkeypatch.setattr("hocket.jobs.tour.ATTEMPTS", 1)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    for name, value in (*small.items(), ("num_key_value_heads", 4)):
        monkeypatch.setitem(WIDE, name, value)
    monkeypatch.setitem(SIZES, "seq_len", 16)
    code = main(["tour", "--stops", *sorted(TIMED), "--json"])
    stops = [Stop.from_json(row) for row in json.loads(capsys.readouterr().out)["stops"]]
    assert {stop.key for stop in stops} == TIMED
    assert code == int(any(stop.verdict == "false" for stop in stops))
    for stop in stops:
        assert stop.verdict in VERDICTS
        assert stop.values
        assert "{" not in stop_text(stop, 1, "en", 200)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(240)
def test_tour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "tour.md"
    code = main(
        ["tour", "--stops", "threads", "columns", "half_layers", "three",
         "--out", str(page), "--json"]
    )  # fmt: skip
    stops = [Stop.from_json(row) for row in json.loads(capsys.readouterr().out)["stops"]]
    assert code == 0, stops
    assert [stop.key for stop in stops] == ["threads", "columns", "half_layers", "three"]
    assert all(stop.verdict == "true" for stop in stops)
    assert stops[0].values["predicted"] == stops[0].values["measured"]
    assert stops[2].values["measured"] == "4"
    assert stops[3].values["measured"] == "25.0%"
    assert "## 4." in page.read_text()
