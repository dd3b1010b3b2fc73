"""The other words: placements, splits, timelines, run folders, units, errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from hocket.spec.errors import HocketError, LayoutError, OptionError, RunFolderError, nearest
from hocket.spec.layout import Layout
from hocket.spec.placement import Placement
from hocket.spec.plan import Split, WeightSegment, matches
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, from_dict
from hocket.spec.timeline import Event, Timeline
from hocket.spec.units import format_bytes, format_seconds, parse_bytes


def rows_held(
    split: Split, parameter: str, shape: tuple[int, ...], dim: int, tp: int
) -> list[list[int]]:
    """Per rank, the global rows it holds along the split dim, in local order."""
    held = []
    for index in range(tp):
        placement = split.place("w", parameter, shape, index, tp)
        assert Placement.from_json(placement.to_json()) == placement
        rows: list[int] = []
        for block in sorted(placement.blocks, key=lambda b: b.local[dim]):
            assert block.local[dim] == len(rows)
            rows += range(block.start[dim], block.start[dim] + block.size[dim])
        assert placement.local_shape[dim] == len(rows)
        held.append(rows)
    return held


def test_a_fused_projection_is_split_head_by_head() -> None:
    heads = WeightSegment(units=4, size=2, what="attention heads")
    split = Split(style="column", segments=(heads, heads, heads), dims={"weight": 1, "bias": 0})
    held = rows_held(split, "weight", (8, 24), 1, 2)
    assert held[0] == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert sorted(held[0] + held[1]) == list(range(24))


def test_key_value_heads_fewer_than_ranks_are_held_by_several() -> None:
    split = Split(
        style="column",
        segments=(WeightSegment(units=2, size=3, what="key/value heads", copies=True),),
        dims={"weight": 0},
    )
    assert rows_held(split, "weight", (6, 5), 0, 4) == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert split.place("w", "weight", (6, 5), 0, 4).blocks[0].copies == 2
    assert split.place("w", "weight", (6, 5), 0, 4).has_copies


def test_vocabulary_rows_need_not_divide() -> None:
    split = Split(
        style="vocab_embedding",
        segments=(WeightSegment(units=10, uneven=True),),
        dims={"weight": 0},
    )
    assert [len(r) for r in rows_held(split, "weight", (10, 2), 0, 4)] == [3, 3, 3, 1]
    assert [len(r) for r in rows_held(split, "weight", (10, 2), 0, 8)] == [2, 2, 2, 2, 2, 0, 0, 0]


def test_heads_that_do_not_divide_name_the_legal_degrees() -> None:
    split = Split(
        style="column", segments=(WeightSegment(units=6, size=4, what="attention heads"),),
        dims={"weight": 0},
    )  # fmt: skip
    with pytest.raises(LayoutError) as caught:
        split.place("layers.0.q", "weight", (24, 8), 0, 4)
    assert "layers.0.q: 6 attention heads do not divide over tp 4" in caught.value.message
    assert "tp1, tp2, tp3, tp6" in (caught.value.hint or "")


def test_what_is_not_split_is_held_whole() -> None:
    split = Split(style="sum_grad")
    placement = split.place("q_norm.weight", "weight", (16,), 1, 2)
    assert placement.local_shape == (16,)
    assert placement.grad_sum == ("tp",)
    assert split.place("q_norm.weight", "weight", (16,), 0, 1).grad_sum == ()


def test_patterns() -> None:
    assert matches("model.layers.*.mlp", "model.layers.11.mlp")
    assert not matches("model.layers.*.mlp", "model.layers.11.mlp.gate")


def test_a_timelines_bubble_by_hand() -> None:
    # Two ranks over 4 s: rank 0 works 3 s, rank 1 works 2 s, so 3 of 8 rank-seconds are idle.
    events = [
        Event(rank=0, lane="compute", kind="F", name="0F0", start=10, end=11),
        Event(rank=1, lane="compute", kind="F", name="1F0", start=11, end=12),
        Event(rank=1, lane="compute", kind="B", name="1B0", start=12, end=13),
        Event(rank=0, lane="communication", kind="all-reduce", name="x", start=12, end=12.5),
        Event(rank=0, lane="compute", kind="B", name="0B0", start=12, end=14),
    ]
    timeline = Timeline.of("measured", 2, reversed(events), peak_bytes=[5, 6])
    assert timeline.duration == 4
    assert timeline.bubble == pytest.approx(3 / 8)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert Timeline.of("predicted", 2, []).bubble == 0


def test_a_run_folder_holds_one_run(tmp_path: Path) -> None:
    spec = RunSpec(
        model="tiny-llama", config={"hidden_size": 8}, data=("a.txt",),
        layout=Layout.parse("dp2.pp2:schedule=gpipe,pipeline_split=1-3"),
        options=TrainOptions(steps=3),
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    folder.create(spec)
    assert folder.load() == spec
    with pytest.raises(RunFolderError, match="already holds a run") as caught:
        folder.create(spec)
    assert "--resume" in (caught.value.hint or "")


def test_a_run_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder(tmp_path).load()
    (tmp_path / "run.json").write_text('{"model": 3')
    with pytest.raises(RunFolderError, match="cannot be read"):
        RunFolder(tmp_path).load()


def test_unknown_keys_get_the_nearest_name() -> None:
    with pytest.raises(OptionError) as caught:
        from_dict(TrainOptions, {"stepz": 3})
    assert "'steps'" in (caught.value.hint or "")


def test_errors_travel_between_processes() -> None:
    error = LayoutError("6 heads over tp 4", hint="tp2")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, LayoutError)
    assert isinstance(again, HocketError)
    assert str(again) == str(error) == "6 heads over tp 4\n  hint: tp2"


def test_nearest() -> None:
    assert nearest("1f1bb", ["gpipe", "1f1b"]) == "1f1b"
    assert nearest("zzz", ["gpipe"]) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.2GB", 1_200_000_000), ("80 GiB", 80 * 2**30), ("512mb", 512_000_000), ("7", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_sizes_that_are_none_are_refused() -> None:
    for text in ("1.2XB", "GB", "-3GB", ""):
        with pytest.raises(OptionError):
            parse_bytes(text)


def test_formats() -> None:
    assert format_bytes(1_234_567) == "1.23 MB"
    assert format_bytes(999_600) == "1e+03 KB" or format_bytes(999_600) == "1000 KB"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(75) == "1m15s"
    assert format_seconds(float("inf")) == "inf s"
    assert format_seconds(0.9996e-3) == "1 ms"
    assert format_seconds(0.9991e-3) == "999 us"
    assert format_seconds(0.9998) == "1 s"
    assert format_seconds(59.97) == "1m00s"


def test_a_window_without_rest_has_no_bubble_below_zero() -> None:
    third = 1 / 3
    events = [
        Event(rank=r, lane="compute", kind="F", name="F", start=i * third, end=(i + 1) * third)
        for r in range(3)
        for i in range(7)
    ]
    found = Timeline.of("measured", 3, events)
    assert 0 <= found.bubble < 1e-9
    assert 0 <= found.idle < 1e-9
