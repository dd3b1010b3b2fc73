"""Flex attention in training: PyTorch's unfused implementation in place of the generated kernel."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, create_mask  # noqa: E402
from transformers import masking_utils  # noqa: E402

from hocket.models import attention, flex_attention, rows  # noqa: E402
from hocket.models.attention_layers import layers_of  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402
from hocket.spec.attention_kernel import attention_kernel  # noqa: E402
from tests.models.flex_cases import FAMILIES, PACKED, PLAIN, noted, step, unfused  # noqa: E402

pytestmark = pytest.mark.torch

FLEXIBLE = ("gemma2", "gpt_oss")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What is installed for a process lasts for one test."""
    functions: Any = transformers.AttentionInterface._global_mapping
    masks: Any = masking_utils.AttentionMaskInterface._global_mapping
    module: Any = masking_utils
    names = ("find_packed_sequence_indices", "packed_sequence_compatibility_function")
    before = dict(functions), dict(masks), [getattr(module, name) for name in names]
    yield
    for mapping, kept in ((functions, before[0]), (masks, before[1])):
        mapping.clear()
        mapping.update(kept)
    for name, value in zip(names, before[2], strict=True):
        setattr(module, name, value)


@pytest.mark.parametrize("window", [1, 5, 128, 129, 300, None])
@pytest.mark.parametrize("length", [1, 100, 128, 200, 256, 640])
def test_block_masks_are_those_that_torch_finds_pair_by_pair(
    length: int, window: int | None
) -> None:
    third, half = length // 3, length + length // 2
    for begins in ([0, length, 2 * length], [0, third, length, half, *[2 * length] * 3]):
        cu_seqlens = torch.tensor(begins, dtype=torch.int32)
        mask = attention.boundaries(cu_seqlens, window=window, longest=length, length=length)
        found = attention._block_mask(mask, 2, length)
        wanted = create_block_mask(found.mask_mod, 2, None, length, length, device="cpu")
        dense = create_mask(found.mask_mod, 2, None, length, length, "cpu")
        assert torch.equal(dense, attention.dense_mask(mask, 2, length))
        assert len(found.as_tuple()) == len(wanted.as_tuple())
        for mine, theirs in zip(found.as_tuple(), wanted.as_tuple(), strict=True):
            if isinstance(mine, torch.Tensor):
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
                assert torch.equal(mine, theirs)
            elif not callable(mine):
                assert mine == theirs


def test_a_block_mask_is_made_once_for_a_mask_and_forgotten_with_it() -> None:
    begins = torch.tensor([0, 24, 48], dtype=torch.int32)
    before = len(attention._BLOCKS)
    mask = attention.boundaries(begins, window=5, longest=24, length=24)
    first = attention._block_mask(mask, 2, 24)
    assert attention._block_mask(mask, 2, 24) is first
    assert len(attention._BLOCKS) == before + 1
    del mask
    gc.collect()
    assert len(attention._BLOCKS) == before


def test_a_block_mask_needs_no_value() -> None:
    """On the meta device a read would raise."""
    begins = torch.zeros(6, dtype=torch.int32, device="meta")
    mask = attention.boundaries(begins, window=5, longest=300, length=300)
    found = attention._block_mask(mask, 2, 300)
    assert found.kv_indices.shape == (2, 1, 3, 3)
    assert found.q_indices is not None


@pytest.mark.parametrize("positions", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flex_attention_is_what_the_family_computes(family: str, positions: Any) -> None:
    """Logits and gradients, of sinks too; all layers: full, windowed, packed."""
    wanted = step(FAMILIES[family], positions)
    documents = rows.documents_in(positions)
    positions = positions.clone()
    with unfused() as calls, noted(positions, documents):
        found = step(FAMILIES[family], positions, on_cuda=True)
        # Without the soft cap and the sinks it is something else: the comparison can fail.
        plain = step(FAMILIES[family], positions, on_cuda=True, bends=False)
    masked = family in FLEXIBLE or documents is not None
    assert len(calls) == (8 if masked else 0)
    assert torch.allclose(found[0], wanted[0], atol=2e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        assert torch.allclose(gradient, wanted[1][name], atol=2e-5), name
    if family in FLEXIBLE:
        assert not torch.allclose(plain[0], wanted[0], atol=1e-2)
    if family == "gpt_oss":
        assert all(found[1][f"model.layers.{i}.self_attn.sinks"].abs().max() > 0 for i in range(4))


@pytest.mark.parametrize("positions", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FLEXIBLE)
def test_on_a_cpu_a_model_that_was_prepared_for_cuda_changes_by_no_bit(
    family: str, positions: Any
) -> None:
    wanted = step(FAMILIES[family], positions)
    found = step(FAMILIES[family], positions, on_cuda=True)
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])


@pytest.mark.parametrize("positions", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FLEXIBLE)
def test_what_flex_does_not_take_is_the_familys_own_code(family: str, positions: Any) -> None:
    """Heads of 8: with a mask made from the boundaries."""
    small = {**FAMILIES[family], "head_dim": 8}
    wanted = step(small, positions)
    positions = positions.clone()
    with unfused() as calls, noted(positions, rows.documents_in(positions)):
        found = step(small, positions, on_cuda=True)
    assert calls == []
    assert torch.allclose(found[0], wanted[0], atol=2e-5)
    for name, gradient in found[1].items():
        assert torch.allclose(gradient, wanted[1][name], atol=2e-5), name


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_the_implementation_that_was_asked_for_is_kept(asked: str) -> None:
    names = {}
    for family in (*FLEXIBLE, "llama", "bloom"):
        from tests.families import FAMILIES as others

        model = build_skeleton(dict(FAMILIES.get(family) or others[family]), attention=asked)
        attention.choose_kernels_on_cuda(model, asked=asked)
        names[family] = model.config._attn_implementation
    if asked == "eager":
        assert set(names.values()) == {"eager"}
    else:
        assert names == {
            "gemma2": "hocket_flex", "gpt_oss": "hocket_flex", "llama": "sdpa", "bloom": "eager",
        }  # fmt: skip


def test_the_report_names_flex_and_why() -> None:
    model = build_skeleton(dict(FAMILIES["gpt_oss"]), dtype=torch.bfloat16)
    attention.choose_kernels_on_cuda(model)
    found = [
        (layer.kind, attention_kernel(layer, dtype="bfloat16", capability=(9, 0)), count)
        for layer, count in layers_of(model, seq_len=24)
    ]
    assert [(kind, kernel.name, kernel.reason, count) for kind, kernel, count in found] == [
        ("sliding (window 5)", "flex", "sinks", 2), ("full", "flex", "sinks", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("family", FLEXIBLE)
def test_a_compiled_layer_is_one_graph(family: str) -> None:
    """The block mask is in it, and other documents do not compile it again. Without gradients:
    on a CPU flex attention has none within a graph."""
    torch.compiler.reset()
    positions = (torch.arange(48) % 11).view(2, 24)
    wanted = step(FAMILIES[family], positions)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    documents = rows.documents_in(positions)
    with unfused(), noted(positions, documents), torch.no_grad():
        found = step(FAMILIES[family], positions, on_cuda=True, backend=backend)
        count = len(graphs)
        other = (torch.arange(48) % 7).view(2, 24)
        with noted(other, rows.documents_in(other)):
            step(FAMILIES[family], other, on_cuda=True, backend=backend)
    assert torch.allclose(found[0], wanted[0], atol=2e-5)
    assert count == 2  # one a kind of layer
    assert len(graphs) == count
    torch.compiler.reset()


def test_what_is_compiled_breaks_no_graph() -> None:
    """The function that CUDA tensors go through, compiled by a backend that runs it as it is."""
    torch.compiler.reset()
    begins = torch.tensor([0, 10, 24, 48], dtype=torch.int32)
    mask = attention.boundaries(begins, window=7, longest=24, length=24)
    blocks = attention._block_mask(mask, 2, 24)
    generator = torch.Generator().manual_seed(0)
    query, key, value, sinks = (
        torch.randn(*shape, generator=generator)
        for shape in ((2, 6, 24, 16), (2, 2, 24, 16), (2, 2, 24, 32), (6,))
    )
    compiled = torch.compile(
        flex_attention.flex_attend, backend="eager", dynamic=False, fullgraph=True
    )
    given = (query, key, value, blocks, 0.3, 2.0, sinks)
    out = compiled(*given)
    assert out.shape == (2, 6, 24, 32)
    scores = query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.3
    scores = 2.0 * torch.tanh(scores / 2.0)
    scores = scores.masked_fill(~attention.dense_mask(mask, 2, 24), -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, -1, 24, 1)], -1)
    wanted = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(3, 1)
    assert torch.allclose(out, wanted, atol=1e-5)
    torch.compiler.reset()


def test_a_mask_of_ones_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device a read would raise; the mask is that of whole sequences, as long as it."""
    from hocket.models import masks

    module: Any = masking_utils
    monkeypatch.setattr(module, "_preprocess_mask_arguments", module._preprocess_mask_arguments)
    masks.of_whole_sequences()
    attention.choose_kernels_on_cuda()
    monkeypatch.setattr(attention, "_on_cuda", lambda device: True)
    ones = torch.ones(1, 1, dtype=torch.long, device="meta").expand(2, 24)
    hidden = torch.empty(2, 12, 32, device="meta")  # a sequence shard
    given = {"inputs_embeds": hidden, "past_key_values": None}
    sdpa = build_skeleton(dict(FAMILIES["deepseek_v3"])).config
    assert masking_utils.create_causal_mask(config=sdpa, attention_mask=ones, **given) is None
    with pytest.raises((RuntimeError, NotImplementedError)):  # real padding is read
        masking_utils.create_causal_mask(config=sdpa, attention_mask=ones.contiguous(), **given)
    model = build_skeleton(dict(FAMILIES["gpt_oss"]))
    attention.choose_kernels_on_cuda(model)
    mask = masking_utils.create_sliding_window_causal_mask(
        config=model.config, attention_mask=ones, **given
    )
    assert mask.shape == (3, 5, 48)  # boundaries of two rows, window, S + longest
