"""A whole layer in one call is what its parts are, where rows decode, and only there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.models import skeleton  # noqa: E402
from hocket.runtime.mesh import Mesh  # noqa: E402
from hocket.runtime.native.kernels import CpuKernels  # noqa: E402
from hocket.runtime.pipeline.stage import Stage  # noqa: E402
from hocket.serving.engine import attention  # noqa: E402
from hocket.serving.engine.gemm_select import SelectedGemm  # noqa: E402
from hocket.serving.engine.runner import StageRunner  # noqa: E402
from hocket.serving.engine.whole_layer import WholeLayer  # noqa: E402
from tests.families import FAMILIES  # noqa: E402
from tests.serving.paged import ToyScheduler  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
WINDOWED = {**FAMILIES["mistral"], "sliding_window": 7}
BIASED = {**FAMILIES["llama"], "model_type": "qwen2"}  # query, key and value have one


def made(config: dict[str, Any]) -> StageRunner:
    torch.manual_seed(0)
    plain: Any = skeleton.build_skeleton(
        config, device="cpu", dropout=0.0, attention=attention.NAME
    )
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    found = StageRunner(
        Stage(plain), Mesh.single(), plain.config, block_size=4, max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
    )  # fmt: skip
    found.allocate(128)
    return found


def served(config: dict[str, Any], rows: int, chunks: tuple[int, ...] = (1,)) -> Any:
    """The logits of `rows` sequences of different lengths, and in how many steps."""
    runs = made(config)
    scheduler = ToyScheduler(
        [[3 + row, *range(5, 14 + 3 * row)] for row in range(rows)], block_size=4, num_blocks=128,
        chunks=chunks, every_logit=True,
    )  # fmt: skip
    logits = []
    while (plan := scheduler.plan()) is not None:
        logits.append(runs.run(plan))
    return torch.cat(logits), len(logits)


@pytest.mark.parametrize("config", [FAMILIES["llama"], WINDOWED, BIASED])
@pytest.mark.parametrize("rows", [1, 7])
def test_it_computes_what_its_parts_do(
    called: list[int], monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], rows: int
) -> None:
    whole, steps = served(config, rows)
    assert len(called) == 4 * steps
    assert max(called) == rows
    monkeypatch.setattr(WholeLayer, "takes", lambda self, count: False)
    parts, _ = served(config, rows)
    assert len(called) == 4 * steps
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)


def test_what_is_not_all_decoding_or_has_more_parts_is_computed_in_parts(
    called: list[int],
) -> None:
    served(FAMILIES["llama"], 3, chunks=(3,))
    assert called == [1] * 4  # the last token of the longest comes alone
    called.clear()
    served(FAMILIES["llama_tied"], 1)  # the attention's end has a bias
    assert not called


def test_it_is_left_where_its_products_take_longer(kernels: CpuKernels, called: list[int]) -> None:
    module: Any = made(FAMILIES["llama"]).stage.module
    whole = module.model.layers[0].parts.whole
    assert [whole.takes(rows) for rows in (0, 1, 2, 3, 64, 65)] == [False, *[True] * 4, False]
    norms, products, biases, _ = whole._held
    slow: Any = [
        SelectedGemm(one.weight, kernels, one.choice, (0.0, 1.0, *[0.0] * 5)) for one in products
    ]
    left = WholeLayer(
        kernels, norms, slow, biases=biases, heads=(4, 2, 8),
        options=attention.Options(1.0), sums=None,
    )  # fmt: skip
    assert [left.takes(rows) for rows in (1, 2, 3, 4)] == [True, False, True, True]
