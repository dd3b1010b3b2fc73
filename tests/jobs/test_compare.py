"""The comparison: every strategy runs the same job, and says truly what it came to."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hocket.cli.main import main
from hocket.jobs.compare import compare_request, outcome, pipeline_microbatches, source_with_layers
from hocket.models.source import resolve_model
from hocket.reporting.comparison import comparison_text, sweep_text
from hocket.spec.comparison import (
    Comparison,
    Point,
    Strategy,
    StrategyResult,
    chosen_strategies,
    strategies,
)
from hocket.spec.errors import ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.timeline import Event, Timeline


def test_the_ways_cover_every_kind_and_fit_the_batch() -> None:
    found = {strategy.name: strategy.layout for strategy in strategies(2, 4, 8)}
    assert found["one"].world_size == 1
    assert found["threads"].data_parallel == "threads"
    assert found["layerwise"].schedule == "sequential"
    assert found["layerwise"].microbatches == 1
    assert found["gpipe"].microbatches == found["1f1b"].microbatches == 4
    assert found["data+pipeline"].axes_text() == "dp2.pp2"
    assert {strategy.layout.world_size for strategy in strategies(8, 4, 8)} == {1, 8}
    # Six sequences over two data ranks: three each, so four microbatches become three.
    assert {w.name: w.layout for w in strategies(2, 4, 6)}["data+pipeline"].microbatches == 3


def test_ways_are_chosen_by_name_or_layout_and_one_process_stays() -> None:
    known = strategies(2, 4, 8)
    found = chosen_strategies(("tensor", "dp2.tp2", "tp2"), known)
    assert [strategy.layout.axes_text() for strategy in found] == ["dp1", "tp2", "dp2.tp2", "tp2"]
    with pytest.raises(OptionError, match="tensorr") as error:
        chosen_strategies(("tensorr",), known)
    assert "tensor" in str(error.value.hint)


@pytest.mark.parametrize(
    "values", [{"devices": 1}, {"microbatches": 0}, {"input_work": -1.0}, {"input_work": 1e9}]
)
def test_values_that_cannot_be(values: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        compare_request(**values)


@pytest.mark.parametrize(
    ("wanted", "batch", "count"),
    [(None, 8, 4), (None, 6, 3), (None, 7, 1), (2, 8, 2), (8, 8, 8), (1, 3, 1)],
)
def test_microbatches_divide_the_batch(wanted: int | None, batch: int, count: int) -> None:
    assert pipeline_microbatches(compare_request(microbatches=wanted), batch) == count


@pytest.mark.parametrize(
    ("wanted", "batch", "near"),
    [(3, 8, "--microbatches 2 or --microbatches 4"), (16, 8, "--microbatches 8")],
)
def test_microbatches_that_do_not_are_refused(wanted: int, batch: int, near: str) -> None:
    with pytest.raises(OptionError, match=f"does not divide into {wanted} microbatches") as error:
        pipeline_microbatches(compare_request(microbatches=wanted), batch)
    assert error.value.hint == near


@pytest.mark.parametrize("more", [[], ["--sweep", "devices"], ["--sweep", "layers"]])
def test_they_are_refused_before_anything_starts(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "tiny-llama", "--microbatches", "3", "--global-batch", "8", *more]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "a batch of 8 sequences does not divide into 3 microbatches" in said
    assert "1, 2, 4, 8" in said


def test_idle_counts_what_waits_inside_an_action() -> None:
    def event(rank: int, lane: str, kind: str, start: float, end: float, axis: str = "") -> Event:
        return Event(
            rank=rank, lane=lane, kind=kind, name=kind, start=start, end=end, axis=axis or None
        )

    events = [
        event(0, "compute", "F", 0.0, 4.0),
        event(0, "communication", "all-reduce", 1.0, 2.0, "tp"),  # inside, blocking
        event(0, "communication", "all-reduce", 2.5, 4.0, "dp"),  # beside
        event(1, "compute", "F", 5.0, 10.0),
    ]
    timeline = Timeline.of("measured", 2, events)
    assert timeline.idle == pytest.approx(1 - (3 + 5) / 20)
    assert Timeline.of("measured", 1, []).idle == 0.0


@pytest.mark.train
def test_layers_are_changed_and_what_is_per_layer_follows() -> None:
    source = resolve_model("tiny-qwen3")
    deeper = source_with_layers(dataclasses.replace(source, weights=None), 6)
    assert deeper.dimensions.num_layers == 6
    config = {**source.config, "layer_types": ["full_attention", "sliding_attention"]}
    changed = source_with_layers(dataclasses.replace(source, config=config), 3).config
    assert changed["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    config = {**source.config, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    assert len(config["mlp_layer_types"]) == config["num_hidden_layers"]
    changed = source_with_layers(dataclasses.replace(source, config=config), 6).config
    assert changed["mlp_layer_types"] == ["dense", *["sparse"] * 3, "dense", "sparse"]
    with pytest.raises(ModelError, match="does not specify its number of layers"):
        source_with_layers(dataclasses.replace(source, config={"model_type": "qwen3"}), 2)


def fake(name: str, title: str, layout: str, **values: object) -> StrategyResult:
    strategy = Strategy(name=name, title=title, layout=Layout.parse(layout))
    row = {"parameters": 1, "gradients": 1, "optimizer": 2, "activations": 6, "total": 10}
    values = {"step_seconds": 0.1, "memory": (row,), "equal": True, **values}
    return StrategyResult(strategy=strategy, **values)  # type: ignore[arg-type]


def test_the_tables_say_what_is_wrong_and_what_was_not_run() -> None:
    first = {"parameters": 1, "gradients": 1, "optimizer": 2, "activations": 9, "total": 2000}
    other = {**first, "optimizer": 0, "total": 1000}
    rows = (
        fake("one", "one process", "dp1"),
        fake(
            "threads", "DataParallel (threads)", "dp2:data_parallel=threads",
            memory=(first, other), loaded_seconds=0.15,
        ),
        fake("data", "DistributedDataParallel", "dp2", loaded_seconds=0.11, equal=False),
        fake("tensor", "tensor parallel", "tp64", reason="4 heads do not divide over tp 64"),
    )  # fmt: skip
    found = Comparison(model="m", tokens=1000, cores=1, input_work=5.0, outcomes=rows)
    text = comparison_text(found)
    assert not found.equal
    assert "NO" in text
    assert "10,000" in text, "tokens a second"
    assert "tensor parallel was not run: 4 heads do not divide over tp 64" in text
    assert "first device holds 2 KB, each other 1 KB" in text
    assert "costs threads +50 ms a step (one interpreter lock), processes +10 ms" in text
    assert json.loads(json.dumps(found.to_json()))["strategies"][1]["tokens_per_second"] == 10000


def test_a_sweep_is_drawn_with_what_equal_stages_would_give() -> None:
    points = [
        Point(at=m, outcome=fake("1f1b", "1F1B", f"pp2:microbatches={m}", bubble=1 / (m + 1)))
        for m in (1, 3)
    ]
    text = sweep_text("microbatches", points, 1000)
    assert "50.0%" in text
    assert "equal stages: 25.0%" in text
    speed = sweep_text("devices", points, 1000)
    assert "10,000" in speed


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["compare", "tiny-llama", "--strategies", "threads", "data", "zero2", "gpipe", "tensor",
        "pp64",
         "--steps", "2", "--seq-len", "32", "--input-work", "1", "--json"]
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    by_name = {row["strategy"]: row for row in found["strategies"]}
    assert all(by_name[name]["equal"] for name in ("one", "data", "zero2", "gpipe", "tensor"))
    assert by_name["threads"]["equal"]
    assert "64 stages" in by_name["pp64"]["reason"]
    names = {name: {row["name"] for row in by_name[name]["collectives"]} for name in by_name}
    assert names["threads"] == {"broadcast", "scatter", "gather", "reduce"}
    assert names["data"] == {"all-reduce"}
    assert {"send", "receive"} <= names["gpipe"]
    assert "all-reduce" in names["tensor"]
    first, other = (row["total"] for row in by_name["threads"]["memory"])
    assert first > other, "the first device bears the optimizer and all outputs"
    parameters = {name: by_name[name]["memory"][0]["parameters"] for name in ("one", "tensor")}
    assert parameters["tensor"] < 0.6 * parameters["one"]
    assert {"reduce-scatter", "all-gather"} <= names["zero2"]
    for kind in ("gradients", "optimizer"):
        plain, shared = (by_name[name]["memory"][0][kind] for name in ("data", "zero2"))
        assert shared == pytest.approx(plain / 2, rel=0.01), kind
    assert by_name["gpipe"]["bubble"] > 0
    assert all(by_name[n]["loaded_seconds"] > 0 for n in ("one", "threads", "data"))


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_a_way_that_holds_more_than_it_may_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas in threads too, whose memory nobody foretells: the others are run all the same."""
    code = main(
        ["compare", "tiny-llama", "--strategies", "threads", "zero2", "--steps", "1", "--seq-len",
        "32",
         "--input-work", "0", "--cluster", "none", "--memory-per-rank", "35MB", "--json"]
    )  # fmt: skip
    found = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert code == 0
    assert "of 35 MB" in found["one"]["reason"]
    assert "allows 35 MB" in found["threads"]["reason"]
    assert found["zero2"]["equal"]
    assert max(row["total"] for row in found["zero2"]["memory"]) <= 35e6


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["compare", "tiny-llama", "--sweep", "microbatches", "--steps", "1", "--seq-len", "16",
         "--global-batch", "2", "--json"]
    )  # fmt: skip
    points = json.loads(capsys.readouterr().out)["points"]
    assert code == 0
    assert [(p["at"], p["strategy"]) for p in points] == [
        (1, "gpipe"), (1, "1f1b"), (2, "gpipe"), (2, "1f1b"),
    ]  # fmt: skip
    assert all(p["step_seconds"] > 0 for p in points)
    assert points[0]["bubble"] > 0.3, "one microbatch leaves a stage idle half the time"


def test_a_sweep_has_ways_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "tiny-llama", "--sweep", "layers", "--strategies", "data"]) == 2
    assert "--strategies" in capsys.readouterr().err


def test_an_unknown_sweep_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "tiny-llama", "--sweep", "layer"]) == 2
    assert "layers" in capsys.readouterr().err


def test_ranks_together_make_an_outcome() -> None:
    rank = {
        "step_seconds": 0.2, "processor_seconds": 0.1, "memory": [{"total": 1}],
        "layers": 2, "events": [], "collectives": [
            {"name": "send", "axis": "pp", "phase": "microbatch", "count": 1, "bytes": 8}
        ],
    }  # fmt: skip
    strategy = strategies(2, 4, 8)[0]
    found = outcome(strategy, {"report": None, "ranks": [rank, {**rank, "step_seconds": 0.3}]})
    assert found.step_seconds == 0.3
    assert found.collectives[0]["bytes"] == 16
    assert found.equal is None
    assert found.loaded_seconds is None
