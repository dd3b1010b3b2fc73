"""Counted bytes: a step whose tensors are known by hand; and the arithmetic of a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hocket.training.memory import LiveBytes, MemoryCount, storage_bytes  # noqa: E402
from hocket.training.utilization import flops_per_token, peak_flops  # noqa: E402

pytestmark = pytest.mark.torch
KB = 1024


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_a_storage_counts_once_and_only_while_it_lives() -> None:
    known = torch.zeros(KB)
    live = LiveBytes([known])
    with live:
        a = torch.zeros(KB)  # 4 KB
        b = a.view(2, -1).t()  # the same storage
        known.add_(1)
        assert live.bytes == 4 * KB
        c = a + 1
        assert live.bytes == 8 * KB
        del a, b
        assert live.bytes == 4 * KB
        c.mul_(2)
    assert (live.bytes, live.peak) == (4 * KB, 8 * KB)
    live.close()


def test_what_lives_at_the_start_counts_until_it_goes() -> None:
    old = torch.zeros(KB)
    live = LiveBytes(live=[old])
    with live:
        assert live.bytes == 4 * KB
        del old
        new = torch.zeros(KB)
    assert (live.bytes, live.peak) == (new.nbytes, 4 * KB), "never both"
    live.close()


def test_saved_activations_live_until_backward() -> None:
    x = torch.randn(KB, requires_grad=True)
    live = LiveBytes([x])
    with live:
        y = x.exp()  # saved for backward: 4 KB
        z = y.sum()
        del y
        assert live.bytes == 4 * KB + 4
        z.backward()
        del z
    assert live.bytes == x.grad.nbytes == 4 * KB
    live.close()


@pytest.mark.parametrize("grads_exist", [True, False])
def test_one_step_by_kind(grads_exist: bool) -> None:
    weight = nn.Parameter(torch.randn(16, 16))  # 1 KB
    moment = torch.zeros(16, 16)
    x = torch.randn(64, 16)
    if grads_exist:
        weight.grad = torch.zeros_like(weight)
    count = MemoryCount([weight], lambda: [moment], torch.device("cpu"))
    assert count.memory.activations == 0
    with count.counting():
        hidden = x @ weight  # 4 KB
        loss = hidden.square().sum()  # 4 KB, gone before backward
        loss.backward()
        del hidden, loss
        moment.lerp_(weight.grad, 0.1)
    memory = count.memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (KB, KB, KB)
    # hidden lives throughout; backward of the square holds up to three more tensors of its size.
    assert 8 * KB <= memory.activations <= 18 * KB
    assert memory.total == sum(v for k, v in memory.to_json().items() if k != "total")


def test_storages_of_views_count_once() -> None:
    flat = torch.zeros(100)
    assert storage_bytes([flat[:50], flat[50:], None, torch.zeros(2)]) == 408


def test_operations_of_a_llama_by_hand() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 40 + 2 * 16
    params = 2 * layer + 16 + 100 * 16
    assert flops_per_token(model, 32) == 6 * params + 12 * 2 * 16 * 32


def test_only_active_experts_count() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {}
    for active in (1, 2, 4):
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=active,
        )  # fmt: skip
        with torch.device("meta"):
            sizes[active] = flops_per_token(transformers.MixtralForCausalLM(config), 8)
    one_expert = 6 * 3 * 16 * 24
    assert sizes[2] - sizes[1] == one_expert
    assert sizes[4] - sizes[2] == 2 * one_expert


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.05), ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA L40", None), ("Some CPU", None),
    ],
)  # fmt: skip
def test_peak_by_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)
