"""AdamW: which parameters decay, its state by name, masters below fp32, equal to the textbook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hocket.spec.run import TrainOptions  # noqa: E402
from hocket.training.optimizer import Optimizer, decays  # noqa: E402

pytestmark = pytest.mark.torch
OPTIONS = TrainOptions(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def parameters(dtype=torch.float32) -> dict[str, nn.Parameter]:
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "norm.weight": (3,), "experts.up_bias": (2, 3)}
    return {n: nn.Parameter(torch.randn(s).to(dtype)) for n, s in shapes.items()}


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def by_hand(params, steps):
    """AdamW as in algorithm 2 of Loshchilov and Hutter 2019, in double precision."""
    values = {n: p.detach().double().clone() for n, p in params.items()}
    m = {n: torch.zeros_like(v) for n, v in values.items()}
    s = {n: torch.zeros_like(v) for n, v in values.items()}
    for t in range(1, steps + 1):
        gradients(params, t)
        for n, v in values.items():
            g = params[n].grad.double()
            m[n] = 0.9 * m[n] + 0.1 * g
            s[n] = 0.95 * s[n] + 0.05 * g * g
            update = (m[n] / (1 - 0.9**t)) / ((s[n] / (1 - 0.95**t)).sqrt() + 1e-8)
            v -= 0.01 * update + 0.01 * (0.1 if n == "a.weight" else 0.0) * v
    return values


def test_equals_the_textbook_and_decays_matrices_only() -> None:
    params = parameters()
    expected = by_hand(params, 5)
    optimizer = Optimizer(params.items(), OPTIONS)
    for t in range(1, 6):
        gradients(params, t)
        optimizer.step(0.01)
    for name, value in expected.items():
        torch.testing.assert_close(params[name].double(), value, rtol=0, atol=1e-6)


def test_what_decays() -> None:
    found = {n for n, p in parameters().items() if decays(n, p.ndim)}
    assert found == {"a.weight"}


def test_masters_keep_what_bf16_rounds_away() -> None:
    params = parameters(torch.bfloat16)
    optimizer = Optimizer(params.items(), OPTIONS)
    start = {n: p.detach().clone() for n, p in params.items()}
    exact = {n: nn.Parameter(p.detach().float()) for n, p in params.items()}
    reference = Optimizer(exact.items(), OPTIONS)
    for _ in range(30):
        for n, p in params.items():
            p.grad = torch.full_like(p, 0.5)
            exact[n].grad = p.grad.float()
        optimizer.step(1e-5)  # far below one bf16 rounding step of a value near 1
        reference.step(1e-5)
    for n, p in params.items():
        assert torch.equal(optimizer.masters[n], exact[n]), n
        assert torch.equal(p, exact[n].bfloat16()), n
    assert any(not torch.equal(optimizer.masters[n], start[n].float()) for n in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_continues_bit_for_bit(dtype) -> None:
    params = parameters(dtype)
    optimizer = Optimizer(params.items(), OPTIONS)
    for t in range(3):
        gradients(params, t)
        optimizer.step(0.01)
    state = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_tensors().items()}
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype != torch.float32 else set())
    assert all(set(s) == keys for s in state.values())
    others = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    other = Optimizer(others.items(), OPTIONS)
    other.load_state_tensors(state)
    for t in range(3, 6):
        for these, stepped in ((params, optimizer), (others, other)):
            gradients(these, t)
            stepped.step(0.01)
    for n in params:
        assert torch.equal(params[n], others[n]), n
    numbers = sum(p.numel() for p in params.values())
    each = 8 if dtype == torch.float32 else 12  # moments, and a master
    assert sum(t.nbytes for t in other.tensors()) == each * numbers + 4 * len(params)


def test_state_made_before_the_first_step_changes_nothing() -> None:
    first, second = parameters(), parameters()
    for n, p in second.items():
        p.data.copy_(first[n])
    one, two = Optimizer(first.items(), OPTIONS), Optimizer(second.items(), OPTIONS)
    two.state_tensors()
    for these, optimizer in ((first, one), (second, two)):
        gradients(these, 1)
        optimizer.step(0.01)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer(parameters().items(), OPTIONS)
    state = {n: dict(s) for n, s in optimizer.state_tensors().items()}
    with pytest.raises(KeyError, match=r"a\.bias"):
        optimizer.load_state_tensors({n: s for n, s in state.items() if n != "a.bias"})
    state["a.weight"]["exp_avg"] = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match=r"a\.weight exp_avg"):
        optimizer.load_state_tensors(state)


def test_a_rank_without_parameters_steps() -> None:
    optimizer = Optimizer([], OPTIONS)
    optimizer.step(0.1)
    assert optimizer.state_tensors() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_loss_does_not_use_decays_all_the_same(dtype) -> None:
    unused = parameters(dtype)
    before = {name: p.detach().float().clone() for name, p in unused.items()}
    optimizer = Optimizer(unused.items(), OPTIONS)
    optimizer.step(0.01)
    stepped = {**unused, **optimizer.masters}
    decayed = before["a.weight"] * (1 - 0.01 * 0.1)
    assert torch.allclose(stepped["a.weight"], decayed, rtol=1e-6, atol=0)
    assert torch.equal(stepped["a.bias"], before["a.bias"])


@pytest.mark.ranks
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_a_run_in_bf16_is_off_by_rounding_alone(tmp_path: Path, max_norm: float) -> None:
    """Three steps at 1e-2, where Adam turns the sign of a gradient's rounding into whole steps: as
    far from float64 as a plain loop with fp32 masters is, and equal to that loop but for a few
    entries on the edge of a rounding. Where gradients are clipped that is so for each step from
    the same state: the last bit of their norm depends on the processor's vectors, and is many
    entries two steps later."""
    import math

    import transformers
    from safetensors.torch import load_file

    import hocket
    from hocket.training.order import permuted

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=260, max_position_embeddings=32,
    )  # fmt: skip
    source, seq_len, batch, steps = tmp_path / "model", 16, 6, 3
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    (tmp_path / "a.txt").write_text("one melody is dealt note by note to several voices. " * 40)
    hocket.train(
        str(source), data=[tmp_path / "a.txt"], run=tmp_path / "run", tokenizer="bytes", seq_len=16,
        global_batch=batch, steps=steps, lr=1e-2, warmup=0, lr_schedule="constant", dtype="bf16",
        weight_decay=0.1, microbatches=1, layout="dp1", save_every=1, keep_checkpoints=steps,
        max_grad_norm=max_norm,
    )  # fmt: skip
    ids = np.fromfile(tmp_path / "run/data/tokens.bin", np.uint16).astype(np.int64)
    order = permuted(np.arange(steps * batch), (len(ids) - 1) // seq_len, (0, 0)) * seq_len
    rows = torch.tensor(ids[order[:, None] + np.arange(seq_len + 1)])

    def states() -> Iterator[dict[str, torch.Tensor]]:
        for step in range(1, steps + 1):
            (folder,) = (tmp_path / "run/checkpoints").glob(f"step-*{step}")
            yield load_file(folder / "rank-00000.safetensors")

    def plain(dtype: torch.dtype, *, from_run: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """The parameters after each step; `from_run`: each begins where the run's step began."""
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        if dtype != torch.bfloat16:  # else the rotary frequencies stay in fp32
            model = model.to(dtype)
        named = dict(model.named_parameters())
        wide = torch.promote_types(dtype, torch.float32)
        masters = {name: p.detach().to(wide, copy=True) for name, p in named.items()}
        groups = [
            {"params": [m for m in masters.values() if (m.ndim > 1) == decayed],
             "weight_decay": 0.1 * decayed}
            for decayed in (True, False)
        ]  # fmt: skip
        adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        for taken, state in zip(rows.split(batch), states(), strict=True):
            logits = model(input_ids=taken[:, :-1]).logits.to(wide)
            nn.functional.cross_entropy(logits.flatten(0, 1), taken[:, 1:].flatten()).backward()
            for name, master in masters.items():
                master.grad = named[name].grad.to(wide)
                named[name].grad = None
            if max_norm:
                nn.utils.clip_grad_norm_(masters.values(), max_norm)
            adamw.step()
            for name, master in masters.items():
                named[name].data.copy_(master)
            yield {name: p.detach().double() for name, p in named.items()}
            for name, master in masters.items() if from_run else ():
                master.copy_(state[f"optimizer/master/{name}"])
                named[name].data.copy_(master)
                for moment in ("exp_avg", "exp_avg_sq"):
                    adamw.state[master][moment].copy_(state[f"optimizer/{moment}/{name}"])

    *_, loop = plain(torch.bfloat16)
    *_, exact = plain(torch.float64)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    mine = {name: p.detach().double() for name, p in found.named_parameters()}
    numbers = sum(p.numel() for p in mine.values())

    def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        squares = [(one[name] - other[name]).square().sum() for name in mine]
        return math.sqrt(sum(squares) / numbers)

    assert apart(loop, exact) > 2e-4  # of steps of 1e-2
    assert apart(mine, loop) < 0.02 * apart(loop, exact)

    def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
        return sum(int((one[name] != other[name]).sum()) for name in mine)

    if not max_norm:
        assert unequal(mine, loop) < 0.001 * numbers
    for after, state in zip(plain(torch.bfloat16, from_run=True), states(), strict=True):
        ran = {name: state[f"parameter/{name}"].double() for name in mine}
        assert unequal(ran, after) < 0.001 * numbers
    assert unequal(mine, ran) == 0
