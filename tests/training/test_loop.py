"""Whole runs on ranks: equal losses on every layout, resumed bit for bit, watched and exported."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue import models as catalogue
from hocket.schedules.registry import build_schedule
from hocket.spec.errors import TrainingError
from hocket.spec.files import write_text
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload
from hocket.spec.timeline import Timeline
from hocket.training import data
from hocket.training.tokenizer import byte_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

OPTIONS = TrainOptions(steps=4, lr=5e-3, warmup=1, eval_every=2, eval_fraction=0.1, timeline_step=3)
WORKLOAD = Workload(seq_len=16, global_batch=8)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 257}
SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 32}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A prepared data folder."""
    folder = tmp_path_factory.mktemp("tokens")
    text = folder / "x.jsonl"
    lines = ({"text": f"line {i} says {i * i} and no more. " * 3} for i in range(60))
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data.prepare_data(
        folder / "data",
        byte_tokenizer(),
        [text],
        seq_len=WORKLOAD.seq_len,
        global_batch=WORKLOAD.global_batch,
        eval_fraction=OPTIONS.eval_fraction,
    )
    return folder / "data"


@dataclasses.dataclass
class Run:
    """A finished run: its folder, rows, and what ranks said."""

    folder: RunFolder
    events: list[dict[str, Any]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics_file.read_text().splitlines()]

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@pytest.fixture(scope="module")
def train(ranks, tokens, tmp_path_factory):
    """`train(layout, ...)` -> Run."""

    def run(layout: str, *, model="tiny-llama", config=SMALL, dtype="fp32", into=None, **changes):
        microbatches = changes.pop("microbatches", 2)
        placed = dataclasses.replace(Layout.parse(layout), microbatches=microbatches)
        folder = RunFolder(into or tmp_path_factory.mktemp("run"))
        spec = RunSpec(
            model=model,
            config={**catalogue.config(model), **config},
            layout=placed,
            workload=dataclasses.replace(WORKLOAD, dtype=dtype),
            options=dataclasses.replace(OPTIONS, **changes),
        )
        if into is None:
            shutil.copytree(tokens, folder.data)
        write_text(folder.spec_file, spec.to_json())
        write_text(folder.schedule_file, str(build_schedule(placed, microbatches)))
        events: list[dict[str, Any]] = []
        ranks.launcher.run(
            "hocket.training.rank:main",
            placed.world_size,
            {"run": str(folder.path)},
            events.append,
            startup_timeout=90.0,
            silence_timeout=60.0,
        )
        return Run(folder, events)

    return run


@pytest.fixture(scope="module")
def one(train) -> Run:
    return train("dp1", save_every=2)


@pytest.fixture(scope="module")
def eight(train) -> Run:
    return train("dp2.pp2.tp2")


def test_eight_ranks_train_as_one_does(one, eight) -> None:
    assert len(one.rows) == OPTIONS.steps
    for mine, other in zip(one.rows, eight.rows, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=2e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
        assert mine["lr"] == other["lr"]
    assert one.losses()[0] == pytest.approx(eight.losses()[0], abs=1e-5)
    assert one.losses()[-1] < one.losses()[0] - 0.05


def test_held_out_loss_comes_every_so_many_steps(one, eight) -> None:
    for run in (one, eight):
        assert [event["step"] for event in run.of("eval")] == [2, 4]
        found = {row["step"]: row["held_out_loss"] for row in run.rows if "held_out_loss" in row}
        assert list(found) == [2, 4]
        assert found[4] < found[2]
        rows = [row for row in run.rows if "held_out_loss" in row]
        for row, event in zip(rows, run.of("eval"), strict=True):
            assert row["held_out_perplexity"] == pytest.approx(math.exp(row["held_out_loss"]))
            assert event["perplexity"] == row["held_out_perplexity"]
    assert one.of("eval")[0]["loss"] == pytest.approx(eight.of("eval")[0]["loss"], abs=2e-4)


def test_rank_0_speaks_for_all(eight) -> None:
    assert {event["rank"] for event in eight.events} == {0}
    steps = eight.of("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(event["tokens_per_second"] > 0 for event in steps)
    batch = WORKLOAD.global_batch * WORKLOAD.seq_len
    assert [event["num_input_tokens_seen"] for event in steps] == [n * batch for n in (1, 2, 3, 4)]
    assert eight.events[-1]["event"] == "done"


def test_memory_is_counted_on_every_rank(one, eight) -> None:
    whole, parts = one.of("memory")[0]["ranks"], eight.of("memory")[0]["ranks"]
    assert (len(whole), len(parts)) == (1, 8)
    sizes = whole[0]
    assert sizes["gradients"] == sizes["parameters"]
    # Two moments an entry, and a step counter of four bytes for each parameter.
    assert 0 <= sizes["optimizer"] - 2 * sizes["parameters"] < 1000
    for kind in ("parameters", "optimizer", "activations"):
        assert all(0 < part[kind] < whole[0][kind] for part in parts), kind
    assert eight.rows[-1]["memory_bytes"] == [part["total"] for part in parts]


def test_timeline_and_collectives_of_one_step(eight) -> None:
    timeline = Timeline.from_json(eight.folder.timeline_file.read_text())
    assert (timeline.source, timeline.num_ranks) == ("measured", 8)
    assert list(timeline.peak_bytes) == eight.rows[-1]["memory_bytes"]
    for rank in range(8):
        kinds = [e.kind for e in timeline.events if e.rank == rank and e.lane == "compute"]
        assert (kinds.count("F"), kinds.count("B"), kinds.count("optimizer")) == (2, 2, 1)
    assert 0 < timeline.bubble < 1
    counted = json.loads(eight.folder.communication_file.read_text())
    assert counted["step"] == 3
    assert len(counted["ranks"]) == 8
    rows = {(r["name"], r["axis"], r["phase"]): r for r in counted["total"]}
    # 2 microbatches x 4 ranks forward, the same back; hidden states of 2 x 16 x 32 floats.
    message = 2 * 16 * 32 * 4
    sent = rows["send", "pp", "microbatch"]
    assert (sent["count"], sent["bytes"]) == (16, 16 * message)
    assert rows["all-reduce", "dp", "step"]["bytes"] == sum(
        part["gradients"] for part in eight.of("memory")[0]["ranks"]
    )


def test_the_model_is_exported_with_its_tokenizer(one, eight) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(run.folder.model) for run in (one, eight)
    ]
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3, msg=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(eight.folder.model)
    assert tokenizer("ab")["input_ids"] == [97, 98]


def continued(train, run: Run, tmp_path: Path, layout: str, **changes: Any) -> Run:
    """A copy of the run, resumed from the checkpoint of its step 2."""
    copy = tmp_path / "copy"
    shutil.copytree(run.folder.path, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    (copy / "checkpoints" / "latest").write_text("step-000002\n")
    shutil.rmtree(copy / "model")
    return train(layout, into=copy, resume=True, save_every=2, **changes)


def same(first: Run, second: Run) -> None:
    timed = ("step_seconds", "tokens_per_second", "memory_bytes")
    rows = [
        [{k: v for k, v in row.items() if k not in timed} for row in run.rows]
        for run in (first, second)
    ]
    assert rows[0] == rows[1]
    weights = [(r.folder.model / "model.safetensors").read_bytes() for r in (first, second)]
    assert weights[0] == weights[1]


def test_resumed_bit_for_bit(train, one, tmp_path) -> None:
    again = continued(train, one, tmp_path, "dp1")
    assert [event["step"] for event in again.of("step")] == [3, 4]
    same(one, again)


def test_resumed_bit_for_bit_in_bf16_with_dropout_on_four_ranks(train, tmp_path) -> None:
    how = {"model": "tiny-gpt2", "config": SMALL_GPT2, "dtype": "bf16", "dropout": 0.2}
    first = train("pp2.tp2", save_every=2, **how)
    same(first, continued(train, first, tmp_path, "pp2.tp2", **how))
    plain = train("pp2.tp2", **{**how, "dropout": 0.0})
    assert plain.losses()[0] != first.losses()[0], "dropout drops nothing"


def test_ranks_go_on_from_another_layouts_checkpoint(train, one, tmp_path) -> None:
    again = continued(train, one, tmp_path, "dp2")
    assert [event["step"] for event in again.of("step")] == [3, 4]
    assert again.losses()[-2:] == pytest.approx(one.losses()[-2:], abs=2e-4)


def test_threads_train_as_one_process_does(train, one) -> None:
    threads = train("dp2:data_parallel=threads")
    assert threads.losses() == pytest.approx(one.losses(), abs=2e-4)
    master, other = threads.of("memory")[0]["ranks"]
    assert master["optimizer"] > other["optimizer"] == 0
    assert master["activations"] > other["activations"]
    counted = json.loads(threads.folder.communication_file.read_text())["total"]
    names = {row["name"] for row in counted if row["axis"] == "dp"}
    assert names == {"scatter", "broadcast", "gather", "reduce"}


def test_a_loss_that_is_not_finite_ends_the_run(train) -> None:
    with pytest.raises(TrainingError, match=r"step \d: the loss is") as caught:
        train("dp2", lr=1e20, max_grad_norm=0.0, max_skipped_steps=0)
    assert "lower --lr" in (caught.value.hint or "")


def test_a_few_steps_in_a_row_are_recorded(train) -> None:
    run = train("pp2", timeline_step=None, timeline_steps=3)
    assert json.loads(run.folder.communication_file.read_text())["step"] == 2
    later = json.loads(run.folder.later_file.read_text())
    assert [row["step"] for row in later] == [3, 4]
    first = Timeline.from_json(run.folder.timeline_file.read_text())
    for row in later:
        one = Timeline.from_json(json.dumps(row["timeline"]))
        kinds = sorted((e.rank, e.name) for e in one.events if e.lane == "compute")
        assert kinds == sorted((e.rank, e.name) for e in first.events if e.lane == "compute")
    assert len(run.of("timeline")) == 1
    assert run.losses() == train("pp2").losses()
