"""What is left of a module when a stage is cut out of it."""

# ruff: noqa: E402

from __future__ import annotations

import copy
import dataclasses

import pytest

from hocket.spec.errors import ModelError

torch = pytest.importorskip("torch")

from hocket.runtime.pipeline import Stage, cut, cut_costs
from tests.runtime_pipeline.models import HIDDEN, batch, gpt2, llama, plain, scaled


@pytest.mark.torch
def test_a_meta_model_is_cut_without_allocating() -> None:
    with torch.device("meta"):
        module, plan = llama(4)
    parts = [cut(module, plan, (1, 2, 1), s) for s in range(3)]
    assert all(p.is_meta for part in parts for p in part.parameters())
    names = [{name for name, _ in part.named_parameters()} for part in parts]
    assert set.union(*names) == {name for name, _ in module.named_parameters()}
    assert sum(map(len, names)) == len(set.union(*names))
    assert "model.layers.1.mlp.up_proj.weight" in names[1]
    assert {n.split(".")[2] for n in names[1]} == {"1", "2"}
    # The whole model is untouched.
    assert sum(p.numel() for p in module.parameters()) == sum(
        p.numel() for part in parts for p in part.parameters()
    )


@pytest.mark.torch
def test_a_real_model_lends_its_own_parameters() -> None:
    module, plan = plain(4)
    first, last = (cut(module, plan, (2, 2), s) for s in range(2))
    own = dict(module.named_parameters())
    for part in (first, last):
        assert all(p is own[name] for name, p in part.named_parameters())


@pytest.mark.torch
def test_a_tie_across_stages_becomes_two_tensors() -> None:
    module, plan = gpt2(2, tied=True)
    first, last = (cut(module, plan, (1, 1), s) for s in range(2))
    owner = dict(first.named_parameters())["transformer.wte.weight"]
    copy = dict(last.named_parameters())["lm_head.weight"]
    assert copy is not owner
    assert torch.equal(copy, owner)
    assert "lm_head.weight" not in dict(first.named_parameters())


@pytest.mark.torch
def test_stand_ins_look_like_what_they_stand_for() -> None:
    module, plan = plain(4)
    part = cut(module, plan, (1, 2, 1), 1)
    assert [layer.kind for layer in part.body.blocks] == ["even", "odd", "even", "odd"]
    hidden = torch.ones(1, 2, HIDDEN)
    assert part.body.blocks[0](hidden, scale=1.0) == (hidden, None)
    assert part.body.entry(hidden) is hidden
    assert part.body.tokens.num_embeddings == module.body.tokens.num_embeddings
    assert float(part.body.positions(torch.arange(2))) == 0.0


@pytest.mark.torch
def test_stages_in_turn_are_the_whole_model() -> None:
    module, plan = gpt2(3)
    whole = batch(2)
    hidden = None
    for index in range(3):
        stage = Stage(cut(module, plan, (1, 1, 1), index), index, 3, plan=plan, hidden_size=HIDDEN)
        hidden = stage.output(whole, hidden)
        assert stage.hidden_shape(whole) == (2, whole["input_ids"].shape[1], HIDDEN)
    expected = module(whole["input_ids"], position_ids=whole["position_ids"]).logits
    torch.testing.assert_close(hidden.logits, expected)


@pytest.mark.torch
@pytest.mark.parametrize("bounds", [(2, 1, 1), (1, 0, 3), (0, 4, 0), (0, 0, 4), (4, 0, 0)])
def test_what_no_module_computes_happens_once(bounds: tuple[int, ...]) -> None:
    module, plan = scaled(4)
    whole = batch(2, argument="ids")
    expected = module(whole["ids"], whole["position_ids"])
    expected.pow(2).sum().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    sent, hidden = [], None
    for index in range(3):
        part = cut(copy.deepcopy(module), plan, bounds, index)
        stage = Stage(part, index, 3, plan=plan, hidden_size=HIDDEN)
        out = stage.output(whole, hidden)
        hidden = out.detach().requires_grad_()
        sent.append((stage, out, hidden))
    torch.testing.assert_close(sent[-1][1], expected)
    sent[-1][1].pow(2).sum().backward()
    for (_, out, hidden), _ in zip(sent[-2::-1], sent, strict=False):
        out.backward(hidden.grad)
    found = {n: p.grad for stage, _, _ in sent for n, p in stage.module.named_parameters()}
    torch.testing.assert_close(found, wanted)


@pytest.mark.torch
def test_costs_count_the_head_even_if_tied() -> None:
    module, plan = gpt2(2, tied=True)
    costs = cut_costs(module, plan, cuda=False)
    layer = sum(p.numel() for p in module.transformer.h[0].parameters() if p.ndim == 2)
    assert costs["layer_costs"] == [layer, layer]
    assert costs["after_cost"] == module.lm_head.weight.numel()


@pytest.mark.torch
def test_a_plan_that_does_not_fit_the_model() -> None:
    module, plan = plain(4)
    with pytest.raises(ModelError, match=r"no module 'body\.absent'"):
        cut(module, dataclasses.replace(plan, after=("body.absent",)), (2, 2), 0)
    with pytest.raises(ModelError, match="not a list of 4 layers"):
        cut(module, dataclasses.replace(plan, layers="body.final"), (2, 2), 0)
