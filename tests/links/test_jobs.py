"""Jobs that feel links, keep within a memory, and lie in any order: results never change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.spec.errors import LayoutError, TrainingError
from hocket.spec.links import Links
from hocket.spec.run import RunFolder
from hocket.spec.timeline import Timeline
from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm"), pytest.mark.timeout(200)]

LINE = "One melody is dealt note by note to several voices, one sounding while another rests.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("links")
    (found / "text.txt").write_text(LINE * 200)
    return found


def train(folder: Path, name: str, **options: Any) -> Any:
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model as job

    values = {
        "model": "tiny-llama", "data": [str(folder / "text.txt")], "run": str(folder / name),
        "seq_len": 32, "global_batch": 8, "eval_batches": 1, "steps": 2, "cluster": "none",
    }  # fmt: skip
    heard: list[dict[str, Any]] = []
    summary = job(request({**values, **options}), on_event=heard.append)
    notes = [event["text"] for event in heard if event["event"] == "note"]
    return summary, notes


def losses(folder: Path, name: str) -> list[float]:
    lines = RunFolder(folder / name).metrics_file.read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_links_add_time_and_nothing_else(folder: Path) -> None:
    text = "100MB/sx2+25MB/s:scale=1.0"
    options = {"layout": "pp2.tp2:microbatches=2", "timeline_step": 2}
    train(folder, "free", **options)
    _, notes = train(folder, "felt", emulate_links=text, **options)
    assert losses(folder, "felt") == losses(folder, "free")
    assert any(text in note for note in notes)
    links = Links.parse(text)
    timeline = Timeline.from_json(RunFolder(folder / "felt").timeline_file.read_text())
    sums = [
        e for e in timeline.events if e.kind == "all-reduce" and e.axis == "tp" and e.bytes > 99
    ]
    assert len(sums) > 20
    for event in sums:
        # As two bytes an element; a microbatch's sum inside a pair runs at 100 MB/s.
        assert event.end - event.start >= links.seconds("all-reduce", event.bytes / 2, (0, 1), 4)
    sends = {(e.rank, e.microbatch): e for e in timeline.events if e.kind == "SEND_F"}
    for event in timeline.events:
        if event.kind == "RECV_F":
            sent = sends[event.rank - 2, event.microbatch]  # tp varies fastest
            alone = links.seconds("send", event.bytes / 2, (0, 2), 4)
            assert event.end - sent.start >= 0.99 * alone


def test_a_scale_is_measured_and_kept(folder: Path) -> None:
    _, notes = train(folder, "scaled", layout="dp2", emulate_links="nvlink3", steps=1)
    kept = RunFolder(folder / "scaled").load().options.emulate_links
    assert kept is not None
    links = Links.parse(kept)
    assert links.scale is not None
    assert 100 < links.scale < 1e6
    assert any(kept in note for note in notes)


def test_another_order_trains_saves_and_resumes_identically(folder: Path, ranks: RankPool) -> None:
    from safetensors.numpy import load_file

    from hocket.jobs.demo import compare_communication

    name, usual, order = "reordered", "usual", "pp-tp-dp-cp"
    options: dict[str, Any] = {"layout": "pp2.tp2", "microbatches": 2}
    train(folder, usual, steps=3, **options)
    train(folder, name, save_every=2, steps=3, order=order, **options)
    shutil.rmtree(RunFolder(folder / name).checkpoints / "step-000003")
    train(folder, name, resume=True, steps=3, order=order, **options)
    assert losses(folder, name)[-1] == pytest.approx(losses(folder, usual)[-1], abs=1e-5)
    assert all(
        row["equal"] for row in compare_communication(ranks.launcher, RunFolder(folder / name))
    )
    mine, theirs = (
        load_file(RunFolder(folder / run).model / "model.safetensors") for run in (name, usual)
    )
    assert mine.keys() == theirs.keys()
    # Two steps of 1e-3 each, and Adam's first steps are as large as their rate.
    assert all(abs(mine[key] - theirs[key]).max() < 2e-4 for key in mine)


@pytest.mark.parametrize("layout", ["pp2:microbatches=4", "tp2"])
def test_what_is_predicted_is_what_is_counted(folder: Path, layout: str) -> None:
    summary, notes = train(
        folder, f"memory-{layout[:3]}", layout=layout, memory_per_rank="1GB", steps=1, seq_len=128
    )
    (said,) = [note for note in notes if "predicted" in note]
    share = float(said.rpartition("(")[2].rstrip("%)"))
    assert abs(share) < 5
    assert summary.memory


def test_what_does_not_fit_is_refused_with_what_does(folder: Path) -> None:
    options = {"memory_per_rank": "14MB", "seq_len": 64, "steps": 1}
    with pytest.raises(LayoutError) as caught:
        train(folder, "full", layout="dp1", **options)
    message = str(caught.value)
    assert "a rank of dp1 needs" in message
    assert "of 14 MB; fits at pp2 with" in message
    assert "--layout pp2" in message
    assert not (folder / "full" / "run.json").exists()
    summary, _ = train(folder, "full", layout="pp2", **options)
    assert max(summary.memory_bytes) <= 14e6


def test_plain_data_parallel_is_refused_with_the_zero_stage_that_fits(folder: Path) -> None:
    options = {"memory_per_rank": "15MB", "seq_len": 64, "steps": 1, "micro_batch_size": 1}
    with pytest.raises(LayoutError, match="a rank of dp2:microbatches=4 needs") as caught:
        train(folder, "shared", layout="dp2", **options)
    hint = (caught.value.hint or "").removeprefix("--layout ")
    assert hint.startswith("dp2:zero="), caught.value
    summary, _ = train(folder, "shared", layout=hint, **options)
    assert max(summary.memory_bytes) <= 15e6


def test_too_little_for_anything_is_said_without_trying(folder: Path) -> None:
    with pytest.raises(LayoutError, match=r"alone are .* more than 16 ranks of 100 KB hold"):
        train(folder, "none", layout="dp1", memory_per_rank="100KB")


def test_the_limit_holds_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.jobs import memory

    monkeypatch.setattr(memory, "fitted", lambda _launcher, _folder, spec, **_: (spec, None))
    with pytest.raises(TrainingError, match="of tensors, and --memory-per-rank allows 12 MB"):
        train(folder, "held", layout="dp1", memory_per_rank="12MB", seq_len=64)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--emulate-links", "nvlnk3"], "--emulate-links nvlink3"),
        (["--emulate-links", "pcie4@A100000"], "unknown GPU 'A100000'"),
        (["--emulate-links", "nvlink3x4+net100g"], "do not fill domains of 4"),
        (["--emulate-links", "pcie4", "--backend", "nccl"], "nccl connects CUDA devices"),
        (["--emulate-links", "pcie4", "--data-parallel", "threads"], "joins ranks"),
        (["--memory-per-rank", "lots"], "is not a size in bytes"),
        (["--memory-per-rank", "0"], "a rank needs some"),
    ],
)
def test_bad_words(
    folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "dp2" if "threads" in flags else "tp2"
    begin = ["train", "tiny-llama", "--data", str(folder / "text.txt"), "--layout", layout]
    assert main([*begin, *flags]) == 2
    assert said in capsys.readouterr().err
