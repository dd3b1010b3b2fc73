"""Weights in bfloat16 under a computation in fp32: the products, and a model of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.models import skeleton  # noqa: E402
from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.runtime.native.kernels import CpuKernels  # noqa: E402
from hocket.runtime.pipeline.stage import Stage  # noqa: E402
from hocket.serving.engine import attention  # noqa: E402
from hocket.serving.engine.bf16_weights import can_be_half  # noqa: E402
from hocket.serving.engine.gemm_select import (  # noqa: E402
    MOST_ROWS,
    SelectedGemm,
    exactly,
)
from hocket.serving.engine.runner import StageRunner  # noqa: E402
from tests.families import FAMILIES, PROMPTS, whole_model  # noqa: E402
from tests.serving.paged import ToyScheduler, compare_pages  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
F = torch.nn.functional
WIDE = {**FAMILIES["llama"], "hidden_size": 64, "intermediate_size": 96, "vocab_size": 80}


def bfloat16(*shape: int) -> Any:
    return torch.randn(*shape).to(torch.bfloat16)


def exact(x: Any, weight: Any, added: Any = None) -> Any:
    y = x.double() @ weight.double().t()
    return y if added is None else y + added.double()


def off(made: Any, expected: Any) -> float:
    return float((made.double() - expected).pow(2).mean() / expected.pow(2).mean()) ** 0.5


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 16, 17, 33, 64, 100])
@pytest.mark.parametrize("width", [32, 33, 63, 64, 100, 1300])
def test_products_of_any_size(kernels: CpuKernels, rows: int, width: int) -> None:
    torch.manual_seed(rows * width)
    for depth in (1, 31, 32, 33, 64, 100, 768):
        weight, bias, more = bfloat16(width, depth), torch.randn(width), torch.randn(rows, width)
        x = torch.randn(rows, depth + 3)[:, 1 : depth + 1].to(torch.bfloat16).float()
        for added in (None, bias, more):
            made = kernels.half_product(x, weight, added)
            expected = exact(x, weight, added)
            torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=2e-5)


def test_one_row_is_not_rounded(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 768), bfloat16(256, 768)
    assert off(kernels.half_product(x, weight), exact(x, weight)) < 3e-7


def test_rows_are_rounded_as_torch_rounds(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(24, 768), bfloat16(256, 768)
    made = kernels.half_product(x, weight)
    near = min(off(made, exact(one, weight)) for one in (x, x.to(torch.bfloat16)))
    assert near < 3e-7


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_rows_of_a_weight_may_lie_apart(kernels: CpuKernels, rows: int) -> None:
    torch.manual_seed(rows)
    stored = torch.full((80, 100), float("nan"), dtype=torch.bfloat16)
    weight = stored[:70, :65]
    weight.copy_(bfloat16(70, 65))
    x = bfloat16(rows, 65).float()
    made = kernels.half_product(x, weight)
    torch.testing.assert_close(made.double(), exact(x, weight), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [2, 9, 33])
def test_what_is_no_number_stays_in_its_row(kernels: CpuKernels, rows: int) -> None:
    x, weight = torch.ones(rows, 64), torch.ones(64, 64, dtype=torch.bfloat16)
    x[0, 7], x[1, 2] = float("nan"), float("inf")
    made = kernels.half_product(x, weight)
    assert made[0].isnan().all()
    assert made[1].isinf().all()
    assert made[2:].eq(64).all()
    weight[5, 3] = float("nan")
    made = kernels.half_product(x, weight)
    assert made[2:, 5].isnan().all()
    assert made[2:, :5].eq(64).all()


def test_torchs_own_tiles_are_as_they_were(kernels: CpuKernels) -> None:
    """The library keeps what it told the processor of tiles; here it is told something else."""
    torch.manual_seed(0)
    x, weight = bfloat16(48, 96), bfloat16(160, 96)
    before = F.linear(x, weight)
    for rows in (48, 3, 17):
        kernels.half_product(x[:rows].float(), weight)
        assert torch.equal(F.linear(x, weight), before)
        assert off(F.linear(x[:rows], weight), exact(x[:rows], weight)) < 5e-3


def test_a_product_is_the_same_by_both_ways(kernels: CpuKernels) -> None:
    torch.manual_seed(0)
    weight, bias = bfloat16(96, 64), torch.randn(96)
    mine, torchs = SelectedGemm(weight, kernels, (True,) * 7), SelectedGemm(weight)
    for shape in ((1, 64), (3, 64), (1, 20, 64), (2, 5, 64), (1, MOST_ROWS + 1, 64), (1, 0, 64)):
        x = bfloat16(*shape).float()
        for added in (None, bias):
            one, other = mine(x, added), torchs(x, added)
            assert one.shape == other.shape == (*shape[:-1], 96)
            if not x.numel():
                continue
            assert one.dtype == other.dtype == torch.float32
            assert off(one, other.double()) < 5e-3
            with exactly():
                assert torch.equal(mine(x, added), torchs(x, added))
                assert off(mine(x, added), exact(x, weight, added)) < 1e-6


@pytest.mark.parametrize("family", [*FAMILIES])
def test_models_of_linear_layers_can_be_half(family: str) -> None:
    whole = whole_model(family)
    assert not can_be_half(whole)  # in fp32
    assert can_be_half(whole.bfloat16()) == (family not in ("gpt2", "mixtral"))


def served(config: dict[str, Any], weights: Any) -> tuple[StageRunner, float]:
    """A runner in bfloat16, and how far its logits are from those of `weights`, in fp64."""
    plain: Any = skeleton.build_skeleton(
        config, device="cpu", dropout=0.0, attention=attention.NAME
    )
    plain.load_state_dict(weights.state_dict())
    runs = StageRunner(
        Stage(plain.bfloat16()), Mesh.single(), plain.config, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=64,
    )  # fmt: skip
    runs.allocate(64)
    double = weights.bfloat16().double()
    with torch.no_grad():
        logits = [double(torch.tensor([tokens])).logits[0] for tokens in PROMPTS]
    scheduler = ToyScheduler(PROMPTS, block_size=4, num_blocks=64, every_logit=True)
    worst = compare_pages(scheduler, runs.run, logits)
    return runs, worst / max(float(row.abs().max()) for row in logits)


def whole(config: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    found: Any = skeleton.build_skeleton(config, device="cpu", dropout=0.0)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return found.eval()


CONFIGS = {
    "llama": WIDE,
    "tied": {**WIDE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**WIDE, "model_type": "qwen3", "head_dim": 32},
    "opt": {**FAMILIES["opt"], "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96},
    "gpt_neox": {**FAMILIES["gpt_neox"], "hidden_size": 64, "intermediate_size": 96},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("called")
def test_only_products_round(config: dict[str, Any]) -> None:
    """With all kernels there are, but those of the products themselves."""
    with exactly():
        runs, worst = served(config, whole(config))
    assert runs.half
    assert runs.dtype == torch.float32
    assert {layer.dtype for layer in runs.layers} == {torch.float32}
    assert worst < 1e-5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("called")
def test_by_the_kernels_it_is_nearer_than_a_model_in_bfloat16(config: dict[str, Any]) -> None:
    weights = whole(config)
    runs, worst = served(config, weights)
    assert runs.half
    double, plain = whole(config).bfloat16().double(), whole(config).bfloat16()
    own = scale = 0.0
    with torch.no_grad():
        for tokens in PROMPTS:
            ids = torch.tensor([tokens])
            expected = double(ids).logits[0]
            own = max(own, float((plain(ids).logits[0].double() - expected).abs().max()))
            scale = max(scale, float(expected.abs().max()))
    assert worst < own / scale


def test_whole_layers_take_weights_in_bfloat16(called: list[int]) -> None:
    served(WIDE, whole(WIDE))
    assert called


@pytest.mark.usefixtures("called")
def test_pieces_of_prompts_ask_for_no_logits() -> None:
    plain: Any = skeleton.build_skeleton(WIDE, device="cpu", dropout=0.0, attention=attention.NAME)
    plain.load_state_dict(whole(WIDE).state_dict())
    runs = StageRunner(
        Stage(plain.bfloat16()), Mesh.single(), plain.config, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=64,
    )  # fmt: skip
    runs.allocate(64)
    scheduler = ToyScheduler(PROMPTS, block_size=4, num_blocks=64, chunks=(2,))
    rows = []
    while (plan := scheduler.plan()) is not None:
        logits = runs.run(plan)
        assert logits.shape[1] == WIDE["vocab_size"]
        rows.append(len(logits))
    assert 0 in rows
    assert sum(rows) == len(PROMPTS)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_models_stay_whole_in_bfloat16(family: str) -> None:
    weights = whole(FAMILIES[family])
    with contextlib.suppress(AttributeError):
        weights.set_experts_implementation("eager")
    runs, worst = served(FAMILIES[family], weights)
    assert not runs.half
    assert runs.dtype == torch.bfloat16
    assert {layer.dtype for layer in runs.layers} == {torch.bfloat16}
    assert worst < 0.1
