"""Which kernel reads the pages: the table, and what a trial that fails leads to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.serving.engine.attention_kernels import (  # noqa: E402
    KERNELS,
    Accelerator,
    LayerKind,
    choose_kernels,
)
from hocket.serving.engine.cache import LayerShape  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402

pytestmark = [pytest.mark.torch]

FA3, FA4, TRITON = "flash_attn_interface", "flash_attn.cute.interface", "triton"
A100, H100, B200 = (8, 0), (9, 0), (10, 0)


def kind(
    key: int = 128, value: int | None = None, dtype: str = "bfloat16", **more: Any
) -> LayerKind:
    shape = LayerShape(32, 8, key, key if value is None else value, getattr(torch, dtype))
    return LayerKind(shape, **more)


# compute capability, modules besides triton, layer, block size asked for; kernel, block size
TABLE: list[tuple[tuple[int, int], tuple[str, ...], LayerKind, int | None, str, int]] = [
    (A100, (), kind(), None, "fa2", 256),
    (A100, (FA3, FA4), kind(), None, "fa2", 256),
    (H100, (), kind(), None, "fa2", 256),
    (H100, (FA3,), kind(), None, "fa3", 16),
    (H100, (FA4,), kind(), None, "fa2", 256),  # torch gives it block tables on 10.x alone
    (B200, (FA3, FA4), kind(), None, "fa4", 128),
    (B200, (), kind(), None, "fa2", 256),
    (B200, (FA4,), kind(256), None, "fa2", 256),
    ((12, 0), (), kind(), None, "fa2", 256),
    (A100, (), kind(dtype="float16"), None, "fa2", 256),
    (A100, (), kind(dtype="float32"), None, "triton", 16),
    (H100, (FA3,), kind(dtype="float32"), None, "triton", 16),
    (H100, (FA3,), kind(window=4096), None, "fa3", 16),
    (A100, (), kind(window=1024), None, "fa2", 256),
    (A100, (), kind(256, softcap=True), None, "triton", 16),  # Gemma 2
    (H100, (FA3,), kind(64, sinks=True), None, "triton", 16),  # gpt-oss
    (H100, (FA3,), kind(192, 128), None, "triton", 16),  # DeepSeek's latent attention
    (A100, (), kind(80), None, "fa2", 256),
    (A100, (), kind(100), None, "triton", 16),
    (A100, (), kind(), 16, "triton", 16),
    (A100, (), kind(), 512, "fa2", 512),
    (H100, (FA3,), kind(), 48, "fa3", 48),
    (B200, (FA4,), kind(), 64, "triton", 64),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[2]}-{row[3]}-{row[4]}")
def test_the_table(row: Any) -> None:
    capability, modules, layer, asked, name, block = row
    accelerator = Accelerator(capability, frozenset((*modules, TRITON)))
    choice = choose_kernels([layer] * 3, accelerator, asked)
    assert choice.block_size == block
    (one,) = choice.to_json()
    assert (one["kernel"], one["layers"], one["block_size"]) == (name, 3, block)
    before = [kernel.name for kernel in KERNELS]
    assert list(one["rejected"]) == before[: before.index(name)], "each has its reason"
    assert all(one["rejected"].values())


def test_layers_of_several_kinds_share_a_block_that_all_kernels_read() -> None:
    full, sliding, capped = kind(), kind(window=512), kind(softcap=True)
    layers = [full, sliding, full, capped]
    choice = choose_kernels(layers, Accelerator(A100, frozenset({TRITON})))
    assert [choice.name(layer) for layer in layers] == ["fa2", "fa2", "fa2", "triton"]
    assert choice.block_size == 256
    assert [one["layers"] for one in choice.to_json()] == [2, 1, 1]
    assert [one["window"] for one in choice.to_json()] == [None, 512, None]


def test_torch_holds_one_flash_attention() -> None:
    """Where one layer's head is too large for it, the other flash-attention cannot be called."""
    wide = kind(256)
    choice = choose_kernels([kind(), wide], Accelerator(B200, frozenset({FA4, TRITON})))
    assert [choice.name(kind()), choice.name(wide)] == ["fa4", "triton"]
    assert choice.block_size == 128
    reasons = choice.to_json()[1]["rejected"]
    assert reasons["fa2"] == "torch holds one flash-attention at a time, here fa4"


def test_a_kernel_that_fails_its_trial_gives_way_and_says_why() -> None:
    tried: list[tuple[str, int]] = []

    def works(kernel: Any, layer: LayerKind, block: int) -> str | None:
        tried.append((kernel.name, block))
        return "gave results off by 0.7 in a trial" if kernel.name in ("fa3", "fa2") else None

    choice = choose_kernels([kind()], Accelerator(H100, frozenset({FA3, TRITON})), works=works)
    assert tried == [("fa3", 16), ("fa2", 256), ("triton", 16)]
    assert choice.name(kind()) == "triton"
    assert choice.to_json()[0]["rejected"]["fa2"] == "gave results off by 0.7 in a trial"


@pytest.mark.parametrize(
    ("accelerator", "layer", "asked", "why", "hint"),
    [
        (Accelerator((7, 5), frozenset({TRITON})), kind(), None, "not 7.5", "--device cpu"),
        (Accelerator(A100), kind(softcap=True), None, "triton is not installed", "--device cpu"),
        (Accelerator(A100, frozenset({TRITON})), kind(512), None, "up to 256, not 512", "cpu"),
        (Accelerator(A100), kind(), 24, "multiple of 256 tokens, not 24", "--block-size 256"),
    ],
)
def test_what_no_kernel_takes_is_rejected_with_every_reason(
    accelerator: Accelerator, layer: LayerKind, asked: int | None, why: str, hint: str
) -> None:
    with pytest.raises(ModelError, match="no attention kernel") as caught:
        choose_kernels([layer], accelerator, asked)
    assert why in caught.value.message
    assert all(kernel.name in caught.value.message for kernel in KERNELS)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_the_trial_tells_a_right_kernel_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every option and several block sizes: the reference against itself, then a kernel that
    forgets one thing."""
    from hocket.serving.engine import attention_cuda

    trial = attention_cuda.Trial(torch.device("cpu"))
    triton = next(kernel for kernel in KERNELS if kernel.name == "triton")
    attend = attention_cuda.attend_pools

    def as_reference(name: str, q: Any, pools: Any, step: Any, options: Any) -> Any:
        return attend("reference", q, pools, step, options)

    layers = [
        kind(16, dtype="float32"), kind(16, 8, dtype="float32"), kind(16, window=7),
        kind(16, dtype="float32", softcap=True), kind(16, dtype="float32", sinks=True),
    ]  # fmt: skip
    monkeypatch.setattr(attention_cuda, "attend_pools", as_reference)
    for layer in layers:
        for block in (16, 256):
            assert trial(triton, layer, block) is None

    def forgetful(name: str, q: Any, pools: Any, step: Any, options: Any) -> Any:
        if name == "triton":
            options = attention_cuda.Options(options.scaling)
        return attend("reference", q, pools, step, options)

    monkeypatch.setattr(attention_cuda, "attend_pools", forgetful)
    for layer in layers[2:]:
        assert "off by" in str(trial(triton, layer, 16))

    def broken(name: str, q: Any, pools: Any, step: Any, options: Any) -> Any:
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(attention_cuda, "attend_pools", broken)
    why = trial(triton, layers[0], 16)
    assert why == "failed in a trial: RuntimeError: no kernel image is available"


@pytest.mark.parametrize(("ranks", "asked", "block"), [(2, None, 32), (3, None, 48), (2, 64, 64)])
def test_over_context_ranks_a_kernel_attends_to_parts_of_blocks(
    ranks: int, asked: int | None, block: int
) -> None:
    accelerator = Accelerator(H100, frozenset({FA3, TRITON}))
    latent = LayerKind(LayerShape(8, 1, 40, 32, torch.float32, latent=True))
    for layer, name in ((kind(), "triton"), (latent, "latent")):
        choice = choose_kernels([layer], accelerator, asked, ranks=ranks)
        assert (choice.chosen[0].kernel, choice.block_size) == (name, block)
        assert "attends to whole sequences" in choice.chosen[0].rejected["fa3"] or name == "latent"
    with pytest.raises(ModelError, match=rf"multiple of {16 * ranks} tokens over cp") as caught:
        choose_kernels([kind()], accelerator, 16, ranks=ranks)
    assert caught.value.hint == f"--block-size {16 * ranks}"


def test_the_trial_of_a_part_tells_a_right_kernel_from_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hocket.serving.engine import attention_cuda

    trial = attention_cuda.Trial(torch.device("cpu"), 2)
    triton, latent = (next(k for k in KERNELS if k.name == name) for name in ("triton", "latent"))
    shape = LayerShape(8, 1, 40, 32, torch.float32, latent=True)
    for window in (None, 7):
        assert trial(latent, LayerKind(shape, window), 32) is None
    attend = attention_cuda.attend_block_parts

    def shifted(name: str, q: Any, pools: Any, step: Any, options: Any, part: Any) -> Any:
        if name == "triton":
            part = dataclasses.replace(part, begin=0)
        return attend("reference", q, pools, step, options, part)

    monkeypatch.setattr(attention_cuda, "attend_block_parts", shifted)
    for layer in (kind(16, dtype="float32"), kind(16, window=7)):
        assert "off by" in str(trial(triton, layer, 32))


def test_strided_queries_are_made_dense_before_pointers_are_handed_over() -> None:
    from hocket.serving.engine import attention_cuda
    from hocket.serving.engine.attention import Options
    from hocket.serving.engine.cache import PagedCache

    shape = LayerShape(4, 2, 16, 16, torch.float32)
    cache = PagedCache([shape], 8, 16, torch.device("cpu"), heads_first=False)
    step = attention_cuda.trial_step(16, torch.device("cpu"))
    q = torch.randn(6, 4, 16)
    strided = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert strided.stride(-1) != 1
    found = [
        attention_cuda.attend_pools(
            "reference", one, (cache.keys[0], cache.values[0]), step, Options(1)
        )
        for one in (q, strided)
    ]
    assert torch.equal(*found)
    halves = cache.keys[0].half()
    with pytest.raises(AssertionError):
        attention_cuda.attend_pools("reference", q, (halves, halves), step, Options(1))
