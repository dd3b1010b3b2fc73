import json

import pytest

from hocket.spec.errors import WeightsError
from tests.families import EXPERTS, FAMILIES, LLAMA
from tests.models.variants import VARIANTS

pytestmark = pytest.mark.torch


class Case:
    """A family's skeleton and plan, and its stages at any place of any layout, without ranks."""

    def __init__(self, config):
        from hocket.models import skeleton
        from hocket.models.plans import plan_for

        self.config = config
        self.skeleton = skeleton.build_skeleton(config)
        self.plan = plan_for(self.skeleton)

    def stage(self, source=None, *, degree=1, index=0, bounds=(4,), stage=0, seed=3,
              experts=None, **more):  # fmt: skip
        from hocket.models import skeleton
        from hocket.models.weights import materialize
        from hocket.runtime.expert_parallel import apply_expert_parallel
        from hocket.runtime.mesh import Axis
        from hocket.runtime.pipeline.cut import cut
        from hocket.runtime.record import Recorder
        from hocket.runtime.tensor_parallel.apply import apply_tensor_parallel

        module = cut(skeleton.build_skeleton(self.config), self.plan.stages, bounds, stage)
        axis = Axis("tp", degree, index, tuple(range(degree)), None)
        placements = apply_tensor_parallel(module, self.plan.tensor, axis, Recorder())
        if experts is not None:
            apply_expert_parallel(
                module, self.plan.experts, placements,
                experts=experts, tokens=Axis("tp"), recorder=Recorder(),
            )  # fmt: skip
        self.bytes_read = materialize(module, placements, self.skeleton, source, seed=seed, **more)
        return module, placements

    def everywhere(self, source=None):
        for degree in (1, 2, 4):
            for index in range(degree):
                for stage in range(2):
                    yield self.stage(source, degree=degree, index=index, bounds=(1, 3), stage=stage)


def shake(module):
    """Norms not at one and biases not at zero."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize("family", VARIANTS)
def test_every_layout_holds_the_same_values(family, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from hocket.models.source import resolve_model

    case = Case(VARIANTS[family])
    whole, _ = case.stage()
    buffers = dict(whole.named_buffers())

    def agree(source):
        full = dict(whole.named_parameters(remove_duplicate=False))
        seen = set()
        for module, placements in case.everywhere(source):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                seen.add(name)
                for there, here in placements[name].pairs():
                    assert torch.equal(parameter[here], full[name][there]), name
            for name, buffer in module.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
        assert seen == set(full)

    agree(None)
    shake(whole)
    whole.save_pretrained(tmp_path)
    source = resolve_model(tmp_path)
    agree(source)

    ids = torch.randint(3, 60, (2, 12))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=whole.config._attn_implementation, dtype=torch.float32
    )
    loaded, _ = Case(source.config).stage(source)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids).logits
        assert torch.equal(loaded.eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "value", "rejected"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), True),
        ("model.layers.1.mlp.down_proj.weight", float("-inf"), True),
        ("model.norm.weight", float("nan"), True),
        ("model.norm.weight", float("-inf"), False),
        ("model.norm.weight", 1e38, False),
    ],
)
def test_values_that_are_not_finite_are_named(tmp_path, name, value, rejected):
    """A vector may have infinite entries, as sinks that are left out; large ones overflow a sum."""
    from hocket.models.source import resolve_model

    case = Case(LLAMA)
    whole, _ = case.stage()
    whole.get_parameter(name).data.view(-1)[:8] = value
    whole.save_pretrained(tmp_path)
    source = resolve_model(tmp_path)
    if rejected:
        with pytest.raises(WeightsError, match=f"{name} in .* has 8 values that are not finite"):
            case.stage(source)
    else:
        assert (case.stage(source)[0].get_parameter(name)[:8] == value).all()


def test_random_weights_are_those_of_the_family():
    import torch

    gpt2, _ = Case({**FAMILIES["gpt2"], "n_embd": 64}).stage()
    layer = gpt2.transformer.h[1]
    assert float(layer.attn.c_attn.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    # Projections onto the residual stream are scaled by the depth (Radford et al. 2019).
    assert float(layer.mlp.c_proj.weight.detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.1)
    assert torch.equal(layer.ln_1.weight, torch.ones(64))
    assert not layer.mlp.c_fc.bias.any()
    same, _ = Case({**FAMILIES["gpt2"], "n_embd": 64}).stage()
    other, _ = Case({**FAMILIES["gpt2"], "n_embd": 64}).stage(seed=4)
    assert torch.equal(same.lm_head.weight, gpt2.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, gpt2.lm_head.weight)
    assert not torch.equal(layer.attn.c_attn.weight, gpt2.transformer.h[2].attn.c_attn.weight)


def test_the_global_random_state_is_left_alone():
    import torch

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    Case(LLAMA).stage()
    assert torch.equal(torch.rand(3), expected)


def test_dtype_device_and_buffers():
    import torch

    module, _ = Case(FAMILIES["gemma3"]).stage(dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.model.rotary_emb.full_attention_inv_freq.dtype == torch.float32
    assert float(module.model.embed_tokens.embed_scale) == pytest.approx(32**0.5)


def save(tmp_path, tensors, config=LLAMA, *, shards=1):
    from safetensors.torch import save_file

    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        where = {}
        for k in range(shards):
            file = f"model-{k}.safetensors"
            part = {name: tensors[name] for name in names[k::shards]}
            save_file(part, tmp_path / file)
            where |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": where}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    from hocket.models.source import resolve_model

    return resolve_model(tmp_path)


def tensors_of(config):
    whole, _ = Case(config).stage()
    shake(whole)
    return {n: p.detach().clone() for n, p in whole.named_parameters()}


def test_shards_half_precision_and_foreign_prefixes(tmp_path):
    import torch

    tensors = tensors_of(LLAMA)
    halved = {n: t.to(torch.bfloat16 if "mlp" in n else torch.float16) for n, t in tensors.items()}
    source = save(tmp_path, halved, shards=3)
    module, placements = Case(LLAMA).stage(source, degree=2, index=1, bounds=(2, 2), stage=1)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        for there, here in placements[name].pairs():
            assert torch.equal(parameter[here], halved[name][there].float())


def test_a_prefix_may_be_missing(tmp_path):
    import torch

    # OpenAI's GPT-2 was saved without `transformer.`, and with its mask tables.
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_of(FAMILIES["gpt2"]).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    source = save(tmp_path, tensors, FAMILIES["gpt2"])
    module, _ = Case(FAMILIES["gpt2"]).stage(source, bounds=(2, 2), stage=0)
    assert torch.equal(module.transformer.wte.weight, tensors["wte.weight"])
    # The head is tied and lies on the last stage, where there is no embedding.
    last, _ = Case(FAMILIES["gpt2"]).stage(source, bounds=(2, 2), stage=1)
    assert torch.equal(last.lm_head.weight, tensors["wte.weight"])


def test_layers_of_multi_token_prediction_are_named_and_left_out(tmp_path):
    """DeepSeek-V3's are behind the model's own; others there are an error, as any other name."""
    import torch

    from hocket.models.weight_headers import untrained_layers

    config = {**EXPERTS["deepseek_v3"], "num_nextn_predict_layers": 1}
    tensors = tensors_of(config)
    assert untrained_layers(save(tmp_path / "plain", tensors, config).weights, 4) == ""
    more = {**tensors, "model.layers.4.eh_proj.weight": torch.ones(32, 64)}
    source = save(tmp_path / "more", more, config)
    note = untrained_layers(source.weights, 4)
    assert note.startswith("the weights of model.layers.4 (multi-token prediction) are neither")
    module, _ = Case(config).stage(source, bounds=(4,), stage=0)
    assert "model.layers.4.eh_proj.weight" not in dict(module.named_parameters())
    other = save(tmp_path / "other", more, config | {"num_nextn_predict_layers": 0})
    with pytest.raises(WeightsError, match=r"unexpected model.layers.4.eh_proj"):
        Case(config | {"num_nextn_predict_layers": 0}).stage(other, bounds=(4,), stage=0)


def test_a_tied_weight_may_stand_under_either_name(tmp_path):
    import torch

    config = FAMILIES["llama_tied"]
    tensors = tensors_of(config)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    source = save(tmp_path, tensors, config)
    first, _ = Case(config).stage(source, bounds=(2, 2), stage=0)
    assert torch.equal(first.model.embed_tokens.weight, tensors["lm_head.weight"])


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path):
    import torch

    tensors = tensors_of(LLAMA)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(31)
    tensors["score.weight"] = torch.ones(2, 2)
    source = save(tmp_path, tensors)
    with pytest.raises(WeightsError) as caught:
        Case(LLAMA).stage(source)
    text = caught.value.message
    assert "missing model.layers.2.mlp.up_proj.weight [48, 32]" in text
    assert "model.norm.weight is [31] in the file, [32] in the model" in text
    assert "unexpected score.weight" in text
    source = save(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(WeightsError, match="and 20 more") as caught:
        Case(LLAMA).stage(source)
    assert len(caught.value.message.splitlines()) == 22


def test_damaged_files_are_refused(tmp_path):
    source = save(tmp_path, tensors_of(LLAMA))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        Case(LLAMA).stage(source)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(WeightsError, match="not a file in its folder"):
        Case(LLAMA).stage(source)


@pytest.mark.torch
def test_a_constant_that_only_the_constructor_computes():
    from hocket.models.initial import buffer_values
    from hocket.models.skeleton import build_skeleton

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    skeleton = build_skeleton({"model_type": "apertus", "intermediate_size": 48, **sizes})
    values = buffer_values(skeleton, "model.layers.0.mlp.act_fn")
    assert {name: bool(value.isfinite().all()) for name, value in values.items()} == dict.fromkeys(
        values, True
    )
    assert all(parameter.is_meta for parameter in skeleton.parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_an_expert_rank_reads_its_experts_alone(family, tmp_path):
    """Mixtral's and Qwen3's files hold experts one by one, gpt-oss's are stacked as in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from hocket.models.source import resolve_model
    from hocket.runtime.mesh import Axis
    from tests.families import EXPERTS

    case = Case({**FAMILIES, **EXPERTS}[family])
    saved = AutoModelForCausalLM.from_config(case.skeleton.config)
    shake(saved)
    saved.save_pretrained(tmp_path / "saved")
    source = resolve_model(str(tmp_path / "saved"))
    whole, _ = case.stage(source)
    read = case.bytes_read
    full = dict(whole.named_parameters())
    experts = {name for name in full if ".experts." in name}
    stacked = sum(full[name].nbytes for name in experts)
    for degree, sliced in ((2, 1), (4, 1), (2, 2)):
        if sliced > 1 and not case.plan.experts.sliced:
            continue
        seen = {name: torch.zeros_like(full[name]) for name in experts}
        for index in range(degree):
            for slice_ in range(sliced):
                axis = Axis("expert", degree, index, tuple(range(degree)), None)
                module, placements = case.stage(source, experts=axis, degree=sliced, index=slice_)
                for name, parameter in module.named_parameters():
                    for there, here in placements[name].pairs():
                        assert torch.equal(parameter.detach()[here], full[name].detach()[there])
                        if name in experts:
                            seen[name][there] += 1
                own = sum(p.nbytes for n, p in module.named_parameters() if n in experts)
                assert own == stacked // (degree * sliced)
                if sliced == 1:
                    assert case.bytes_read == read - stacked + own
        assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_is_tied_where_transformers_ties_it(tmp_path, kind: str, equal: bool) -> None:
    """Whatever the configuration says, it does not tie a stored head of other values."""
    import torch
    from transformers import AutoModelForCausalLM

    from hocket.models.skeleton import build_skeleton
    from hocket.models.source import resolve_model

    model = build_skeleton({**FAMILIES[kind], "tie_word_embeddings": False}, device="cpu")
    model.initialize_weights()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    with torch.no_grad():
        head.weight.copy_(embedding.weight * (1.0 if equal else 1.5))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert tied == equal
    assert resolve_model(tmp_path).config["tie_word_embeddings"] == tied
    assert resolve_model(tmp_path, weights=False).config["tie_word_embeddings"]
