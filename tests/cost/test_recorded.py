"""What the ranks record in one step is what theory says, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hocket.cost.communication import differences
from tests.rotation import part

if TYPE_CHECKING:
    from tests.ranks import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

TOKENS, HIDDEN, LAYERS = 4 * 16, 32, 4
"""Of `tests.cost.cases`, whose ranks import torch."""

CASES = [
    ("dp2", "llama", 2),
    ("tp2", "llama", 2),
    ("tp4", "qwen3", 4),
    ("tp2:microbatches=2", "mixtral", 2),
    ("pp2:microbatches=4,schedule=gpipe", "gpt2", 2),
    ("pp2:microbatches=2,virtual_stages=2,schedule=interleaved", "gpt2", 2),
    ("dp2.pp2.tp2:microbatches=2", "gpt2", 8),
    ("dp2:zero=1", "llama", 2),
    ("dp2.tp2:zero=2,microbatches=2", "qwen3", 4),
    ("dp4:zero=2,shard=2", "llama", 4),
    ("dp2.pp2.tp2:zero=1,microbatches=2", "gpt2", 8),
    ("dp2:zero=3", "llama", 2),
    ("dp4:zero=3,shard=2,microbatches=2", "mixtral", 4),
    ("dp2.tp2:zero=3,microbatches=2,recompute=full", "qwen3", 4),
    ("dp2.pp2.tp2:zero=3,microbatches=2,schedule=zero-bubble", "gpt2", 8),
    ("dp2.pp2:zero=3,microbatches=4,schedule=gpipe", "llama", 4),
    ("tp2:recompute=full", "llama", 2),
    ("tp2:recompute=full,recompute_layers=1,microbatches=2", "mixtral", 2),
    ("tp2:recompute=full", "gemma3", 2),  # a norm stands behind the last sum
    ("tp2:recompute=core_attn+mlp", "llama", 2),
    ("dp2.pp2.tp2:zero=2,microbatches=2,recompute=full,schedule=zero-bubble", "gpt2", 8),
    ("tp2:sequence_parallel=true", "llama", 2),
    ("tp2:microbatches=2,recompute=full,recompute_layers=1,sequence_parallel=true", "mixtral", 2),
    ("tp2:recompute=full,sequence_parallel=true", "gemma3", 2),
    ("tp2:recompute=norm+mlp,recompute_layers=3,sequence_parallel=true", "gemma3", 2),
    ("dp2.ep2", "mixtral", 2),
    ("dp2.ep2:zero=3,microbatches=2", "mixtral", 2),
    ("dp4.ep2:microbatches=2", "mixtral", 4),
    ("dp4.ep2:zero=1", "mixtral", 4),
    ("dp4.ep2:zero=2,microbatches=2,recompute=full", "mixtral", 4),
    ("dp4.ep2:zero=3,microbatches=2", "mixtral", 4),
    ("dp2.pp2.ep2:microbatches=2", "mixtral", 4),
    ("dp2.tp2.ep2:recompute=full", "mixtral", 4),
    ("dp2.tp2.ep4.etp1", "mixtral", 4),
    ("dp2.tp2.ep2.etp1:zero=1,recompute=full", "mixtral", 4),
    ("dp2.tp2.ep4.etp1:sequence_parallel=true,recompute=full", "mixtral", 4),
    ("dp2.tp2.ep2:sequence_parallel=true", "mixtral", 4),
    ("tp2.etp1", "mixtral", 2),
    (
        "dp2.pp2.tp2:zero=2,microbatches=2,recompute=full,schedule=zero-bubble,"
        "sequence_parallel=true",
        "gpt2",
        8,
    ),
]


def differing(pair: list[Any]) -> list[dict[str, Any]]:
    rows = differences(*pair)
    assert rows
    return [row for row in rows if not row["equal"]]


@pytest.mark.parametrize(("layout", "model", "world_size"), part(CASES, 3))
def test_recorded_equals_theory(ranks: RankPool, layout: str, model: str, world_size: int) -> None:
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected", world_size, layout=layout, model=model
    )
    for pair in found:
        assert differing(pair) == []


@pytest.mark.parametrize("method", ["ring", "auto"])
@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    part(
        [
            ("cp2", "llama", 2),
            ("cp4:microbatches=2", "llama", 4),
            ("cp2:recompute=full", "qwen3", 2),
            ("cp2:recompute=selective,microbatches=2", "llama", 2),
            ("cp2:recompute=full,recompute_layers=1", "llama", 2),
            ("dp2.cp2:zero=1", "llama", 4),
            ("dp2.cp2:zero=3,microbatches=2", "llama", 4),
            ("cp2.tp2", "llama", 4),
            ("cp2.tp2:sequence_parallel=true", "gemma3", 4),
            ("cp2.pp2:microbatches=2", "llama", 4),
        ],
        3,
    ),
)
def test_sequences_over_ranks(
    ranks: RankPool, layout: str, model: str, world_size: int, method: str
) -> None:
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected",
        world_size,
        layout=layout,
        model=model,
        context_parallel=method,
    )
    for pair in found:
        assert differing(pair) == []
        assert any(row["axis"] == "cp" for row in pair[1])


@pytest.mark.parametrize(
    "layout",
    ["dp4.ep4", "dp4.ep4:microbatches=2,recompute=full", "dp4.ep4:recompute=full,zero=3"],
)
def test_a_token_once_for_each_node(ranks: RankPool, layout: str) -> None:
    """Counts are theory's; bytes, which the router decides, are no more, and not much fewer."""
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected",
        4,
        layout=layout,
        model="mixtral",
        expert_dispatch="node:2",
    )
    for pair in found:
        assert differing(pair) == []
        for row in differences(*pair):
            if row["axis"] == "expert_rail":
                assert row["bytes"] > row["expected_bytes"] / 2
                assert row["bytes"] < row["expected_bytes"]


@pytest.mark.parametrize("layout", ["dp2.ep2", "dp2.ep2:microbatches=2,recompute=full"])
def test_tokens_that_a_library_moves(ranks: RankPool, layout: str) -> None:
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected", 2,
        layout=layout, model="mixtral", expert_dispatch="deepep",
    )  # fmt: skip
    for pair in found:
        assert differing(pair) == []
        assert any(row["axis"] == "expert" for row in pair[1])


@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    part(
        [
            ("cp2", "mamba2", 2),
            ("cp2", "delta", 2),
            ("cp2", "conv", 2),
            ("cp4:microbatches=2", "delta", 4),
            ("cp4:recompute=full,recompute_layers=2", "mamba2", 4),
            ("cp2:recompute=full", "delta", 2),
            ("cp2:recompute=selective", "mamba2", 2),
            ("dp2.cp2:zero=3", "mamba2", 4),
            ("cp2.pp2:microbatches=2", "conv", 4),
        ],
        2,
    ),
)
def test_states_over_ranks(ranks: RankPool, layout: str, model: str, world_size: int) -> None:
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected",
        world_size,
        layout=layout,
        model=model,
        context_parallel="ring",
    )
    for pair in found:
        assert differing(pair) == []


@pytest.mark.parametrize("model", ["mamba2", "delta", "conv"])
def test_what_layers_hand_on(model: str) -> None:
    from hocket.models.context_scans import state_sizes
    from hocket.models.skeleton import build_skeleton
    from tests.cost.cases import CONFIGS, HANDED

    found = state_sizes(build_skeleton(CONFIGS[model]), 32)
    assert list(found.values()) == [HANDED[model]] * 2


def test_a_sum_before_dropout_is_repeated(ranks: RankPool) -> None:
    """Four layers of two sums: dropout behind a layer's last product needs that one too."""
    counts = []
    for dropout in (0.0, 0.1):
        ((recorded, expected), _) = ranks.run(
            "tests.cost.cases:recorded_and_expected",
            2,
            layout="tp2:recompute=full",
            model="gpt2",
            dropout=dropout,
        )
        assert differing([recorded, expected]) == []
        counts += [r["count"] for r in expected if (r["name"], r["axis"]) == ("all-reduce", "tp")]
    assert counts[1] == counts[0] + 4


def test_small_buckets_are_counted(ranks: RankPool) -> None:
    found = ranks.run(
        "tests.cost.cases:recorded_and_expected",
        2,
        layout="dp2:microbatches=2",
        model="llama",
        bucket_mb=0.02,
    )
    for recorded, expected in found:
        assert differing([recorded, expected]) == []
        (row,) = [r for r in expected if r["axis"] == "dp"]
        assert row["count"] > 3


def test_zero_moves_as_many_bytes_as_the_all_reduce_it_replaces(ranks: RankPool) -> None:
    """Rajbhandari et al. 2020, section 7.2.1: an all-reduce is a reduce-scatter and an all-gather,
    so half its bytes and half again."""

    def moved(layout: str) -> int:
        ((recorded, _), _) = ranks.run(
            "tests.cost.cases:recorded_and_expected", 2, layout=layout, model="llama"
        )
        weight = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
        return sum(r["bytes"] * weight[r["name"]] for r in recorded if r["axis"] in ("dp", "shard"))

    assert moved("dp2:zero=1") == moved("dp2:zero=2") == moved("dp2")


def test_slices_of_sequences_move_as_many_bytes_and_what_is_gathered_again(
    ranks: RankPool,
) -> None:
    """Korthikanti et al. 2022, section 4.2.2: the sums of tensor parallelism, in two halves each;
    and of each block and the head once more its input, which backward did not keep."""

    def moved(layout: str) -> tuple[int, int]:
        ((recorded, _), _) = ranks.run(
            "tests.cost.cases:recorded_and_expected", 2, layout=layout, model="llama"
        )
        weight = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
        rows = [r for r in recorded if (r["axis"], r["phase"]) == ("tp", "microbatch")]
        # Two numbers a token and rank for the loss stay as they are.
        losses = 2 * 2 * TOKENS * 4
        sums = sum(r["count"] for r in rows if r["name"] == "all-reduce")
        return sum(r["bytes"] * weight[r["name"]] for r in rows) - losses, sums

    plain, sums = moved("tp2")
    slices, none = moved("tp2:sequence_parallel=true")
    message = TOKENS * HIDDEN * 4
    assert (sums, none) == (2 * 2 * LAYERS + 2, 0)
    assert plain == 2 * sums * message
    assert slices == plain + (2 * LAYERS + 1) * message


def test_zero_3_moves_half_as_much_again_for_every_layer(ranks: RankPool) -> None:
    """The same paper, section 7.2.2: two all-gathers and a reduce-scatter, where an all-reduce is
    one of each. What is no layer is gathered once: it moves what the all-reduce moves."""

    def moved(layout: str) -> int:
        ((recorded, _), _) = ranks.run(
            "tests.cost.cases:recorded_and_expected", 2, layout=layout, model="llama"
        )
        weight = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
        return sum(r["bytes"] * weight[r["name"]] for r in recorded if r["axis"] in ("dp", "shard"))

    hidden, vocabulary = 32, 64
    others = 2 * 4 * (2 * vocabulary * hidden + hidden)  # embedding, head, last norm
    others += 2 * 8  # the number of tokens
    plain = moved("dp2")
    assert moved("dp2:zero=3") - others == 1.5 * (plain - others)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_threads(ranks: RankPool, microbatches: int) -> None:
    (pair,) = ranks.run(
        "tests.cost.cases:threads", 1, backend=None, replicas=2, microbatches=microbatches
    )
    assert differing(pair) == []
    assert {row["name"] for row in pair[0]} == {"scatter", "broadcast", "gather", "reduce"}


def test_a_plan_of_a_llama_says_what_whole_layers_say(ranks: RankPool) -> None:
    for of_plan, of_layers in ranks.run("tests.cost.cases:of_layers", 4):
        assert of_plan == of_layers
