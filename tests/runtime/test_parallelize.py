"""A layout changes nothing but speed: loss, gradients and their norm are those of one process."""

import pytest

from hocket.spec.errors import HocketError, LayoutError, ModelError, OptionError
from hocket.spec.layout import Layout

torch = pytest.importorskip("torch")

from tests.runtime import models  # noqa: E402

PLAIN = [{}, {"fused": True}, {"bias": True}, {"tied": True}, {"qk_norm": True}]


def check(rows, cases) -> None:
    for row in rows:
        for found, case in zip(row, cases, strict=True):
            exact = case.get("dtype", "float32") == "float32"
            loss, gap, norm = (1e-5, 1e-4, 1e-5) if exact else (5e-3, 8e-2, 2e-2)
            assert found["loss"] == pytest.approx(found["wanted_loss"], abs=loss), case
            assert found["gap"]["gap"] < gap, (case, found["gap"])
            assert found["clipped"]["gap"] < gap, (case, found["clipped"])
            assert found["norm"] == pytest.approx(found["wanted_norm"], rel=norm), case
            assert found["wanted_norm"] > 0.5, "clipping must have had something to do"
            assert abs(found["evaluated"] - found["loss"]) < 0.5


@pytest.mark.ranks
def test_two_ranks(ranks) -> None:
    cases = [{"layout": "tp2", "options": options} for options in PLAIN]
    cases += [{"layout": layout} for layout in ("dp2", "pp2")]
    cases += [{"layout": "tp2", "dtype": "bfloat16"}, {"layout": "pp2", "options": {"tied": True}}]
    check(ranks.run("tests.runtime.cases:steps", world_size=2, cases=cases), cases)


@pytest.mark.ranks
def test_four_ranks(ranks) -> None:
    # Two key/value heads over four ranks: each is held twice. 101 vocabulary rows: 26, 26, 26, 23.
    cases = [{"layout": "tp4", "options": options} for options in PLAIN]
    cases += [{"layout": layout} for layout in ("dp4", "dp2.tp2", "tp2.pp2", "dp2.pp2")]
    cases += [
        {"layout": "tp2.pp2", "options": {"tied": True}},
        {"layout": "pp2.tp2:schedule=gpipe,order=pp-tp-dp-cp"},
        {"layout": "pp2.dp2:schedule=interleaved,virtual_stages=2", "options": {"num_layers": 4}},
        {"layout": "dp2.tp2", "dtype": "bfloat16"},
    ]
    check(ranks.run("tests.runtime.cases:steps", world_size=4, cases=cases), cases)


@pytest.mark.ranks
def test_all_axes_at_once(ranks) -> None:
    cases = [{"layout": "dp2.pp2.tp2", "options": {"tied": True}}]
    check(ranks.run("tests.runtime.cases:steps", world_size=8, cases=cases), cases)


@pytest.mark.ranks
def test_any_module_with_its_own_loss(ranks) -> None:
    for row in ranks.run("tests.runtime.cases:generic", world_size=2):
        assert row == pytest.approx([0] * 5, abs=1e-6)


@pytest.mark.ranks
def test_ranks_that_hold_different_values_are_refused(ranks) -> None:
    with pytest.raises(ModelError, match="different values of 2 parameters"):
        ranks.run("tests.runtime.cases:unequal", world_size=2)


@pytest.mark.torch
def test_nan_is_no_difference_between_ranks() -> None:
    from hocket.runtime.parallelize import parallelize

    whole = models.small()
    name, parameter = list(whole.named_parameters())[1]
    parameter.data.view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match=f"{name} has values that are not finite numbers"):
        parallelize(whole, Layout(), models.small_plan(), labels_shifted=True)


@pytest.mark.torch
def test_one_process_is_a_layout_too() -> None:
    from hocket.runtime.parallelize import parallelize
    from tests.runtime.cases import compare, reference

    whole = models.small()
    batches = [models.tokens(seed=i) for i in range(3)]
    loss = reference(whole, batches)
    parallel = parallelize(models.small(), Layout(), models.small_plan(), labels_shifted=True)
    assert float(parallel.forward_backward(batches)) == pytest.approx(loss, abs=1e-6)
    assert compare(parallel, whole)["gap"] < 1e-5
    total, tokens = parallel.evaluate(batches)
    assert total / tokens == pytest.approx(loss, abs=1e-5)
    assert parallel.stages[0].module.training


@pytest.mark.torch
def test_replicas_in_threads_are_a_layout_too() -> None:
    from hocket.runtime.parallelize import parallelize
    from tests.runtime.cases import compare, reference

    whole = models.small()
    batches = [models.tokens(seed=i) for i in range(2)]
    loss = reference(whole, batches)
    layout = Layout.parse("dp2:data_parallel=threads")
    parallel = parallelize(models.small(), layout, models.small_plan(), labels_shifted=True)
    for _ in range(2):
        assert float(parallel.forward_backward(batches)) == pytest.approx(loss, abs=1e-6)
        assert compare(parallel, whole)["gap"] < 1e-5
    assert parallel.replicas is not None
    assert len(parallel.replicas.replica_bytes()) == 2
    names = {(row["name"], row["axis"]) for row in parallel.recorder.collectives()}
    assert {("scatter", "dp"), ("broadcast", "dp"), ("gather", "dp"), ("reduce", "dp")} == names
    parallel.replicas.close()


@pytest.mark.torch
def test_a_meta_module_is_left_whole() -> None:
    from hocket.runtime.parallelize import parallelize

    with torch.device("meta"):
        skeleton = models.Small()
    parallel = parallelize(skeleton, Layout(), models.small_plan())
    assert parallel.stages[0].module is not skeleton
    with pytest.raises(AssertionError, match="meta device"):
        parallel.finish()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        ("tp2", LayoutError, "the world has 1"),
        ("pp2", LayoutError, "need a schedule"),
        ("dp1:recompute=norm+moe", LayoutError, "unknown recompute 'moe'"),
        ("dp1:recompute=mlp", ModelError, "no layer of the model has a feed-forward module"),
        ("tp3", LayoutError, "8 attention heads do not divide over tp 3"),
    ],
)
def test_what_does_not_fit_is_refused(layout: str, kind: type[HocketError], message: str) -> None:
    from hocket.runtime.parallelize import parallelize

    with pytest.raises(kind, match=message):
        parallelize(models.small(), Layout.parse(layout), models.small_plan())


@pytest.mark.torch
def test_no_plan_no_split() -> None:
    from hocket.runtime.parallelize import parallelize

    with pytest.raises(ModelError, match="cannot be split over tp 2"):
        parallelize(models.small(), Layout(tp=2))


@pytest.mark.torch
def test_the_schedule_sets_the_number_of_microbatches() -> None:
    from hocket.runtime.parallelize import parallelize
    from hocket.schedules.registry import build_schedule

    parallel = parallelize(
        models.small(), Layout(), models.small_plan(), schedule=build_schedule(Layout(), 2)
    )
    with pytest.raises(OptionError, match="3 microbatches, the schedule 1f1b has 2"):
        parallel.forward_backward([models.tokens()] * 3)
    with pytest.raises(OptionError, match="no labels"):
        parallel.forward_backward([{"input_ids": models.tokens()["input_ids"]}] * 2)
