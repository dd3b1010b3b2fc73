"""On a GPU: the kernels that read pages, and decode captured in graphs, equal a plain forward."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families import FAMILIES, whole_model
from tests.serving.paged import ToyScheduler, compare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def runners(family: str, dtype: Any, block_size: int) -> tuple[Any, Any]:
    import torch

    from hocket.models import skeleton
    from hocket.runtime.mesh import Mesh
    from hocket.runtime.pipeline.stage import Stage
    from hocket.serving.engine import attention
    from hocket.serving.engine.runner import StageRunner

    device = torch.device("cuda", 0)
    plain = whole_model(family)
    module: Any = skeleton.build(
        FAMILIES[family], device="cpu", dropout=0.0, attention=attention.NAME
    )
    module.load_state_dict(plain.state_dict())
    own = dict(module.named_buffers())
    for name, buffer in plain.named_buffers():
        own[name].copy_(buffer)
    runner = StageRunner(
        Stage(module.to(device, dtype)), Mesh.single(device), module.config,
        block_size=block_size, max_rows=5, max_batch_tokens=128, max_model_len=512,
    )  # fmt: skip
    runner.allocate(16)
    return plain.to(device, dtype), runner


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_and_graphs_equal_a_plain_forward(family: str, dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    plain, runner = runners(family, kind, 256)
    assert runner.kernel == "gathered" or kind is torch.bfloat16
    draw = torch.Generator().manual_seed(3)
    sequences = [
        torch.randint(3, 64, (length,), generator=draw).tolist() for length in (60, 33, 1, 90, 12)
    ]
    with torch.no_grad():
        expected = [plain(torch.tensor([tokens], device="cuda")).logits[0] for tokens in sequences]
    scheduler = ToyScheduler(
        sequences, block_size=256, num_blocks=16, chunks=(1, 1, 1, 20), every_logit=True
    )
    worst = compare(scheduler, runner.run, expected, {0, 1, 3})
    worst = max(worst, compare(scheduler, runner.run, expected))
    scale = max(float(e.abs().max()) for e in expected)
    assert worst < scale * (1e-4 if kind is torch.float32 else 0.1)


def test_a_llama_is_captured_and_read_by_a_kernel_of_pages() -> None:
    import torch

    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("flash attention needs compute capability 8.0")
    _, runner = runners("llama", torch.bfloat16, 256)
    assert runner.kernel in ("fa2", "fa3")
    assert runner._graphs is not None
    assert runner._graphs.reason == ""


def test_the_largest_step_is_measured() -> None:
    import torch

    from hocket.serving.engine.memory import cache_bytes

    _, runner = runners("llama", torch.bfloat16, 256)
    taken = runner.step_bytes()
    assert taken > 128 * 64 * 2
    assert 0 < cache_bytes(runner, 1) < torch.cuda.mem_get_info()[1]
