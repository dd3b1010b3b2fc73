"""The public `parallelize`: the flags' names, transformers' labels, a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


@pytest.mark.ranks
def test_transformers_batches_give_transformers_loss(ranks) -> None:
    layouts = [
        "tp2.pp2", "dp2.pp2", "pp4", "dp2.tp2", "dp4:zero=3", "dp2.tp2:sequence_parallel=true",
    ]  # fmt: skip
    for row in ranks.run("tests.jobs.cases:public", world_size=4, layouts=layouts):
        for layout, found in zip(layouts, row, strict=True):
            assert found["loss"] < 1e-5, layout
            assert found["evaluated"] < 1e-5, layout
            assert found["tokens"] == 0, layout
            assert found["norm"] < 1e-5, layout


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "layouts"), [(1, ["dp1"]), (2, ["tp2", "pp2", "dp2:zero=1", "dp2:zero=3"])]
)
def test_a_loop_of_ones_own_learns_the_next_token(ranks, tmp_path, size, layouts) -> None:
    found, *_ = ranks.run(
        "tests.jobs.cases:own_loop",
        world_size=size,
        layouts=layouts,
        folder=str(tmp_path),
        steps=40,
    )
    assert found["expected"] < 1.0
    for layout in layouts:
        row = found[layout]
        assert row["loss"] < 1e-5, layout
        assert row["next"] == 1.0, layout
        assert row["copies"] < 0.1, layout
        assert row["state"] < 1e-3, layout
        assert row["export"] < 1e-3, layout
        assert row["equal"], layout
        assert all(row["follows"]), layout


@pytest.mark.ranks
def test_an_optimizer_of_whole_tensors_is_plain_torchs_or_rejected(ranks, tmp_path) -> None:
    """State in numbers and the groups' learning rate are in the checkpoint too."""
    for found in ranks.run("tests.jobs.cases:own_optimizers", world_size=2, folder=str(tmp_path)):
        assert found["difference"] < 1e-7, found  # transformers takes any loss in fp32
        for layout in ("tp2", "dp2:zero=1"):
            assert found[f"AdamW {layout}"] == ""
            for kind in ("Normed", "Adafactor"):
                assert f"{kind} computes from whole tensors" in found[f"{kind} {layout}"]
                assert "parallel.parameters(), lr=1e-4" in found[f"{kind} {layout}"]
        assert "'history' that AdamW has of" in found["list"]


@pytest.mark.ranks
def test_buffers_that_a_models_files_hold_are_saved_and_exported(ranks, tmp_path) -> None:
    layouts = ["dp2.ep2", "pp2", "tp2", "dp2:zero=3"]
    found, *_ = ranks.run(
        "tests.jobs.cases:buffers", world_size=2, layouts=layouts, folder=str(tmp_path)
    )
    for layout in layouts:
        assert found[layout]["export"], layout
        assert found[layout]["bias"] == [[pytest.approx(n / 10) for n in range(8)]] * 3, layout


@pytest.mark.ranks
def test_a_checkpoint_without_buffers_is_named_and_not_exported(ranks, tmp_path) -> None:
    layouts = ["dp2.ep2", "pp2"]
    first, other = ranks.run(
        "tests.jobs.cases:no_buffers", world_size=2, layouts=layouts, folder=str(tmp_path)
    )
    for layout in layouts:
        (warned,), kept = first[layout]
        assert "was written without buffers: model.layers." in warned or layout == "pp2"
        assert "keep the values that the model was loaded with" in warned
        assert kept
        assert other[layout] == [[], True]
    assert "e_score_correction_bias" in first["export"]
    assert "hocket train --resume" in first["export"]


@pytest.mark.ranks
def test_a_routers_auxiliary_loss_is_that_of_gradient_accumulation(ranks) -> None:
    cases = [
        ("tp2", 1), ("tp2", 4), ("dp2", 1), ("dp2:zero=2", 2), ("dp2:zero=3", 2), ("cp2", 1),
        ("cp2:zero=1", 2),
    ]  # fmt: skip
    for rank in ranks.run("tests.jobs.cases:router_loss", world_size=2, cases=cases):
        for case, row in zip(cases, rank, strict=True):
            assert row["expected"] - row["cross_entropy"] > 0.5, case  # it is part of the loss
            assert row["loss"] < 1e-6, (case, row)
            assert row["gradient"] < 1e-6, (case, row)  # transformers takes any loss in fp32
            assert row["norm"] < 1e-6, (case, row)
            assert row["dtype"] == "torch.float64", case


@pytest.mark.ranks
def test_what_the_proxy_check_rejects_is_rejected_before_a_step(ranks) -> None:
    for found in ranks.run("tests.jobs.cases:rejected", world_size=2):
        assert "FalconForCausalLM (falcon) cannot be split" in found["falcon alibi"]
        assert "the gradient of" in found["gpt_neox_japanese"]
        assert "sequence parallelism" in found["gpt_neox_japanese"]
        assert "output_router_logits" in found["mixtral pp2"]
        assert "no layer of the model has a feed-forward module (mlp)" in found["opt mlp"]
        assert found["opt mlp"].endswith(" | recompute='full'")
        assert "z_loss_coefficient" in found["bamba z-loss"]


@pytest.mark.torch
@pytest.mark.parametrize("shifted", [True, False])
def test_labels_of_the_other_convention_are_rejected(shifted) -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    ids = torch.randint(0, 96, (2, 9))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, :-1] if shifted else ids[:, 1:]}
    parallel = hocket.parallelize(_llama(), "dp1", labels_shifted=shifted)
    with pytest.raises(hocket.HocketError, match="copy its input" if shifted else "shifted"):
        parallel.forward_backward([batch])


@pytest.mark.torch
def test_a_layout_of_another_world_is_rejected_before_its_proxy_model_is_tried(
    tmp_path, monkeypatch
) -> None:
    """Collectives of a world that is not there leave memory as it was: what such a trial finds
    would be cached, and reject the model for every later job."""
    import hocket
    from tests.jobs.cases import _llama

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for layout in ("tp2", "cp2", "pp2", "dp2"):
        with pytest.raises(hocket.HocketError, match="needs 2 ranks, the world has 1") as error:
            hocket.parallelize(_llama(), layout)
        assert "init_process_group" in error.value.hint
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.torch
@pytest.mark.parametrize("method", ["forward_backward", "evaluate"])
def test_a_batch_that_is_not_in_a_list_is_rejected(method) -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    ids = torch.randint(0, 96, (2, 9))
    parallel = hocket.parallelize(_llama(), "dp1")
    for given in ({"input_ids": ids, "labels": ids}, ids):
        with pytest.raises(hocket.HocketError, match="takes a list of microbatches") as error:
            getattr(parallel, method)(given)
        assert error.value.hint == f"{method}([batch])"


@pytest.mark.torch
def test_other_bad_input_of_a_loop_is_rejected() -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    ids = torch.randint(0, 96, (2, 9))
    model = _llama()
    parallel = hocket.parallelize(model, "dp1")
    with pytest.raises(hocket.HocketError, match="at least one microbatch"):
        parallel.forward_backward([])
    with pytest.raises(hocket.HocketError, match="of another shape than input_ids"):
        parallel.evaluate([{"input_ids": ids, "labels": ids[:, 1:]}])
    for prompts in ("text", ["text"], ids[0], ids.float(), [[1.5]], [3, 4], [["a"]]):
        with pytest.raises(hocket.HocketError, match="token ids"):
            parallel.generate(prompts)  # type: ignore[arg-type]
    assert parallel.generate(ids.numpy(), max_new_tokens=2) == parallel.generate(
        ids, max_new_tokens=2
    )
    positions = model.config.max_position_embeddings
    with pytest.raises(hocket.HocketError, match=f"the model has {positions}") as error:
        parallel.generate(ids, max_new_tokens=positions)
    assert error.value.hint == f"max_new_tokens={positions - 9}"
    with pytest.raises(hocket.HocketError, match="parallelized already, as dp1"):
        hocket.parallelize(model, "dp1")
    with torch.device("meta"):
        empty = _llama()
    with pytest.raises(hocket.HocketError, match="has no values"):
        hocket.parallelize(empty, "dp1")


@pytest.mark.torch
def test_the_state_of_another_models_optimizer_is_not_dropped(tmp_path) -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    ids = torch.randint(0, 96, (2, 9))
    parallel = hocket.parallelize(_llama(), "dp1")
    other = torch.optim.AdamW(_llama().parameters(), lr=1e-3)
    parallel.forward_backward([{"input_ids": ids, "labels": ids}])
    for method in (parallel.save_checkpoint, parallel.load_checkpoint):
        with pytest.raises(hocket.HocketError, match="tensors are not this model's") as error:
            method(tmp_path / "saved", other)
        assert "AdamW(parallel.parameters()" in error.value.hint
    assert not (tmp_path / "saved").exists()
    own = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    own.step()
    parallel.save_checkpoint(tmp_path / "saved", own)
    parallel.load_checkpoint(tmp_path / "saved", own)


@pytest.mark.torch
def test_a_damaged_checkpoint_does_not_stay_in_place_of_a_whole_one(tmp_path: Path) -> None:
    import hocket
    from hocket.spec.checkpoint import checkpoints
    from tests.jobs.cases import _llama

    parallel = hocket.parallelize(_llama(), "dp1")
    for parallel.step in (3, 5):
        path = parallel.save_checkpoint(tmp_path)
    (path / "rank-00000.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-000005"):
        parallel.load_checkpoint(tmp_path)
    parallel.step = 7
    parallel.save_checkpoint(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000007", "step-000003"]


@pytest.mark.torch
def test_a_mixture_in_fp64_is_computed_without_torchs_grouped_matmul() -> None:
    """Its loss is plain transformers' with eager experts, to fp64's rounding."""
    import copy

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import hocket

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).double()
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("eager")
    ids = torch.randint(0, 96, (2, 9))
    logits = plain(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).item()
    parallel = hocket.parallelize(model, "dp1")
    found = parallel.forward_backward([{"input_ids": ids, "labels": ids}])
    assert float(found) == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():  # the trained model is the one that was split
        wanted = plain.eval()(input_ids=ids[:1]).logits[0, -1].argmax().item()
    assert parallel.eval().generate([ids[0].tolist()], max_new_tokens=1) == [[wanted]]


@pytest.mark.torch
def test_what_peft_wraps_is_named() -> None:
    """Adapters of linear layers are taken over; those of stacked experts are not, and experts that
    have some cannot be placed over ranks."""
    import peft
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import hocket
    from hocket.models.plans import plan_for

    def adapted(*targets: str) -> Any:
        config = Qwen3MoeConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, moe_intermediate_size=32,
            head_dim=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        model = Qwen3MoeForCausalLM(config)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets)))

    with pytest.raises(hocket.HocketError, match="PeftModel wraps the model") as error:
        hocket.parallelize(adapted("q_proj"), "dp1")
    assert "get_base_model()" in error.value.hint
    model = adapted("q_proj").get_base_model()
    assert plan_for(model).experts is not None
    ids = torch.randint(0, 96, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss.item()
    found = hocket.parallelize(model, "dp1").forward_backward([{"input_ids": ids, "labels": ids}])
    assert float(found) == pytest.approx(expected, rel=1e-5)
    plan = plan_for(adapted("gate_proj", "up_proj", "down_proj").get_base_model())
    assert plan.experts is None
    assert "are adapted by a ParamWrapper" in plan.reasons["experts"]


@pytest.mark.torch
def test_shifted_labels_are_taken_where_it_is_said() -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    ids = torch.randint(0, 96, (2, 9))
    model = _llama()
    tokens, following = ids[:, :-1], ids[:, 1:].contiguous()
    expected = model(input_ids=tokens, labels=tokens, shift_labels=following).loss.detach()
    batch = {"input_ids": tokens, "labels": following}
    parallel = hocket.parallelize(model, "dp1", labels_shifted=True)
    assert float(parallel.forward_backward([batch])) == pytest.approx(float(expected), abs=1e-6)
    assert parallel.count_tokens([batch]) == 16


@pytest.mark.ranks
def test_a_loss_of_the_callers_sees_whole_logits_and_counts_its_own_tokens(ranks) -> None:
    layouts = [
        "dp2", "tp2", "tp2:sequence_parallel=true", "pp2", "dp2:zero=2", "dp2:zero=3",
    ]  # fmt: skip
    for rank in ranks.run("tests.jobs.cases:smoothed", world_size=2, layouts=layouts):
        for layout, row in zip(layouts, rank, strict=True):
            assert row["loss"] < 1e-6, (layout, row)
            assert row["evaluated"] < 1e-6, (layout, row)
            assert row["norm"] < 1e-5, (layout, row)
            assert row["gradient"] < 1e-5, (layout, row)
            assert row["tokens"], (layout, row)


PADDED = [
    (kind, layout)
    for kind in ("opt", "gpt2", "llama", "bloom", "roberta")
    for layout in ("tp2", "tp2:sequence_parallel=true", "pp2", "cp2")
]
REJECTED = {
    ("bloom", "cp2"): "computes attention in code of its own",
    ("roberta", "tp2:sequence_parallel=true"): "counts positions from token ids",
    ("roberta", "cp2"): "counts positions from token ids",
}


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_left_padded_rows_are_numbered_as_their_model_numbers_them(ranks) -> None:
    """OPT counts positions from the attention mask, RoBERTa from token ids, others by column."""
    found = ranks.run("tests.jobs.cases:padded", world_size=2, cases=PADDED)[0]
    for case, row in zip(PADDED, found, strict=True):
        if case in REJECTED:
            assert isinstance(row, str), case
            assert REJECTED[case] in row, (case, row)
        else:
            assert not isinstance(row, str), (case, row)
            assert max(row) < 1e-5, (case, row)


@pytest.mark.ranks
def test_experts_are_placed_without_any_other_split(ranks) -> None:
    found = ranks.run("tests.jobs.cases:padded", world_size=2, cases=[("mixtral", "dp2.ep2")])[0]
    assert max(found[0]) < 1e-5, found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, ["pp2", "pp2:schedule=gpipe", "tp2", "dp2:zero=2", "dp2:zero=3", "cp2"]),
        (4, ["tp2.pp2", "dp2.pp2", "dp2.pp2:zero=1", "dp2.pp2:zero=3", "pp2.cp2", "pp4"]),
    ],
)
def test_ranks_on_which_nothing_is_trained(ranks, size, layouts) -> None:
    cases = [
        (layout, trained)
        for layout in layouts
        for trained in (("lm_head",), ("layers.3",), ("embed_tokens", "layers.0"), ("layers.1",))
    ]
    for rank in ranks.run("tests.jobs.cases:frozen", world_size=size, cases=cases):
        for case, row in zip(cases, rank, strict=True):
            assert max(row.values()) < 1e-9, (case, row)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, ["dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "tp2", "pp2"]),
        (4, ["dp2.tp2:zero=1", "dp2.pp2:zero=2", "dp2.pp2:zero=3"]),
    ],
)
def test_what_is_read_before_the_optimizers_step_does_not_hide_it(ranks, size, layouts) -> None:
    for rank in ranks.run("tests.jobs.cases:read_between", world_size=size, layouts=layouts):
        for layout, row in zip(layouts, rank, strict=True):
            assert max(row.values()) < 1e-9, (layout, row)


@pytest.mark.ranks
def test_a_gradient_that_no_optimizer_had_is_warned_of(ranks) -> None:
    layouts = ["dp2", "dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "tp2", "pp2"]
    for rank in ranks.run("tests.jobs.cases:dropped", world_size=2, layouts=layouts):
        for layout, row in zip(layouts, rank, strict=True):
            assert row["stepped"] == row["cleared"] == 0, layout
            assert row["accumulated"] == 1, layout
            # Under dp and pp the parameters that were there before are those that train.
            assert row["before"] == ("zero" in layout or "tp" in layout), layout


@pytest.mark.torch
def test_a_model_of_another_task_needs_its_own_loss() -> None:
    """Its labels are not those of next tokens: shifted, it would learn to copy them."""
    import torch
    from torch.nn import functional
    from transformers import BertConfig, BertForMaskedLM, LlamaForTokenClassification, LlamaModel

    import hocket
    from tests.jobs.cases import _llama

    config = _llama().config
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertForMaskedLM(BertConfig(vocab_size=96, hidden_size=32, **small))
    for module in (bert, LlamaForTokenClassification(config), LlamaModel(config)):
        with pytest.raises(hocket.HocketError, match="not a causal language model") as error:
            hocket.parallelize(module, "dp1")
        assert "loss_fn" in error.value.hint

    class Own(type(_llama())):  # type: ignore[misc]
        pass

    hocket.parallelize(Own(config), "dp1")  # derived from one

    def loss_fn(output, batch):
        logits = output.logits.flatten(0, 1)
        return functional.cross_entropy(logits, batch["tags"].flatten(), reduction="sum"), 12

    torch.manual_seed(0)
    tagger = LlamaForTokenClassification(config).eval()
    ids = torch.randint(0, 96, (2, 6))
    expected = tagger(input_ids=ids, labels=ids % 2).loss
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in tagger.parameters()])
    parallel = hocket.parallelize(tagger, "dp1", loss_fn=loss_fn)
    found = parallel.forward_backward([{"input_ids": ids, "tags": ids % 2}])
    assert abs(float(found - expected.detach())) < 1e-6
    assert abs(float(parallel.clip_grad_norm(0) - norm)) < 1e-5
    with pytest.raises(hocket.HocketError, match="pp2"):
        hocket.parallelize(LlamaForTokenClassification(config), "pp2", loss_fn=loss_fn)


CHANGED = {
    ("tie", "pp2"): "", ("tie", "tp2"): "", ("own head", "pp2"): "", ("own head", "tp2"): "",
    ("hook", "pp2"): "", ("activation", "pp2"): "", ("forward", "pp2"): "",
    ("projection", "tp2"): "", ("norm hook", "tp2"): "",
    ("share", "pp2"): "layers that share theirs", ("share", "tp2"): "layers that share theirs",
    ("hook", "tp2"): "q_proj has a hook", ("activation", "tp2"): "is a Softmax",
    ("forward", "tp2"): "has a forward of its own",
    ("norm hook", "tp2:sequence_parallel=true"): "input_layernorm has a hook",
    ("projection", "tp2:sequence_parallel=true"): "attends to whole sequences",
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_what_was_changed_of_a_model_is_computed_or_rejected(ranks) -> None:
    """Proxy models are of the configuration, which says nothing of it."""
    cases = [*CHANGED]
    for row in ranks.run("tests.jobs.changed_cases:changed", world_size=2, cases=cases):
        for case, found in zip(cases, row, strict=True):
            if CHANGED[case]:
                assert isinstance(found, str), (case, found)
                assert CHANGED[case] in found, (case, found)
            else:
                assert not isinstance(found, str), (case, found)
                assert found < 1e-9, (case, found)


@pytest.mark.torch
def test_a_forward_of_ones_own_is_asked_for_its_loss() -> None:
    import torch

    import hocket
    from tests.jobs.cases import _llama

    kind = type(_llama())

    class Smoothed(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + 0.1 * output.logits.square().mean()
            return output

    class Same(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    config = _llama().config
    other = kind(config)
    other.loss_function = lambda logits, labels, **_: logits.logsumexp(-1).mean()
    hooked = kind(config)
    hooked.register_forward_hook(
        lambda module, args, output: setattr(output, "loss", output.logits.mean())
    )
    for module in (Smoothed(config), other, hooked):
        with pytest.raises(hocket.HocketError, match="does not compute the loss of its forward"):
            hocket.parallelize(module, "dp1")
    same = Same(config).train()
    ids = torch.randint(0, 96, (2, 9))
    expected = float(same(input_ids=ids, labels=ids).loss.detach())
    parallel = hocket.parallelize(same, "dp1")
    assert same.training
    found = parallel.forward_backward([{"input_ids": ids, "labels": ids}])
    assert abs(float(found) - expected) < 1e-5
