"""Mesh, collectives and devices."""

import pytest

torch = pytest.importorskip("torch")

from hocket.runtime.collectives import all_reduce  # noqa: E402
from hocket.runtime.device import pick_backend, pick_device  # noqa: E402
from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.runtime.record import Recorder  # noqa: E402
from hocket.spec.errors import LayoutError, OptionError  # noqa: E402
from hocket.spec.layout import Layout  # noqa: E402


@pytest.mark.torch
def test_device_and_backend_are_picked_in_one_place() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_backend("auto", "cpu", 2, one_machine=False) == "gloo"
    assert pick_backend("auto", "cpu", 1) == "gloo"
    assert pick_backend("auto", "cuda", 2) == "nccl"
    assert pick_backend("gloo", "cpu", 4) == "gloo"
    with pytest.raises(OptionError, match="did you mean 'gloo'"):
        pick_backend("glo")
    with pytest.raises(OptionError, match="does not serve"):
        pick_backend("nccl", "cpu")
    with pytest.raises(OptionError, match="several"):
        pick_backend("shm", "cpu", 4, one_machine=False)
    with pytest.raises(OptionError, match="unknown device"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        assert pick_device("auto", 3) == torch.device("cpu")
        with pytest.raises(OptionError, match="0 CUDA devices"):
            pick_device("cuda")


@pytest.mark.torch
def test_one_rank_communicates_with_nobody() -> None:
    mesh = Mesh.single()
    x = torch.ones(3)
    assert all_reduce(x, mesh.axis("tp"), mesh.recorder) is None
    assert x.tolist() == [1, 1, 1]
    assert mesh.recorder.collectives() == []
    with pytest.raises(LayoutError, match="needs 4 ranks, the world has 1"):
        Mesh(Layout(tp=4))


@pytest.mark.torch
def test_recorder_counts_always_and_times_when_asked() -> None:
    recorder = Recorder(rank=3)
    with recorder.span("compute", "F", "0F0", stage=0, microbatch=0):
        recorder.count("send", "pp", 8)
    assert recorder.timeline_events() == []
    recorder.recording = True
    with (
        recorder.in_phase("step"),
        recorder.span("compute", "B", "0B0", stage=0, microbatch=0),
    ):
        recorder.count("send", "pp", 8)
        recorder.count("send", "pp", 4)
    (event,) = recorder.timeline_events()
    assert (event.rank, event.kind, event.microbatch) == (3, "B", 0)
    assert event.end >= event.start > 0
    assert recorder.phase == "other"
    assert recorder.collectives() == [
        {"name": "send", "axis": "pp", "phase": "other", "count": 1, "bytes": 8},
        {"name": "send", "axis": "pp", "phase": "step", "count": 2, "bytes": 12},
    ]
    recorder.clear()
    assert recorder.collectives() == recorder.timeline_events() == []


@pytest.mark.ranks
def test_every_collective_moves_what_it_says_and_is_counted(ranks) -> None:
    rows = ranks.run("tests.runtime.cases:collectives", world_size=4)
    for rank, row in enumerate(rows):
        tp, first = rank % 2, rank // 2 * 2
        # 4 + 6/256 rounded once to bf16 (spacing 1/32 between 4 and 8).
        assert row["bf16"] == [4.03125] * 3
        assert row["max"] == [first + 1]
        assert row["uneven"] == [[first, first + 1, first + 1]]
        assert row["broadcast"] == [first + 1]
        assert row["reduce-scatter"] == [4 * rank + 6]
        assert row["scatter"] == [2.0 * tp, 2.0 * tp + 1]
        assert row["gather"] == (None if tp == 0 else [[first], [first + 1]])
        assert row["reduce"] == ([2 * first + 1] if tp == 0 else None)
        assert row["receive"] == [first + 1 - tp]
        assert row["copies"] == [first, first + 1]
        sizes = {(c["name"], c["axis"]): (c["count"], c["bytes"]) for c in row["recorded"]}
        assert sizes == {
            ("all-reduce", "world"): (1, 6),
            ("all-reduce", "tp"): (1, 4),
            ("all-gather", "tp"): (1, 16),
            ("broadcast", "tp"): (1, 4),
            ("reduce-scatter", "world"): (1, 16),
            ("scatter", "tp"): (1, 16 if tp == 0 else 8),
            ("gather", "tp"): (1, 4),
            ("reduce", "tp"): (1, 2),
            ("send", "tp"): (1, 4),
            ("receive", "tp"): (1, 4),
            ("barrier", "world"): (1, 0),
        }


@pytest.mark.ranks
def test_meshes_of_many_shapes_in_one_world(ranks) -> None:
    # The first one's middle stages are in fewer groups than its ends.
    layouts = ["pp4", "dp2.tp2", "dp2.pp2", "dp4:zero=1,shard=2", "pp4"]
    rows = ranks.run("tests.runtime.cases:meshes", world_size=4, layouts=layouts)
    for rank, row in enumerate(rows):
        pair, across = (rank // 2 * 2) * 2 + 1, 2 * (rank % 2) + 2
        ends = 3 if rank in (0, 3) else rank
        assert row == [
            {"dp": rank, "pp": 6, "tp": rank, "shard": rank, "embedding": ends},
            {"dp": across, "pp": rank, "tp": pair, "shard": rank},
            {"dp": pair, "pp": across, "tp": rank, "shard": rank, "embedding": across},
            {"dp": 6, "pp": rank, "tp": rank, "shard": pair},
            {"dp": rank, "pp": 6, "tp": rank, "shard": rank, "embedding": ends},
        ]


@pytest.mark.ranks
def test_a_bound_world_is_split_once_for_each_distinct_axis(ranks) -> None:
    for layout, tie, splits in (
        ("dp2.tp2", False, ["dp", "tp"]),
        ("dp4:zero=1,shard=2", False, ["shard", "replicas"]),
        ("pp4", True, ["embedding"]),
        ("dp2.pp2", True, ["dp", "pp"]),
    ):
        rows = ranks.run("tests.runtime.cases:split_mesh", world_size=4, layout=layout, tie=tie)
        for rank, row in enumerate(rows):
            assert row["splits"] == splits
            # The world's own, not the ten minutes that torch gives a new NCCL group.
            assert row["timeouts"] == [60.0] * len(splits)
            assert row["sums"] == {
                " ".join(map(str, members)): sum(members) for members in row["members"]
            }
            assert all(rank in members for members in row["members"])


@pytest.mark.torch
def test_a_mesh_without_a_world_takes_its_groups_from_a_factory() -> None:
    made = []

    def factory(rows, rank, name):
        made.append(name)
        return f"{name} of {rank}"

    mesh = Mesh(Layout.parse("dp4.pp2.tp2"), 5, group_factory=factory)
    assert made == ["world", "dp", "pp", "tp", "model"]
    assert mesh.axis("tp").ranks == (4, 5)
    assert mesh.axis("pp").group == "pp of 5"
    mesh.prepare(tie=True)
    # With two stages the ends are the pipeline's ranks.
    assert mesh.axis("embedding").group == "pp of 5"
    assert list(mesh.process_groups().values())[2] == ["pp", "embedding"]
