"""Attention on CUDA in training: a reference stands in for the flash kernel, the rest is real."""

from __future__ import annotations

import collections
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import masking_utils  # noqa: E402

from hocket.models import attention, rows  # noqa: E402
from hocket.models.attention_layers import kernel_rows, layers_of  # noqa: E402
from hocket.models.cores import watched  # noqa: E402
from hocket.models.flash_varlen import flash_varlen  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "head_dim": 8,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "mistral": {"model_type": "mistral", "sliding_window": 5, **SMALL},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "layer_types": MIXED, **SMALL},
    "qwen3": {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 6,
        "max_window_layers": 1, **SMALL,
    },
}  # fmt: skip
WINDOWED = {"llama": 0, "mistral": 4, "gemma3": 2, "qwen3": 3}
PLAIN = torch.arange(24).expand(2, -1).contiguous()
PACKED = torch.tensor(
    [[*range(10), *range(3), *range(11)], [*range(1), *range(8), *range(15)]]
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What is installed for a process lasts for one test."""
    functions: Any = transformers.AttentionInterface._global_mapping
    masks: Any = masking_utils.AttentionMaskInterface._global_mapping
    module: Any = masking_utils
    names = ("find_packed_sequence_indices", "packed_sequence_compatibility_function")
    before = functions["sdpa"], masks["sdpa"], [getattr(module, name) for name in names]
    yield
    functions["sdpa"], masks["sdpa"] = before[:2]
    for name, value in zip(names, before[2], strict=True):
        setattr(module, name, value)


@contextmanager
def noted(positions: Any, documents: rows.Documents | None) -> Iterator[None]:
    """As the training loop has it."""
    if documents is None:
        with rows.one_sequence_each():
            yield
        return
    rows.note_documents(positions, documents)
    with rows.packed_rows():
        yield


def reference(
    query: Any, key: Any, value: Any, cu_seqlens: Any, longest: int, window: int, scale: Any
) -> Any:
    """What variable-length flash attention gives, sequence by sequence."""
    found = []
    begins = cu_seqlens.tolist()
    assert longest >= max(e - b for b, e in itertools.pairwise(begins))
    for begin, end in itertools.pairwise(begins):
        if begin == end:
            continue
        q, k, v = (t[begin:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        distance = torch.arange(end - begin).unsqueeze(1) - torch.arange(end - begin)
        mask = (distance >= 0) & (distance < (window if window < longest else end))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def step(config: dict[str, Any], positions: Any) -> tuple[Any, list[Any]]:
    """Logits and gradients of one random model and batch."""
    torch.manual_seed(0)
    model = build_skeleton(dict(config), device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 64, positions.shape, generator=torch.Generator().manual_seed(3))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("positions", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_on_a_cpu_nothing_changes_by_a_bit(family: str, positions: Any) -> None:
    before = step(FAMILIES[family], positions)
    attention.choose_kernels_on_cuda()
    after = step(FAMILIES[family], positions)
    assert torch.equal(before[0], after[0])
    assert all(map(torch.equal, before[1], after[1]))


@pytest.mark.parametrize("kernel", ["flash", "dense"])
@pytest.mark.parametrize("positions", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_boundaries_are_what_the_mask_was(
    family: str, positions: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; `dense`: of float32, which no flash kernel takes."""
    wanted = step(FAMILIES[family], positions)
    calls = []

    def varlen(*given: Any) -> Any:
        calls.append(given[4:6])
        return reference(*given)

    attention.choose_kernels_on_cuda()
    monkeypatch.setattr(attention, "_on_cuda", lambda device: True)
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(attention, "_varlen", varlen)
    if kernel == "flash":
        monkeypatch.setattr(attention, "_DTYPES", {torch.float32: "bfloat16"})
    positions = positions.clone()
    documents = rows.documents_in(positions)
    with noted(positions, documents):
        found = step(FAMILIES[family], positions)
    assert torch.allclose(found[0], wanted[0], atol=1e-5)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    layers = WINDOWED[family] if documents is None else 4
    assert len(calls) == (layers if kernel == "flash" else 0)


class Ops(TorchDispatchMode):
    """Counts operations that attend."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "attn" in str(function) or "attention" in str(function):
            self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_values_every_masked_layer_takes_the_flash_kernel(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device: a read of a value would raise, so there is none, backward included."""
    attention.choose_kernels_on_cuda()
    monkeypatch.setattr(attention, "_on_cuda", lambda device: True)
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    model = build_skeleton(dict(FAMILIES[family]), dtype=torch.bfloat16)
    ids = torch.zeros(2, 24, dtype=torch.long, device="meta")
    positions = torch.zeros_like(ids)
    begins = torch.zeros(6, dtype=torch.int32, device="meta")
    documents = rows.Documents(begins, 15) if packed else None
    with noted(positions, documents), Ops() as ops:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits.float().square().mean().backward()
    flash = 4 if packed else WINDOWED[family]
    forward, backward = (
        "torch_attn._varlen_attn.default",
        "torch_attn._varlen_attn_backward.default",
    )
    assert (ops.seen[forward], ops.seen[backward]) == (flash, flash)


def test_a_mask_of_boundaries_cannot_be_computed_with() -> None:
    """Code that takes it for a mask of [B, 1, S, S] fails instead of broadcasting."""
    for length, longest, window in ((24, 24, None), (24, 23, None), (24, 12, 5)):
        begins = torch.arange(5, dtype=torch.int32)
        mask = attention.boundaries(begins, window=window, longest=longest, length=length)
        assert mask.untyped_storage().nbytes() == begins.untyped_storage().nbytes()
        for heads in (1, 4, 5):
            with pytest.raises(RuntimeError, match="size"):
                mask + torch.zeros(2, heads, length, length)
        with pytest.raises(IndexError):
            mask[:, :, :, :length]
        back = attention._parts(mask, length)
        assert torch.equal(back[0], begins)
        assert back[1:] == (min(window or longest, longest), longest)


def test_what_boundaries_cannot_say_stays_with_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding, chunks and masks of a family's own."""
    given = masking_utils.sdpa_mask
    calls = []

    def mask(**options: Any) -> Any:
        calls.append(options)
        return given(**options)

    monkeypatch.setattr(attention, "_on_cuda", lambda device: True)
    ours = attention._mask(mask)
    whole = {"batch_size": 1, "q_length": 8, "kv_length": 8, "device": "cpu"}
    padding = torch.tensor([[True] * 6 + [False] * 2])
    ours(**whole, mask_function=masking_utils.causal_mask_function, attention_mask=padding)
    assert len(calls) == 1
    chunked = type("Config", (), {"attention_chunk_size": 4, "model_type": "llama4_text"})()
    ours(**whole, mask_function=masking_utils.causal_mask_function, local_size=4, config=chunked)
    assert len(calls) == 2
    custom = {"use_vmap": True, "allow_is_causal_skip": False}
    ours(**whole, mask_function=masking_utils.causal_mask_function, **custom)
    assert len(calls) == 3
    assert ours(**whole, mask_function=masking_utils.causal_mask_function) is None
    assert len(calls) == 3


def test_documents_are_found_where_positions_begin_again() -> None:
    found = rows.documents_in(PACKED)
    assert found is not None
    assert found.cu_seqlens.tolist() == [0, 10, 13, 24, 25, 33, *[48] * 10]
    assert (found.cu_seqlens.dtype, found.longest) == (torch.int32, 24)
    assert rows.documents_in(PLAIN) is None
    middle = rows.documents_in(torch.tensor([[3, 4, 0], [0, 1, 2]]))
    assert middle is not None
    assert middle.cu_seqlens.tolist() == [0, 2, 3, *[6] * 13]
    assert middle.longest == 3
    short = rows.documents_in(torch.arange(3).repeat(8).view(1, 24))
    assert short is not None
    assert (len(short.cu_seqlens), short.longest) == (16, 6)
    many = rows.documents_in(torch.zeros(2, 24, dtype=torch.long))
    assert many is not None
    assert (len(many.cu_seqlens), many.longest) == (64, 6)


def test_what_is_noted_is_forgotten_with_the_positions() -> None:
    gc.collect()  # an earlier test's positions may still wait to be collected
    before = len(rows._KNOWN)
    positions = PLAIN.clone()
    rows.note_documents(positions, None)
    assert len(rows._KNOWN) == before + 1
    del positions
    gc.collect()
    assert len(rows._KNOWN) == before


@pytest.mark.parametrize(
    "name",
    ["tiny-llama", "tiny-gpt2", "tiny-mixtral", "tiny-qwen3", "gemma-3-27b", "gpt-oss-20b",
     "deepseek-v3", "mistral-7b"],
)  # fmt: skip
def test_layer_kinds_are_those_that_run(name: str) -> None:
    """The heads, windows and number of layers of the configuration, against the modules' own."""
    from hocket.catalogue import models as catalogue

    config = catalogue.config(name)
    text = config.get("text_config", config)
    for key, value in (("num_hidden_layers", 6), ("n_layer", 2)):
        if key in text:
            text[key] = value
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:6]
    model = build_skeleton(config, dtype=torch.bfloat16)
    kinds = layers_of(model, seq_len=2048)
    seen: collections.Counter[tuple[int, int, Any]] = collections.Counter()
    functions: Any = transformers.AttentionInterface._global_mapping
    given = functions["sdpa"]

    def noted(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        window = options.get("sliding_window")
        seen[query.shape[-1], value.shape[-1], window if window and window < 2048 else None] += 1
        return given(module, query, key, value, mask, **options)

    ids = torch.zeros(1, 32, dtype=torch.long, device="meta")
    functions["sdpa"] = noted
    with watched() as modules, rows.one_sequence_each():
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
    assert sum(count for _, count in kinds) == len(modules)
    if seen:
        for layer, count in kinds:
            assert seen[layer.key_size, layer.value_size, layer.window] == count


def test_rows_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_skeleton(dict(FAMILIES["gemma3"]), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: 1)
    found = kernel_rows(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), seq_len=24, packed=False
    )
    assert found == [
        {"layer": "sliding (window 5)", "layers": 2, "kernel": "flash-varlen",
         "reason": "window of 5"},
        {"layer": "full", "layers": 2, "kernel": "flash", "reason": "causal, no mask"},
    ]  # fmt: skip
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: 0)
    full = kernel_rows(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), seq_len=24, packed=False
    )[1]
    assert (full["kernel"], full["reason"]) == ("math", "chosen by PyTorch")
    over_context = kernel_rows(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), seq_len=24, packed=False,
        context=True,
    )  # fmt: skip
    assert [(row["kernel"], row["reason"]) for row in over_context] == [
        ("tiles", "over context ranks: a window of 5"),
        ("flash", "causal parts over context ranks, merged"),
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_compiled_layer_is_one_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows too, and other numbers of documents do not compile it again."""
    attention.choose_kernels_on_cuda()
    monkeypatch.setattr(attention, "_on_cuda", lambda device: True)
    monkeypatch.setattr(attention, "capability_of", lambda device: (9, 0))
    torch.compiler.reset()
    model = build_skeleton(dict(FAMILIES[family]), dtype=torch.bfloat16)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)  # a break raises
    ids = torch.zeros(2, 24, dtype=torch.long, device="meta")
    for each in (7, 8, 9, 10, 11):
        documents = rows.documents_in((torch.arange(48) % each).view(2, 24))
        assert documents is not None
        positions = torch.zeros_like(ids)
        begins = documents.cu_seqlens.to("meta")
        with noted(positions, rows.Documents(begins, documents.longest)):
            model(input_ids=ids, position_ids=positions, use_cache=False)
        assert len(graphs) == (2 if family in ("gemma3", "qwen3") else 1)  # one a kind of layer
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["causal", "window", "pages"])
def test_flash_attention_is_called_as_torch_calls_it(kind: str) -> None:
    """The operation's arguments are those of `varlen_attn` where that takes flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    calls: list[tuple[Any, ...]] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.torch_attn._varlen_attn.default:
                assert not kwargs
                calls.append(args)
            return func(*args, **(kwargs or {}))

    def empty(*sizes: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(sizes, dtype=dtype, device="meta")

    query, begins = empty(6, 4, 8), empty(3, dtype=torch.int32)
    key = empty(5, 16, 2, 8) if kind == "pages" else empty(6, 2, 8)
    window = 3 if kind == "window" else None
    pages = (empty(2, dtype=torch.int32), empty(2, 3, dtype=torch.int32))
    more = {"seqused_k": pages[0], "block_table": pages[1], "num_splits": 1}
    with Calls():
        out = flash_varlen(
            query, key, key, (begins, begins), (4, 5), window=window, scale=0.5,
            **({"pages": pages, "num_splits": 1} if kind == "pages" else {}),
        )  # fmt: skip
        varlen_attn(
            query, key, key, begins, begins, 4, 5, scale=0.5, enable_gqa=True,
            window_size=(-1, 0) if window is None else (window - 1, 0),
            **(more if kind == "pages" else {}),
        )  # fmt: skip
    assert out.shape == query.shape
    own, torchs = calls
    assert len(own) >= 7
    for index, one in enumerate(torch.ops.torch_attn._varlen_attn.default._schema.arguments):
        left, right = (
            given[index] if index < len(given) else one.default_value for given in (own, torchs)
        )
        assert left is right or left == right, one.name
