"""Kernels in C give what torch gives; modules are replaced only where they do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hocket.models import skeleton  # noqa: E402
from hocket.runtime.native import library  # noqa: E402
from hocket.runtime.native.kernels import CpuKernels, kernels_take  # noqa: E402
from hocket.serving.engine import attention, fused_layer  # noqa: E402
from hocket.serving.engine.fused import fuse  # noqa: E402
from hocket.serving.engine.fused_layer import fuse_layers  # noqa: E402
from hocket.serving.engine.gemm_select import choose_products  # noqa: E402
from hocket.serving.engine.projections import lay_inputs_first, merge_projections  # noqa: E402
from tests.families import FAMILIES, whole_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]
F = torch.nn.functional
_UNFUSED = 3e-6
"""How far entries of about 1 may be off where a product is rounded before it is added."""


def paged(kv: list[Any], tables: Any, block: int, blocks: int) -> Any:
    """A pool [blocks, K, B, D] that holds sequences [K, tokens, D] in the blocks of `tables`."""
    pool = torch.full((blocks, kv[0].shape[0], block, kv[0].shape[2]), float("nan"))
    for row, tokens in enumerate(kv):
        for at in range(tokens.shape[1]):
            pool[tables[row, at // block], :, at % block] = tokens[:, at]
    return pool


@pytest.mark.parametrize("size", [32, 64, 128, 20])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_attention_of_decoding_rows(
    kernels: CpuKernels, size: int, window: int | None, sinks: bool, softcap: float | None
) -> None:
    torch.manual_seed(size)
    block, heads, group, lengths = 4, 2, 3, [1, 4, 5, 13, 30]
    width = size + 4 if size == 20 else size
    tables = torch.randperm(64)[: 5 * 8].view(5, 8)
    keys = [torch.randn(heads, n, size) for n in lengths]
    values = [torch.randn(heads, n, width) for n in lengths]
    merged = torch.randn(5, heads * group + 3, size)
    q, sink = merged[:, : heads * group], torch.randn(heads * group) if sinks else None
    made = kernels.attend(
        q, paged(keys, tables, block, 64), paged(values, tables, block, 64), tables,
        torch.tensor(lengths), longest=32, scaling=0.3, window=window, softcap=softcap,
        sinks=sink,
    )  # fmt: skip
    for row, n in enumerate(lengths):
        first = max(0, n - window) if window else 0
        k = keys[row][:, first:].repeat_interleave(group, 0)
        v = values[row][:, first:].repeat_interleave(group, 0)
        scores = torch.einsum("ad,atd->at", q[row], k) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sink is not None:
            scores = torch.cat([scores, sink.unsqueeze(1)], 1)
        weights = scores.softmax(-1)[:, : n - first]
        expected = torch.einsum("at,atd->ad", weights, v)
        torch.testing.assert_close(made[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [32, 128, 20])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 37), (5, 8), (31, 17)])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (7, True), (20, False)])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_attention_of_a_chunk(
    form: str,
    kernels: CpuKernels,
    size: int,
    start: int,
    count: int,
    window: int | None,
    sinks: bool,
    softcap: float | None,
) -> None:
    torch.manual_seed(start + count)
    heads, group, total = 2, 3, start + count
    width = size + 4 if size == 20 else size
    table = torch.randperm(32)[: -(-total // 4)]
    key, value = torch.randn(heads, total, size), torch.randn(heads, total, width)
    pools = [paged([one], table.unsqueeze(0), 4, 32) for one in (key, value)]
    q = torch.randn(1, count, heads * group + 1, size).transpose(1, 2)[:, :-1]
    sink = torch.randn(heads * group) if sinks else None
    made = torch.empty(count, heads * group, width)
    kernels.attend_chunk(
        q, *pools, table, start=start, scaling=0.3, out=made, window=window, softcap=softcap,
        sinks=sink,
    )  # fmt: skip
    k, v = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = torch.einsum("acd,atd->act", q[0], k) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at, seen = torch.arange(start, total).unsqueeze(1), torch.arange(total)
    hidden = seen > at
    if window is not None:
        hidden |= seen <= at - window
    scores.masked_fill_(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(-1, 1, 1).expand(-1, count, 1)], -1)
    expected = torch.einsum("act,atd->cad", scores.softmax(-1)[..., :total], v)
    off = _UNFUSED if form == "portable" else 1e-6
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=off)


def test_what_is_no_number_stays_in_its_row(kernels: CpuKernels) -> None:
    tables = torch.arange(6).view(3, 2)
    keys = [torch.randn(1, 8, 32) for _ in range(3)]
    keys[0][0, 3, 0], keys[1][0, 7, 5] = float("nan"), float("inf")
    pool = paged(keys, tables, 4, 6)
    q = torch.ones(3, 2, 32)
    made = kernels.attend(
        q, pool, pool.nan_to_num(), tables, torch.full((3,), 8), longest=8, scaling=1.0
    )
    assert made[0].isnan().all()
    assert made[1].isnan().all()
    assert made[2].isfinite().all()
    x = torch.randn(1, 2, 16)
    x[0, 0, 3] = float("nan")
    assert kernels.rms_norm(x, torch.ones(16), 0.0, 1e-6)[0, 0].isnan().all()
    assert kernels.silu_product(x, torch.ones(1, 2, 16)).isnan().sum() == 1


def test_keys_are_stored_where_they_belong(kernels: CpuKernels) -> None:
    merged = torch.randn(1, 6, 5 * 8).view(1, 6, 5, 8).transpose(1, 2)
    new, places = merged[:, 1:4], torch.tensor([9, 0, 31, 14, 15, 8])
    pool = torch.zeros(8, 3, 4, 8)
    kernels.store(new, places, pool)
    for token, place in enumerate(places.tolist()):
        assert torch.equal(pool[place // 4, :, place % 4], new[0, :, token])
    assert int(pool.count_nonzero()) == new.numel()


def test_pointers_of_other_strides_types_and_devices_are_not_handed_over(
    kernels: CpuKernels,
) -> None:
    """A kernel would read beyond them, or numbers that are none."""
    x, pool = torch.randn(1, 2, 3, 16), torch.zeros(2, 2, 4, 16)
    places, cos = torch.arange(3), torch.ones(1, 3, 16)
    wrong = [
        x.transpose(2, 3).contiguous().transpose(2, 3), x.double(), x.bfloat16(), x.to("meta"),
    ]  # fmt: skip
    calls: list[Callable[[torch.Tensor], object]] = [
        lambda given: kernels.store(given, places, pool),
        lambda given: kernels.rotate(given, x, cos, cos),
        lambda given: kernels.rms_norm(given.transpose(1, 2), torch.ones(16), 0.0, 1e-6),
        lambda given: kernels.silu_product(given[:, 0], x[:, 0]),
        lambda given: kernels.largest(given[0, 0]),
    ]
    for call in calls:
        call(x)
        for given in wrong:
            with pytest.raises(AssertionError):
                call(given)
    for bad in (pool.transpose(2, 3).contiguous().transpose(2, 3), pool.double()):
        with pytest.raises(AssertionError):
            kernels.store(x, places, bad)
    with pytest.raises(AssertionError):
        kernels.store(x, places.int(), pool)


@pytest.mark.parametrize("width", [7, 16, 688])
def test_elementwise(kernels: CpuKernels, width: int) -> None:
    torch.manual_seed(width)
    merged = torch.randn(1, 3, 2 * width) * 40
    gate, up = merged.split(width, -1)
    made = kernels.silu_product(gate, up)
    torch.testing.assert_close(made, F.silu(gate) * up, rtol=2e-6, atol=1e-30)
    ends = torch.tensor([[[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]]])
    torch.testing.assert_close(kernels.silu_product(ends, torch.ones(1, 1, 7)), F.silu(ends))
    heads = merged.view(1, 3, 2, width)
    weight = torch.randn(width)
    for x in (gate, heads, heads.transpose(1, 2)):
        made = kernels.rms_norm(x, weight, 1.0, 1e-5)
        torch.testing.assert_close(made, F.rms_norm(x, (width,), weight + 1, 1e-5))


@pytest.mark.parametrize("width", [1, 7, 4096])
def test_largest(kernels: CpuKernels, width: int) -> None:
    x = torch.randint(-5, 5, (4, width)).float()
    x[1] = -torch.inf
    values, ids = kernels.largest(x)
    assert torch.equal(values, x.amax(-1))
    assert ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in x]
    x[2, -1] = float("nan")
    assert kernels.largest(x)[0].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3", "qwen3", "gpt2", "mixtral"])
def test_models_compute_what_they_did(kernels: CpuKernels, family: str) -> None:
    plain: Any = whole_model(family)
    ids = torch.randint(3, 60, (1, 20))
    names = [name for name, _ in plain.named_parameters()]
    with torch.inference_mode():
        expected = plain(ids).logits
        fused_modules = fuse(plain, kernels)
        found = plain(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (fused_modules > 0) == (family != "gpt2")
    assert [name for name, _ in plain.named_parameters()] == names
    assert fuse(plain, kernels) == 0


def test_positions_turn_as_before_outside_the_engine(kernels: CpuKernels) -> None:
    from transformers.models.llama import modeling_llama

    fuse(whole_model("llama"), kernels)
    turned: Any = modeling_llama.apply_rotary_pos_emb
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    cos, sin = torch.randn(2, 1, 5, 8)
    expected = turned.original(q, k, cos, sin)
    assert all(map(torch.equal, turned(q, k, cos, sin), expected))
    with attention.attending(object()):  # type: ignore[arg-type]
        assert turned(q.clone().requires_grad_(), k, cos, sin)[0].requires_grad
        made = turned(q, k, cos, sin)
        assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


def served_model(family: str, kernels: CpuKernels) -> Any:
    """The whole model as the engine builds it, fused but for its layers."""
    made: Any = skeleton.build_skeleton(
        FAMILIES[family], device="cpu", dropout=0.0, attention=attention.NAME
    )
    plain = whole_model(family)
    made.load_state_dict(plain.state_dict())
    own = dict(made.named_buffers())
    for name, buffer in plain.named_buffers():
        own[name].copy_(buffer)
    merge_projections(made.eval().requires_grad_(False))
    fuse(made, kernels)
    return made


@pytest.mark.parametrize("family", ["llama_tied", "mistral", "qwen3", "gemma3", "phi3"])
def test_layers_are_replaced_where_they_compute_the_same(kernels: CpuKernels, family: str) -> None:
    replaced = fuse_layers(served_model(family, kernels), kernels)
    assert replaced == (4 if family in ("llama_tied", "mistral") else 0)


def test_layers_whose_sums_nearly_cancel_are_replaced(kernels: CpuKernels) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=768, intermediate_size=2048, num_hidden_layers=2,
        num_attention_heads=12, num_key_value_heads=4, initializer_range=0.06,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    made.config._attn_implementation = attention.NAME
    merge_projections(made)
    lay_inputs_first(made)
    choose_products(made, kernels, tried=False)
    fuse(made, kernels)
    assert fuse_layers(made, kernels) == 2


def test_a_layer_that_computes_something_else_is_left(kernels: CpuKernels) -> None:
    plain = served_model("llama", kernels)
    first, second, third, fourth = plain.model.layers
    forward = type(second).forward

    class Scaled(type(second)):  # type: ignore[misc]
        def forward(self, *args: Any, **others: Any) -> Any:
            return forward(self, *args, **others) * 1.01

    second.__class__ = Scaled
    third.register_forward_hook(lambda module, inputs, output: None)
    fourth.self_attn.k_proj.merged.sizes[1] -= 8
    assert fuse_layers(plain, kernels) == 1
    assert isinstance(first, fused_layer._Layer)


def test_a_module_that_gives_other_numbers_is_left(kernels: CpuKernels) -> None:
    class Halved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16), requires_grad=False)
            self.eps = 1e-6

        def forward(self, x: Any) -> Any:
            return F.rms_norm(x, (16,), self.weight, self.eps) * 0.5

    module = Halved()
    assert fuse(module, kernels) == 0
    assert type(module) is Halved


def test_only_what_a_kernel_reads_fits() -> None:
    x = torch.randn(4, 6)
    assert kernels_take(x, x[:, 2:])
    assert not kernels_take(x.t())
    assert not kernels_take(x.double())
    assert not kernels_take(x, x.clone().requires_grad_())
    assert not kernels_take(x.to("meta"))


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh = library.library.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler-anywhere")
    assert fresh() is None
    monkeypatch.setenv("CC", "false")
    assert fresh() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv(library.VARIABLE, "0")
    assert fresh() is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("PATH", "/nonexistent", "no C compiler (gcc, clang, cc); PyTorch's operations compute"),
        ("CC", "no-such-compiler", "CC=no-such-compiler is not a program; PyTorch's"),
        ("CC", "BROKEN", "cannot compile them (kernels.c:1: fatal error: no math.h)"),
        ("XDG_CACHE_HOME", "/proc/none", "they cannot be kept in /proc/none/hocket/kernels"),
    ],
)
def test_the_lack_of_kernels_is_reported_with_the_fix(
    variable: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if value == "BROKEN":
        broken = tmp_path / "broken"
        broken.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
            'echo "kernels.c:1: fatal error: no math.h" >&2\nexit 1\n'
        )
        broken.chmod(0o755)
        value = str(broken)
    monkeypatch.setenv(variable, value)
    remark = library.library_remark()
    assert remark is not None
    assert remark.startswith("no kernels in C: ")
    assert wanted in remark
    assert "Fix: " in remark
    monkeypatch.setenv(library.VARIABLE, "0")  # they were not asked for
    assert library.library_remark() is None


def test_a_compiler_that_is_too_slow_is_not_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_SECONDS", 1.0)
    remark = library.library_remark()
    assert remark is not None
    assert f"{slow} took more than 1 s; " in remark
    assert "Fix: start it again when" in remark


def test_they_are_compiled_once_for_a_processor(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.VARIABLE, form)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran: list[Any] = []
    real = subprocess.run

    def run(words: Any, **options: Any) -> Any:
        ran.append(words[1:])
        return real(words, **options)

    monkeypatch.setattr(subprocess, "run", run)
    assert library.library.__wrapped__() is not None
    (kept,) = library.library_folder().iterdir()
    assert ran[0] == ["--version"]
    (compiled,) = ran[1:]
    assert [word for word in compiled if "-march" in word] == list(library.FORMS[form])
    assert library.library.__wrapped__() is not None
    assert ran[2:] == [["--version"]]
    assert [kept] == list(library.library_folder().iterdir())
