"""The report of a server: predicted and measured, over load, from whatever its folder holds."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.reporting import served
from hocket.reporting.served_page import served_page
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from hocket.spec.serving import ServeOptions
from hocket.spec.serving_forecast import (
    ConsideredServer,
    Decode,
    Need,
    Percentiles,
    Prefill,
    ReplicaMeasured,
    ServiceLoad,
    ServingForecast,
    ServingMeasured,
)

LOAD = ServiceLoad(
    rate=2.0, tokens_per_second=100.0, ttft_p50=0.1, ttft_p90=0.2, ttft_p99=0.3, tpot_p50=0.01,
    tpot_p90=0.02, tpot_p99=0.03, batch=4.0,
)  # fmt: skip

FORECAST = ServingForecast(
    layout="dp2",
    decode=(
        Decode(batch=1, context=100, seconds=0.010),
        Decode(batch=9, context=100, seconds=0.018),
        Decode(batch=1, context=200, seconds=0.012),
        Decode(batch=9, context=200, seconds=0.022),
    ),
    prefill=(Prefill(tokens=16, seconds=0.01), Prefill(tokens=64, seconds=0.04)),
    tokens_per_second=500.0,
    prompt_len=64,
    output_len=32,
    ttft_ms=2000.0,
    tpot_ms=100.0,
    loads=(LOAD, dataclasses.replace(LOAD, rate=4.0)),
    needs=(Need(rate=8.0, replicas=3, within_goals=None),),
    memory=({"weights": 1000, "step": 10, "cache": 500, "total": 1510},),
    cache_bytes=8,
    cache_tokens=4096,
    alternatives=(
        ConsideredServer(layout="dp2", ranks=2, tokens_per_second=1000.0, ttft=0.1, tpot=0.01,
                cache_tokens=4096, chosen=True),
        ConsideredServer(layout="tp2", ranks=2, tokens_per_second=900.0, ttft=0.1, tpot=0.01,
                cache_tokens=4096, fits=False),
    ),
    cluster="here",
    measured="2026-11-20, full",
    notes=("something was assumed",),
)  # fmt: skip

MEASURED = ServingMeasured(
    layout="dp2",
    seconds=100.0,
    start_seconds=3.0,
    requests=40,
    refused=2,
    failed=1,
    restarts=1,
    prompt_tokens=4000,
    cached_tokens=1000,
    output_tokens=1600,
    busy_seconds=20.0,
    ttft=Percentiles(p50=0.05, p90=0.06, p99=0.07),
    tpot=Percentiles(p50=0.01, p90=0.02, p99=0.03),
    end_to_end=Percentiles(p50=0.5, p90=0.6, p99=0.7),
    loads=(LOAD,),
    replicas=(
        ReplicaMeasured(
            number=0,
            starts=2,
            requests=30,
            cache_tokens=4096,
            decode=(
                Decode(batch=1, context=150, seconds=0.010, count=300),
                Decode(batch=5, context=150, seconds=0.020, count=100),
            ),
            prefill=(Prefill(tokens=40, seconds=0.03, count=9),),
            memory=({"weights": 1000, "cache": 600},),
        ),
        ReplicaMeasured(
            number=1, requests=10, cache_tokens=4096,
            decode=(Decode(batch=1, context=150, seconds=0.014, count=100),),
        ),
    ),
)  # fmt: skip


def folder(
    path: Path,
    forecast: ServingForecast | None = FORECAST,
    measured: ServingMeasured | None = MEASURED,
    model: str = "model",
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(
        model=model,
        config={"model_type": "llama"},
        layout=Layout(dp=2),
        command="serve",
        serving=ServeOptions(max_num_batched_tokens=128, max_num_seqs=16, max_model_len=256),
    )
    (path / "run.json").write_text(spec.to_json())
    if forecast is not None:
        (path / "forecast.json").write_text(forecast.to_json())
    if measured is not None:
        (path / "measured.json").write_text(measured.to_json())
    return path


def test_a_server_that_others_disturbed_says_so(tmp_path: Path) -> None:
    run = folder(tmp_path)
    assert not any("other programs" in note for note in served.read_served(run).notes)
    (run / "others.json").write_text('{"cores": 1.25}')
    assert any("other programs took 1.2 cores" in note for note in served.read_served(run).notes)


def test_the_words_are_read_back_equal() -> None:
    assert ServingForecast.from_json(FORECAST.to_json()) == FORECAST
    assert ServingMeasured.from_json(MEASURED.to_json()) == MEASURED
    assert not ServingForecast.none("dp1", "no reason").known


def test_predictions_are_next_to_what_was_measured_at_its_own_batch_and_context(
    tmp_path: Path,
) -> None:
    found = served.read_served(folder(tmp_path))
    first, second = served.round_seconds(found)
    # One request of 150 tokens: halfway between contexts; two replicas' rounds in one.
    assert first.predicted == pytest.approx(0.011)
    assert first.measured == pytest.approx(0.011)
    assert first.count == 400
    # Five of nine: halfway in batch, halfway in context.
    assert second.predicted == pytest.approx((0.014 + 0.017) / 2)
    assert second.off == pytest.approx(0.0155 / 0.020 - 1)
    (prompt,) = served.prompts(found)
    assert prompt.predicted == pytest.approx(0.025)
    titles = {row.title: row for row in served.served_figures(found)}
    assert titles["cache of a replica"].measured == 4096
    assert titles["its cache"].off == pytest.approx(500 / 600 - 1)
    assert "off by" in served.served_verdict(found)


def test_the_text_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder(tmp_path)), "--format", "text"]) == 0
    said = capsys.readouterr().out
    for words in (
        "predicted", "measured", "off by", "first token", "requests/s", "from measured steps",
        "40 answered, 2 rejected, 1 lost", "25.0% of the prompts' tokens", "this server",
        "does not fit", "started again once", "1 request of 150 tokens", "80 tokens/s",
        "within the goals",
        "off by: predicted over measured",
    ):  # fmt: skip
        assert words in said, words


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    path = folder(tmp_path / "x", model=evil)
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    page = Page()
    page.feed(text)
    names = {tag for tag, _ in page.tags}
    assert {"svg", "table", "section"} <= names
    assert not names & {"script", "img", "link", "iframe", "object"}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    assert evil not in text
    assert "&lt;script&gt;" in text
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    # Every number of every chart is one.
    assert "nan" not in " ".join(str(v) for _, a in page.tags for v in a.values()).lower()
    assert text.count("<svg") == 4
    assert "off by: predicted over measured" in text


def test_a_picture_and_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two", None)
    assert main(["report", str(one), str(two), "--format", "png"]) == 0
    assert main(["report", str(one), str(two), "--format", "text"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"measured +one +two", said)
    assert main(["report", str(one), str(two)]) == 0


@pytest.mark.parametrize("counts", [7, [], "x", {"preempted": []}])
def test_counts_that_are_none_are_named_and_left_out(tmp_path: Path, counts: object) -> None:
    path = folder(tmp_path, FORECAST, MEASURED)
    data = json.loads((path / "measured.json").read_text())
    data["replicas"][0]["counts"] = counts
    (path / "measured.json").write_text(json.dumps(data))
    record = served.read_served(path)
    assert any("counts is" in note for note in record.notes), record.notes
    assert main(["report", str(path)]) == 0


@pytest.mark.parametrize("kind", ["weights", "cache"])
def test_a_prediction_that_lacks_a_kind_of_memory_is_shown(tmp_path: Path, kind: str) -> None:
    path = folder(tmp_path, FORECAST, MEASURED)
    data = json.loads((path / "forecast.json").read_text())
    del data["memory"][0][kind]
    (path / "forecast.json").write_text(json.dumps(data))
    assert main(["report", str(path)]) == 0


@pytest.mark.parametrize("left", ["none", "forecast", "why", "torn", "untold"])
def test_whatever_is_there_is_shown(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(
        tmp_path,
        ServingForecast.none("dp2", "nobody probed") if left == "why" else FORECAST,
        None
        if left == "forecast"
        else ServingMeasured(layout="dp2")
        if left == "none"
        else MEASURED,
    )
    if left == "torn":
        (path / "forecast.json").write_text('{"serving": true')
        (path / "measured.json").write_text("[]")
    if left == "untold":
        (path / "forecast.json").unlink()
    assert main(["report", str(path), "--format", "text"]) == 0
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    expected = {
        "none": "no request has been answered",
        "forecast": "never ready",
        "why": "nobody probed",
        "torn": "cannot be read",
        "untold": "no forecast.json",
    }
    assert expected[left] in said


def test_a_server_and_a_training_job_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "train"
    other.mkdir()
    spec = json.loads((folder(tmp_path / "one") / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**spec, "command": "train", "serving": None}))
    assert main(["report", str(tmp_path / "one"), str(other)]) == 2
    assert "a server's folder" in capsys.readouterr().err


def test_there_is_no_trace_without_a_recorded_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder(tmp_path)), "--format", "trace"]) == 2
    assert "no timeline" in capsys.readouterr().err


def test_curves_stand_in_numbers_too(tmp_path: Path) -> None:
    found = served.read_served(folder(tmp_path))
    page = served_page([found], version="0", made="now")
    cells = "".join(f"<td>{cell}</td>" for cell in served.load_rows([LOAD])[0])
    several = served.load_curves(found)
    assert several
    assert page.count("<th>at once</th>") == len(several)
    assert page.count(f"<tr>{cells}</tr>") == sum(loads.count(LOAD) for _, loads in several) > 0


def test_an_axis_names_thousands_in_full() -> None:
    from hocket.reporting.served_page import _chart

    drawn = _chart("tokens/s", [("predicted", [(1.0, 100.0), (12.3, 1064.0)])])
    assert ">1,064</text>" in drawn
    assert ">12.3</text>" in drawn
    assert "e+0" not in drawn
