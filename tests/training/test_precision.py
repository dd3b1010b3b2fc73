"""bf16 with fp32 masters: a layout is as exact as one process; and what cannot be is refused."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.spec.capabilities import refused_offload, refused_precision
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from tests.families import LLAMA
from tests.ranks import RankPool

SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 256}
EPS = 2.0**-8
"""Of bf16: what one rounding may change, relative to the value, at most by half."""

SPLIT_BY_ROWS = ["dp4", "dp2.pp2:zero=2,microbatches=2", "pp4:microbatches=4"]
SPLIT_BY_COLUMNS = ["dp2.tp2:zero=1,microbatches=2", "tp2.pp2:microbatches=4"]
NARROW = ["dp4", "dp2.tp2:zero=1,microbatches=2"]
"""Those that are run with gradients in bf16 as well."""


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_layout_in_bf16_is_as_exact_as_one_process(ranks: RankPool) -> None:
    """Where no product is split, each microbatch gives the same bits, and only their sums may
    differ: in fp32 by its own rounding, in bf16 by one rounding an addition. Where products are
    split over tp, sums of other parts are rounded: the whole gradient is then no further from
    fp32's than that of one process in bf16 is, but for the noise of such a distance.
    """
    cases = [(layout, "fp32") for layout in SPLIT_BY_ROWS + SPLIT_BY_COLUMNS]
    cases += [(layout, "bf16") for layout in NARROW]
    rows = ranks.run(
        "tests.training.precision_cases:layouts", 4, backend="shm", timeout=150.0, config=SMALL,
        cases=cases,
    )  # fmt: skip
    for (layout, grad_dtype), of_ranks in zip(cases, zip(*rows, strict=True), strict=True):
        where = (layout, grad_dtype)
        apart, mine, theirs, whole = (sum(r["squares"][k] for r in of_ranks) for k in range(4))
        assert 0 < theirs < 0.05**2 * whole, where  # bf16 it is
        if layout in SPLIT_BY_ROWS:
            bound = 1e-5 if grad_dtype == "fp32" else 4 * EPS
            assert max(r["largest"] for r in of_ranks) < bound, where
        assert mine < 1.3**2 * theirs, where
        assert apart < 4 * theirs, where  # two errors of the same size
        for rank in of_ranks:
            assert rank["rounded"], where
            losses, one, exact = rank["losses"]
            assert losses == pytest.approx(one, rel=EPS), where
            assert losses == pytest.approx(exact, rel=2 * EPS), where
        predicted, counted = of_ranks[0]["predicted"], of_ranks[0]["counted"]
        if predicted is not None:
            off = counted["total"] / predicted["total"] - 1
            assert abs(off) < 0.05, where
            assert counted["gradients"] == predicted["gradients"], where
    kept = dict(zip(cases, (row["counted"] for row in rows[0]), strict=True))
    for layout in NARROW:
        wide, narrow = (kept[layout, grad_dtype]["gradients"] for grad_dtype in ("fp32", "bf16"))
        assert narrow == wide / 2, layout


def test_what_the_devices_lack_is_said() -> None:
    assert refused_precision("bf16", cuda=False) is None
    assert "CPU cores have no 8-bit float matmuls" in (refused_precision("fp8", cuda=False) or "")
    said = refused_precision("fp8", cuda=True, capability=(8, 0))
    assert "compute capability 8.0; 8-bit float matmuls take 8.9" in (said or "")
    assert refused_precision("fp8", cuda=True, capability=(9, 0)) is None
    assert "torchao" in (refused_precision("fp8", cuda=True, library=False) or "")
    assert "defers weight gradients" in (refused_precision("fp8", cuda=True, halved=True) or "")
    moved = Layout(offload="activations")
    again = dataclasses.replace(moved, recompute="full")
    assert refused_offload(Layout(offload="optimizer"), cuda=False) is None
    assert "already in host memory" in (refused_offload(moved, cuda=False) or "")
    assert refused_offload(moved, cuda=True) is None
    assert "its input alone" in (refused_offload(again, cuda=True) or "")


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"dtype": "fp8", "device": "cpu"}, "compute capability 8.9", "--dtype bf16"),
        ({"grad_dtype": "bf16"}, "grad_dtype is bf16 and dtype fp32", "--dtype bf16"),
        ({"grad_dtype": "fp8", "dtype": "bf16"}, "unknown grad_dtype 'fp8'", "fp32"),
        ({"offload": "activations", "device": "cpu"}, "already in host memory", "leave"),
        ({"offload": "activation"}, "unknown offload 'activation'", "activations"),
    ],
)
def test_refused_before_ranks_start(options, said, hint, tmp_path) -> None:
    from hocket.jobs import prepare
    from hocket.jobs.request import request

    (tmp_path / "text").write_text("a b c")
    with pytest.raises(HocketError, match=said) as caught:
        prepare.prepare_job(request({"model": "tiny-llama", "data": tmp_path / "text", **options}))
    assert hint in (caught.value.hint or "")


@pytest.mark.torch
def test_saved_tensors_travel_once_and_parameters_never() -> None:
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from hocket.runtime.offload import SavedOnHost

    torch.manual_seed(1)
    layer = torch.nn.Linear(16, 16)
    x = torch.randn(8, 32, requires_grad=True)

    def loss() -> torch.Tensor:
        part = x[:, ::2] * 1.0
        return (layer(part).sin() + layer(part).exp() * part[:, 4:5]).sum()

    (expected,) = torch.autograd.grad(loss(), x)
    saved = SavedOnHost(layer.parameters(), least=1, host=True)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        total = loss()
    each = 8 * 16 * 4
    # Once each: what both products read, sin's input, exp's result, and the column.
    assert saved.bytes == 3 * each + 8 * 4
    assert len(saved._copies) > 0
    (found,) = torch.autograd.grad(total, x)
    assert torch.equal(found, expected)
    del total
    assert len(saved._copies) == 0
    small = SavedOnHost(layer.parameters(), least=1 << 20, host=True)
    with saved_tensors_hooks(small.pack, small.unpack):
        loss()
    assert small.bytes == 0


@pytest.mark.torch
def test_fp8_products_are_near_and_the_rest_is_left_alone() -> None:
    pytest.importorskip("torchao")
    import copy

    import torch

    from hocket.models import skeleton
    from hocket.models.plans import plan_for
    from hocket.runtime.fp8 import multiply_in_fp8
    from tests.models.test_weights import Case

    config = {**SMALL, "intermediate_size": 168}  # no multiple of 16: the feed-forward stays
    plan = plan_for(skeleton.build_skeleton(config))
    exact, _ = Case(config).stage(dtype=torch.bfloat16)
    rounded = copy.deepcopy(exact)
    named = multiply_in_fp8(rounded, plan.stages, emulate=True)
    assert sorted({name.split(".")[-1] for name in named}) == [
        "k_proj", "o_proj", "q_proj", "v_proj"
    ]  # fmt: skip
    assert len(named) == 16
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(2))
    gradients = []
    for model in (exact, rounded):
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.float().reshape(-1) for p in model.parameters()]))
    one, other = gradients
    apart = float((one - other).norm() / one.norm())
    assert 0.005 < apart < 0.2, apart
