import json
import os
import subprocess
import sys

import pytest

from hocket.models import registry
from hocket.models.source import resolve_model, run_source
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from tests.families import LLAMA

pytestmark = pytest.mark.train


def write(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_catalogue_name():
    source = resolve_model("llama-3-70b")
    assert (source.directory, source.weights, source.tokenizer) == (None, None, None)
    sizes = source.dimensions
    assert (sizes.num_layers, sizes.num_heads, sizes.num_key_value_heads) == (80, 64, 8)
    assert (sizes.hidden_size, sizes.vocab_size, sizes.max_positions) == (8192, 128256, 8192)


def test_no_torch_and_no_transformers_are_imported():
    code = (
        "import sys; from hocket.models.source import resolve_model\n"
        "assert resolve_model('gpt2').dimensions.num_heads == 12\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_dimensions_left_out_are_the_class_defaults(tmp_path):
    sizes = resolve_model(write(tmp_path, model_type="gpt2", n_head=6)).dimensions
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_heads) == (768, 12, 6)
    assert (sizes.intermediate_size, sizes.vocab_size, sizes.tied) == (3072, 50257, True)
    sizes = resolve_model(write(tmp_path, model_type="mixtral")).dimensions
    assert (sizes.num_key_value_heads, sizes.num_experts) == (8, 8)


def test_the_class_defaults_are_read_without_listing_all_families(monkeypatch):
    """There are hundreds of them, and every command reads the defaults of its model's type."""

    def listed(*_):
        raise AssertionError("a folder was listed")

    monkeypatch.setattr(os, "scandir", listed)
    assert registry.defaults.__wrapped__("gpt2").values["n_layer"] == 12
    assert registry.defaults.__wrapped__("gemma3_text").values["num_hidden_layers"] == 26
    with pytest.raises(AssertionError, match="listed"):
        registry.defaults.__wrapped__("blip_text_model")


def test_directory_with_and_without_weights(tmp_path):
    folder = write(tmp_path / "m", **LLAMA)
    source = resolve_model(folder)
    assert (source.directory, source.weights, source.tokenizer) == (folder, None, None)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    source = resolve_model(folder)
    assert (source.weights, source.tokenizer) == (folder, folder)
    assert resolve_model(folder, weights=False).weights is None
    assert resolve_model(folder / "config.json").directory is None


def test_run_folder_stands_for_its_exported_model(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    write(run / "model", **LLAMA)
    assert resolve_model(run).directory == run / "model"


def test_hints_make_a_model_of_what_a_run_holds(tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(ModelError, match="neither a model nor a checkpoint") as caught:
        resolve_model(run)
    assert "--save-every" in str(caught.value.hint)
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    with pytest.raises(ModelError, match="holds no exported model") as caught:
        resolve_model(run)
    assert str(caught.value.hint) == f"hocket export '{run}' --to '{run}/model'"
    (run / "model").mkdir()  # which an export would not replace
    with pytest.raises(ModelError, match="holds no exported model") as caught:
        resolve_model(run)
    assert str(caught.value.hint) == f"hocket export '{run}' --to '{run}-model'"
    (run / "model").rmdir()
    (run / "run.json").write_text('{"options": {"lora_rank": 4}}')
    with pytest.raises(ModelError, match="holds no exported model") as caught:
        resolve_model(run)
    assert str(caught.value.hint).endswith("model' --merge")
    (run / "run.json").write_text('{"command": "serve", "model": "tiny-llama"}')
    with pytest.raises(ModelError, match="the folder of a server") as caught:
        resolve_model(run)
    assert str(caught.value.hint) == "the model that it served: tiny-llama"


def test_an_adapter_is_not_the_model_that_it_was_trained_on(tmp_path):
    folder = tmp_path / "run" / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter") as caught:
        resolve_model(folder)
    assert "merge_and_unload" in str(caught.value.hint)
    base = write(tmp_path / "base", **LLAMA)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base)})
    )
    (tmp_path / "run" / "run.json").write_text("{}")
    for name in (folder, tmp_path / "run"):  # the run that trained it, too
        assert resolve_model(name, weights=False).dimensions == resolve_model(base).dimensions
        with pytest.raises(ModelError, match="which has no weights"):
            resolve_model(name)


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True}, {"alora_invocation_tokens": [5]}, {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"}, {"kasa_config": {"beta": 1}}, {"rank_pattern": {"q": 4}},
        {"a_later_method": True},
    ],
)  # fmt: skip
def test_an_adapter_that_is_more_than_a_sum_is_rejected(tmp_path, setting):
    """PiSSA and OLoRA change the base, aLoRA is of some tokens: W + s B A is another model."""
    base = write(tmp_path / "base", **LLAMA)
    plain = {
        "peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base), "use_dora": False,
        "init_lora_weights": True, "target_modules": ["q_proj"], "lora_dropout": 0.1,
        "qalora_group_size": 16, "loftq_config": {}, "use_rslora": True,
    }  # fmt: skip
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(plain))
    assert resolve_model(tmp_path, weights=False).dimensions == resolve_model(base).dimensions
    file.write_text(json.dumps(plain | setting))
    with pytest.raises(ModelError, match=f"an adapter with {next(iter(setting))}"):
        resolve_model(tmp_path, weights=False)


@pytest.mark.torch
def test_a_damaged_adapter_is_one_line(tmp_path, monkeypatch, capfd):
    from hocket.spec.tensor_file import TensorEntry, write_tensors

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = write(tmp_path / "base", **LLAMA)
    entries = [TensorEntry(name="lm_head.weight", dtype="F32", shape=(1,))]
    write_tensors(base / "model.safetensors", entries, [b"\0" * 4])
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match="cannot be merged with its base: SafetensorError"):
        resolve_model(tmp_path)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.torch
def test_an_adapter_with_values_that_are_not_finite_is_named(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = write(tmp_path / "base", **LLAMA)
    save_file({"lm_head.weight": torch.ones(4, 4)}, base / "model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    stem = "base_model.model.lm_head.lora_"
    pair = {f"{stem}A.weight": torch.ones(2, 4), f"{stem}B.weight": torch.zeros(4, 2)}
    pair[f"{stem}A.weight"][0, 1] = float("nan")
    save_file(pair, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ModelError, match=r"lm_head\.lora_A\.weight in .* has 1 values that are not"
    ):
        resolve_model(tmp_path)


def test_run_spec_gives_the_source_back(tmp_path):
    folder = write(tmp_path / "m", **LLAMA)
    (folder / "model.safetensors").write_bytes(b"")
    spec = RunSpec(model=str(folder), config=LLAMA, layout=Layout(), weights=str(folder))
    source = run_source(spec)
    assert (source.config, source.weights, source.directory) == (LLAMA, folder, folder)


@pytest.mark.torch
def test_types_that_transformers_renames_are_known_by_the_name_it_gives_them(tmp_path):
    from transformers import CONFIG_MAPPING

    for kind in registry.causal_classes():
        theirs = CONFIG_MAPPING[kind].model_type
        assert registry.renamed_types().get(kind, theirs) == theirs, kind
        assert kind in {*registry.config_classes(), *registry.renamed_types()}, kind
    source = resolve_model(write(tmp_path / "m", model_type="gpt-sw3"))
    assert source.config["model_type"] == "gpt2"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llamma"}, "unknown model type 'llamma'"),
        ({}, "has no model_type"),
        ({"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
        ({"model_type": "gemma3"}, "its text_config, which describes .* is missing"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "vit"}},
            "has none of the language",
        ),
        ({"model_type": "vit"}, "not a text-only causal language model"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "was saved as"),
        ({**LLAMA, "quantization_config": {"quant_method": "aqlm"}}, "quantized .aqlm."),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 3}}, "gptq with 3 bits"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "awq in the layout 'gemv'",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}},
            "weight_block_size",
        ),
        (
            {
                **LLAMA,
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "nvfp4-pack-quantized",
                },
            },
            "compressed-tensors in the format 'nvfp4",
        ),
        ({**LLAMA, "quantization_config": [1]}, "by no named method"),
    ],
)
def test_what_is_refused(tmp_path, config, words):
    with pytest.raises(ModelError, match=words):
        resolve_model(write(tmp_path, **config))


def test_hints_that_can_be_pasted(tmp_path):
    with pytest.raises(ModelError, match="text-only"):
        resolve_model(write(tmp_path, model_type="gemma3"))
    with pytest.raises(ModelError) as caught:
        resolve_model("meta-llama/Llama-3.1-8B")
    assert "hf download meta-llama/Llama-3.1-8B" in str(caught.value.hint)
    for path in ("/nope", "./nope", "~/nope"):  # no name of a hub
        with pytest.raises(ModelError) as caught:
            resolve_model(path)
        assert "hf download" not in str(caught.value.hint)
    with pytest.raises(ModelError) as caught:
        resolve_model("tiny-lama")
    assert "tiny-llama" in str(caught.value.hint)
    with pytest.raises(ModelError, match="unknown model 'qwen3-4b': there is no") as caught:
        resolve_model("qwen3-4b")  # neither is qwen3-8b
    assert "the catalogue has 'qwen3-8b', another model" in str(caught.value.hint)


def test_numbers_that_json_does_not_have_are_read_as_transformers_writes_them(tmp_path):
    from transformers import BambaConfig

    BambaConfig(time_step_limit=(0.5, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert resolve_model(tmp_path).config["time_step_limit"] == [0.5, float("inf")]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds a list"):
        resolve_model(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    write(tmp_path, **LLAMA)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match="a pickle"):
        resolve_model(tmp_path)


def test_a_configuration_never_chooses_code(tmp_path):
    write(
        tmp_path,
        **LLAMA,
        _attn_implementation="someone/their-kernel",
        rope_parameters={"rope_type": "default", "rope_theta": 1.0, "use_kernels": True},
    )
    config = resolve_model(tmp_path).config
    assert "their-kernel" not in json.dumps(config)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1.0}


def test_trusted_code_keeps_its_directory(tmp_path):
    write(tmp_path, **LLAMA, auto_map={"AutoConfig": "x.Y"})
    assert resolve_model(tmp_path, trust_remote_code=True).code == tmp_path
    write(tmp_path, **LLAMA)
    assert resolve_model(tmp_path, trust_remote_code=True).code is None


def test_a_size_that_cannot_be():
    from hocket.models.dimensions import dimensions

    with pytest.raises(ModelError, match="num_attention_heads is 0"):
        dimensions({**LLAMA, "num_attention_heads": 0})


def test_an_encoder_is_no_causal_model_unless_it_says_so(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="is an encoder") as caught:
        resolve_model(tmp_path)
    assert '"is_decoder": true' in (caught.value.hint or "")
    file.write_text('{"model_type": "bert", "is_decoder": true}')
    assert resolve_model(tmp_path).config["is_decoder"]
