"""Tensor parallelism: what it moves, what it computes, what it refuses."""

import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from hocket.runtime.linear import WeightGradients, defer_weight_gradients  # noqa: E402
from hocket.runtime.mesh import Axis, Mesh  # noqa: E402
from hocket.runtime.record import Recorder  # noqa: E402
from hocket.runtime.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    apply_tensor_parallel,
    copies_needed,
    vocab_parallel_cross_entropy,
)
from hocket.runtime.tensor_parallel.shards import Shards  # noqa: E402
from hocket.spec.errors import LayoutError, ModelError  # noqa: E402
from hocket.spec.plan import Split, TensorPlan, WeightSegment  # noqa: E402
from tests.runtime import models  # noqa: E402


@pytest.mark.ranks
@pytest.mark.parametrize("model", ["small", "llama"])
def test_one_all_reduce_forward_and_one_backward_per_half_layer(ranks, model: str) -> None:
    microbatches, halves, batch, length = 3, 2 * models.LAYERS, 2, 8
    hidden = 4 * batch * length * models.HIDDEN
    for tp in (2, 4):
        (row, *others) = ranks.run(
            "tests.runtime.cases:counts", world_size=tp, model=model, microbatches=microbatches
        )
        assert all(other == row for other in others)
        found = {(c["phase"], c["name"], c["axis"]): (c["count"], c["bytes"]) for c in row}
        # Two a half-layer, one forward for the embedding, one backward for the head's input.
        count = microbatches * (2 * halves + 2)
        wanted = {
            ("microbatch", "all-reduce", "tp"): (count, count * hidden),
            # The loss: two numbers a token and rank.
            ("microbatch", "all-gather", "tp"): (
                microbatches, microbatches * tp * 2 * 4 * batch * length,
            ),
            ("step", "all-reduce", "world"): (1, 4),
            ("step", "all-reduce", "model"): (1, 4),
        }  # fmt: skip
        if tp == 4:  # two key/value heads, each held by two ranks
            heads = 2 * models.LAYERS * models.HEAD_DIM * models.HIDDEN * 4
            wanted["step", "all-reduce", "tp_copies2"] = (1, heads)
        assert found == wanted


@pytest.mark.ranks
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_overlapped_weight_gradients_are_the_same(ranks, sequence: bool, model: str) -> None:
    case = "tests.runtime.cases:overlapped"
    for row in ranks.run(case, world_size=2, sequence=sequence, model=model):
        assert row["losses"][0] == row["losses"][1]
        assert row["differ"] == []
        assert row["counted"][0] == row["counted"][1]  # the same collectives
        assert row["kept"] == 0  # no graph outlives its backward
        head, mlp, attention = ("begin " + n * "dW " + "wait" for n in (1, 2, 3))
        backward = " ".join([head, *models.LAYERS * [mlp, attention]])
        assert row["order"] == f"{backward} {backward}"  # of two microbatches


@pytest.mark.ranks
def test_hugging_face_models_equal_one_process(ranks) -> None:
    for tp, kinds in (
        (2, ["llama", "qwen3", "gemma3_text", "mixtral", "qwen3_5_text"]),
        (4, ["qwen3", "mixtral"]),
    ):
        for rows in ranks.run("tests.runtime.cases:hugging_face", world_size=tp, kinds=kinds):
            for row in rows:
                assert row["loss"] == pytest.approx(row["wanted"], abs=1e-5), row
                assert row["gap"] < 1e-4, row
                assert row["held"] == [], row  # no input outlives the block that reads it


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tp", "vocabulary", "dtype"),
    [(2, 64, "float32"), (2, 37, "float32"), (4, 5, "float32"), (2, 64, "bfloat16")],
)
def test_split_cross_entropy_is_the_whole_one(ranks, tp: int, vocabulary: int, dtype: str) -> None:
    rows = ranks.run(
        "tests.runtime.cases:cross_entropy", world_size=tp, vocabulary=vocabulary, dtype=dtype
    )
    for loss, silent, gradient in rows:
        assert loss < 2e-5
        assert silent < 2e-5
        assert gradient < (1e-5 if dtype == "float32" else 4e-3)


@pytest.mark.ranks
def test_dropout_agrees_on_what_is_whole_and_differs_on_what_is_split(ranks) -> None:
    run = {layout: ranks.run("tests.runtime.cases:dropout", world_size=n, layout=layout,
                             microbatches=2)
           for layout, n in (("tp2", 2), ("tp2.pp2", 4), ("dp2", 2))}  # fmt: skip
    first, second = run["tp2"]
    assert first["masks"]["whole"] == second["masks"]["whole"]
    assert len(first["masks"]["whole"]) == 2 * 2 * models.LAYERS
    for a, b in zip(first["masks"]["split"], second["masks"]["split"], strict=True):
        assert a != b
    # No two microbatches, steps or layers share a mask.
    assert len({str(mask) for mask in first["masks"]["whole"]}) == len(first["masks"]["whole"])
    assert first["losses"][0] != first["losses"][1]
    # A cut into stages changes nothing.
    for row in run["tp2.pp2"]:
        assert row["losses"] == pytest.approx(first["losses"], abs=1e-5)
    # Data ranks draw for different microbatches.
    assert run["dp2"][0]["masks"]["whole"] != run["dp2"][1]["masks"]["whole"]


# --- one process -----------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("vocabulary", [7, 2048])
def test_cross_entropy_of_one_process(vocabulary: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 50, 8)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.randint(0, vocabulary, (3, 50))
    labels[1, 3:40] = -100
    wanted = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none"
    )
    (expected,) = torch.autograd.grad(wanted.sum(), weight)
    logits = F.linear(hidden, weight)
    before = logits.detach().clone()
    found = vocab_parallel_cross_entropy(logits, labels, Axis("tp"))
    assert found.shape == labels.shape
    assert torch.allclose(found.flatten(), wanted, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert torch.allclose(gradient, expected, atol=1e-4)
    assert not torch.equal(logits.detach(), before), "the gradient is written over the logits"


@pytest.mark.torch
def test_logits_that_their_own_backward_reads_are_not_overwritten() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 9, requires_grad=True)
    labels = torch.randint(0, 9, (20,))
    (wanted,) = torch.autograd.grad(F.cross_entropy(x.tanh(), labels, reduction="sum"), x)
    for capped in (x.tanh(), x.tanh().view(4, 5, 9)):
        loss = vocab_parallel_cross_entropy(capped, labels.view(capped.shape[:-1]), Axis("tp"))
        (found,) = torch.autograd.grad(loss.sum(), x)
        assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.torch
def test_every_label_ignored_is_no_loss_and_no_gradient() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    loss = vocab_parallel_cross_entropy(x * 1, torch.full((4,), -100), Axis("tp"))
    loss.sum().backward()
    assert loss.tolist() == [0] * 4
    assert x.grad.abs().max() == 0


def alone(index: int, size: int) -> tuple[Axis, Recorder]:
    """One rank of an axis, seen without the others: for what needs no message."""
    return Axis("tp", size, index, tuple(range(size)), None), Recorder()


@pytest.mark.torch
def test_placements_name_every_parameter_and_tile_the_whole() -> None:
    for fused in (False, True):
        plan = models.small_plan(fused=fused).tensor
        whole = models.small(fused=fused)
        covered = {n: torch.zeros(p.shape) for n, p in whole.named_parameters()}
        for rank in range(4):
            part = models.small(fused=fused)
            placements = apply_tensor_parallel(part, plan, *alone(rank, 4))
            assert set(placements) == set(covered)
            for name, parameter in part.named_parameters():
                placement = placements[name]
                assert tuple(parameter.shape) == placement.local_shape
                source = whole.get_parameter(name)
                for block in placement.blocks:
                    assert torch.equal(parameter[block.in_local], source[block.in_global])
                    replicas = block.copies if placement.sharded else 4
                    covered[name][block.in_global] += 1 / replicas
        assert all(torch.equal(c, torch.ones_like(c)) for c in covered.values())
    assert copies_needed(plan, 4) == {2}
    assert copies_needed(plan, 2) == set()


@pytest.mark.torch
def test_the_plan_works_on_the_meta_device_and_keeps_ties() -> None:
    with torch.device("meta"):
        skeleton = models.Small(tied=True)
    placements = apply_tensor_parallel(skeleton, models.small_plan().tensor, *alone(1, 2))
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert skeleton.lm_head.weight.shape == (50, models.HIDDEN)
    assert skeleton.lm_head.weight.is_meta
    assert placements["lm_head.weight"].tie == "model.embed_tokens.weight"
    assert placements["model.embed_tokens.weight"].tie is None


@pytest.mark.torch
def test_half_a_tie_is_refused() -> None:
    plan = models.small_plan().tensor
    splits = {k: v for k, v in plan.splits.items() if k != "lm_head"}
    with pytest.raises(ModelError, match=r"lm_head.weight is tied to model.embed_tokens.weight"):
        apply_tensor_parallel(models.small(tied=True), TensorPlan(splits=splits), *alone(0, 2))


@pytest.mark.torch
def test_what_does_not_divide_or_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match="8 attention heads do not divide over tp 3"):
        apply_tensor_parallel(models.small(), models.small_plan().tensor, *alone(0, 3))
    plan = TensorPlan(
        splits={"model.norm": models.linear_column(WeightSegment(units=models.HIDDEN))}
    )
    with pytest.raises(ModelError, match="LayerNorm"):
        apply_tensor_parallel(models.small(), plan, *alone(0, 2))


@pytest.mark.torch
def test_transposed_weights_are_split_along_their_own_dims() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    whole = nn.ModuleDict({"up": Conv1D(12, 4), "down": Conv1D(4, 12)})
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4)
    wanted = whole["down"](F.relu(whole["up"](x)))
    wide = WeightSegment(units=12)
    plan = TensorPlan(
        splits={
            "up": Split(style="column", segments=(wide,), dims={"weight": 1, "bias": 0}),
            "down": Split(style="row", segments=(wide,), dims={"weight": 0}),
        }
    )
    found = 0
    for rank in range(2):
        part = models.copy_of(whole)
        apply_tensor_parallel(part, plan, *alone(rank, 2))
        assert isinstance(part["up"], ColumnParallelLinear)
        assert isinstance(part["down"], RowParallelLinear)
        part["down"].recorder, bias = Recorder(), part["down"].bias
        found = found + part["down"](F.relu(part["up"](x))) - bias
    assert torch.allclose(found + whole["down"].bias, wanted, atol=1e-5)


@pytest.mark.torch
def test_shards_go_there_and_back() -> None:
    segments = (WeightSegment(units=4, size=2), WeightSegment(units=2, size=3, copies=True))
    whole = torch.arange(14.0).unsqueeze(0)
    for degree in (2, 4):
        parts = [Shards(segments, i, degree) for i in range(degree)]
        gathered = torch.cat([shards.take(whole) for shards in parts], -1)
        assert torch.equal(parts[0].order(gathered), whole)
        assert parts[0].has_copies == (degree == 4)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["linear", "no bias", "Conv1D"])
def test_a_deferred_weight_gradient_is_the_same_gradient(kind: str) -> None:
    torch.manual_seed(0)
    bias = kind != "no bias"
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        plain = nn.Sequential(Conv1D(5, 3), nn.Tanh(), Conv1D(2, 5))
    else:
        plain = nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias))
    halved, queue, fired = models.copy_of(plain), WeightGradients(), []
    defer_weight_gradients(halved, queue)
    for parameter in halved.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.shape))
    x = torch.randn(4, 6, 3)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(one).square().sum().backward()
    with queue.deferring():
        halved(two).square().sum().backward()
    assert torch.allclose(two.grad, one.grad)
    assert all(p.grad is None for p in halved.parameters())
    assert fired == []
    pending = queue.take()
    outputs = [weakref.ref(deferred[3]) for deferred in pending]
    queue.run(pending)
    # What the gradients were computed from is freed: no graph of theirs refers to it.
    assert pending == []
    assert [output() for output in outputs] == [None, None]
    assert not any(p.grad.requires_grad for p in halved.parameters())
    for a, b in zip(plain.parameters(), halved.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)
    assert len(fired) == (4 if bias else 2)
    halved(two).square().sum().backward()  # nothing is deferred outside the block
    assert torch.allclose(halved[0].weight.grad, 2 * plain[0].weight.grad, atol=1e-5)


@pytest.mark.torch
def test_what_is_kept_for_weight_gradients_refers_to_no_graph() -> None:
    layer, queue = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 5)), WeightGradients()
    defer_weight_gradients(layer, queue)
    hidden = torch.randn(4, 3, requires_grad=True)
    received = weakref.ref(hidden)
    output = layer(hidden)
    # As the loss does: the gradient is a view of what backward has come through.
    with queue.deferring():
        output.backward((output * 1.0).view(2, 10).view(4, 5))
    del hidden, output
    pending = queue.take()
    assert received() is None, "the input of a stage would stay from I to W"
    assert [each[3].grad_fn for each in pending] == [None]


@pytest.mark.torch
def test_random_streams_leave_a_model_without_dropout_alone() -> None:
    from hocket.runtime.random import Streams, draws_random_numbers

    assert not draws_random_numbers(models.small())
    assert draws_random_numbers(models.small(dropout=0.1))
    streams = Streams(1, Mesh.single())
    streams.enter_layer(0)
    whole = torch.rand(2)
    streams.enter_sharded()
    split = torch.rand(2)
    streams.leave_sharded()
    streams.enter_layer(0)
    again = torch.rand(4)
    assert torch.equal(again[:2], whole)
    assert not torch.equal(split, whole)
    streams.enter_layer(0)
    torch.rand(2)
    streams.enter_sharded()
    assert torch.equal(torch.rand(2), split)
    streams.enter_sharded()  # a sibling's exit changes nothing
    streams.leave_sharded()
    assert torch.equal(torch.rand(2), again[2:])


@pytest.mark.torch
def test_random_streams_of_slices_are_each_ranks_own_and_shared_where_replicated() -> None:
    from hocket.runtime.random import Streams

    drawn = []
    for rank in range(2):
        streams = Streams(1, Mesh.single(), slices=True)
        streams._rank = rank
        streams.enter_layer(3)
        first = torch.rand(2)
        streams.enter_sharded()  # heads are in parts as everything else is
        second = torch.rand(2)
        streams.leave_sharded()
        streams.enter_replicated()
        replicated = torch.rand(2)
        streams.leave_sharded()
        third = torch.rand(2)
        streams.enter_layer(3)
        assert torch.equal(torch.rand(6), torch.cat([first, second, third]))
        drawn.append((first, second, third, replicated))
    assert torch.equal(drawn[0][3], drawn[1][3])
    for one, other in zip(drawn[0][:3], drawn[1][:3], strict=True):
        assert not torch.equal(one, other)
