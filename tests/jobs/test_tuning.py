"""Fine-tuning from end to end: chats, full and with LoRA, checkpoints, files that peft loads."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from hocket.spec.errors import HocketError, ModelError, OptionError
from tests.families import LLAMA

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES: dict[str, Any] = {
    "seq_len": 64, "global_batch": 4, "cluster": "none", "eval_fraction": 0.0, "seed": 5,
    "max_grad_norm": 0.0,
    "warmup": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `save_pretrained` leaves it, with a tokenizer and its chat template."""
    import torch
    import transformers

    from hocket.training.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("base")
    config = transformers.AutoConfig.for_model(**{**LLAMA, "vocab_size": 260})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = [
        {"messages": [{"role": "user", "content": f"say {n % 7}"},
                      {"role": "assistant", "content": str(n % 7) * (n % 5 + 1)}]}
        for n in range(60)
    ]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


def run(base: Path, to: Path, **options: Any) -> Any:
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model

    values = {"model": base, "run": to, **SIZES, **options}
    values.setdefault("data", Path(base) / "chats.jsonl")
    return train_model(request(values), on_event=NOTES.append)


NOTES: list[dict[str, Any]] = []


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


@pytest.mark.usefixtures("warm")
def test_full_fine_tuning_on_chats_is_the_same_in_every_layout(base: Path, tmp_path: Path) -> None:
    import transformers

    layouts = {"one": "dp1", "four": "dp2.tp2:zero=2,microbatches=2", "cut": "pp2:microbatches=2"}
    for name, layout in layouts.items():
        run(base, tmp_path / name, steps=3, layout=layout)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    model = tmp_path / "four" / "model"
    assert transformers.AutoTokenizer.from_pretrained(model).chat_template == TEMPLATE
    said = json.loads((tmp_path / "one" / "data" / "tokens.json").read_text())
    assert (said["packing"], said["held"]) == ("documents", ["chat"])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("layout", ["dp2.tp2:zero=1", "dp2:zero=3"])
def test_an_adapter_is_what_pefts_own_training_makes(
    base: Path, tmp_path: Path, layout: str
) -> None:
    import torch
    import torch.nn.functional as F
    import transformers
    from peft import PeftModel

    from hocket.jobs.export import export_run
    from hocket.training.dataset import IGNORED, BatchOrder, open_dataset
    from hocket.training.token_manifest import Tokens

    lora = {"lora_rank": 4, "lora_targets": "q_proj-down_proj", "lr": 1e-2, "min_lr": 1e-2,
            "weight_decay": 0.1}  # fmt: skip
    NOTES.clear()
    run(
        base, tmp_path / "run", steps=4, layout=layout, save_every=2,
        memory_per_rank="1GB", **lora,
    )  # fmt: skip
    said = " ".join(event["text"] for event in NOTES if event["event"] == "note")
    assert "LoRA of rank 4 on 8 frozen layers" in said
    (error,) = re.findall(r"predicted, .* counted \(([+-][\d.]+)%\)", said)
    assert abs(float(error)) < 5
    rows = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert all(row["gradients"] + row["optimizer"] < row["parameters"] / 2 for row in rows)
    # Begun anew from the adapter's first checkpoint, with the base from its own files.
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "again" / "adapter")
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model

    values = {"model": base, "run": tmp_path / "again", "resume": True, "cluster": "none"}
    shutil.copytree(tmp_path / "again", tmp_path / "elsewhere")
    train_model(request(values))
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    # And in another layout, whose ranks hold other parts of the products.
    train_model(request({**values, "run": tmp_path / "elsewhere", "layout": "pp2"}))
    assert losses(tmp_path / "elsewhere") == pytest.approx(losses(tmp_path / "run"), abs=1e-5)

    # peft's own: one process, the same rows.
    initial = tmp_path / "initial"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert sum(f.stat().st_size for f in checkpoint.iterdir()) < 200_000  # no base in it
    run(base, initial, steps=1, layout="dp1", **{**lora, "lr": 0.0, "min_lr": 0.0})
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(plain, initial / "adapter", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    folder = tmp_path / "run" / "data"
    dataset = open_dataset(folder, "tokens.bin", Tokens.load(folder), 64, SIZES["seed"])
    for step in range(4):
        batch = dataset.batch(BatchOrder(4).step_indices(step))
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
        positions = torch.from_numpy(batch.positions)  # which a cache would make it pass over
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(losses(tmp_path / "run")[step], abs=2e-5)

    ours = export_run(tmp_path / "run", tmp_path / "adapter")
    other = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(other, ours).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        merged = export_run(tmp_path / "run", tmp_path / "merged", merge=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        logits = adapted(ids).logits
        assert float((logits - model.eval()(ids).logits).abs().max()) < 2e-3
        assert float((logits - whole(ids).logits).abs().max()) < 1e-4
        with adapted.disable_adapter():
            assert float((logits - adapted(ids).logits).abs().max()) > 1e-2
    assert transformers.AutoTokenizer.from_pretrained(merged).chat_template == TEMPLATE
    # A run folder with an adapter is its base with the adapter merged.
    for name, model in (("next", tmp_path / "run"), ("same", merged)):
        run(model, tmp_path / name, steps=1, layout="dp1", data=base / "chats.jsonl")
    assert losses(tmp_path / "next") == pytest.approx(losses(tmp_path / "same"), abs=1e-6)


@pytest.mark.usefixtures("warm")
def test_an_adapter_goes_with_the_weights_that_it_was_trained_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    from hocket.jobs.export import export_run
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model
    from hocket.models.source import resolve_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = shutil.copytree(base, tmp_path / "base")
    run(mine, tmp_path / "run", steps=2, layout="dp1", save_every=1, lora_rank=2)
    first = resolve_model(tmp_path / "run").weights
    weights = load_file(mine / "model.safetensors")
    changed = {name: value + 0.01 for name, value in weights.items()}
    save_file(changed, mine / "model.safetensors", metadata={"format": "pt"})
    resumed = {
        "model": mine,
        "run": tmp_path / "run",
        "resume": True,
        "cluster": "none",
        "steps": 3,
    }
    for use in (
        lambda: train_model(request(resumed)),
        lambda: export_run(tmp_path / "run", tmp_path / "merged", merge=True),
        lambda: resolve_model(tmp_path / "run"),  # to generate, serve, train, check
    ):
        with pytest.raises(HocketError, match="was trained on other weights") as caught:
            use()
        assert caught.value.message.count("crc32") == 2
        assert str(mine) in (caught.value.hint or "")
    assert len(losses(tmp_path / "run")) == 2
    # The adapter as peft loads it does not depend on the base; nor does a run of all weights.
    export_run(tmp_path / "run", tmp_path / "adapter")
    # Of another adapter, that names no weights, the base is as it is now: nothing is reused.
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})
    assert resolve_model(tmp_path / "adapter").weights != first
    save_file(weights, mine / "model.safetensors", metadata={"format": "pt"})
    train_model(request(resumed))
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.usefixtures("warm")
def test_a_run_of_all_weights_resumes_without_those_that_it_began_with(
    base: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from hocket.training.dataset import open_dataset
    from hocket.training.token_manifest import Tokens

    mine = shutil.copytree(base, tmp_path / "base")
    run(mine, tmp_path / "one", steps=2, layout="dp1", save_every=1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    values = load_file(mine / "model.safetensors")
    run(mine, tmp_path / "one", resume=True, steps=3)
    save_file({name: value + 1 for name, value in values.items()}, mine / "model.safetensors")
    run(mine, tmp_path / "two", resume=True, steps=3)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    # Tokens are counted on from the checkpoint, without padding.
    data = tmp_path / "one" / "data"
    dataset = open_dataset(data, "tokens.bin", Tokens.load(data), 64, SIZES["seed"])
    for name in ("one", "two"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        seen = [row["num_input_tokens_seen"] for row in rows]
        assert seen == [dataset.tokens_seen(4 * step) for step in (1, 2, 3)]
        assert seen[-1] < 3 * 4 * 64


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("options", "kind", "says", "hint"),
    [
        ({"lora_rank": 0}, OptionError, "lora_rank is 0", "--lora-rank 1"),
        ({"lora_alpha": 8.0}, OptionError, "no lora_rank is given", "--lora-rank 8"),
        ({"lora_rank": 2, "lora_targets": "q_prj"}, OptionError, "no module 'q_prj'", "q_proj"),
        ({"lora_rank": 2, "lora_targets": "norm"}, OptionError, "LlamaRMSNorm", "all-linear"),
        ({"lora_rank": 2, "model": "tiny-llama"}, ModelError, "has none", "leave --lora-rank out"),
        ({"packing": "document"}, OptionError, "unknown packing", "documents"),
        ({"data_format": "completion"}, HocketError, "no field 'prompt'", "text"),
        ({"model": "tiny-llama"}, OptionError, "no chat template", "--chat-template-file"),
        ({"chat_template_file": "none.jinja"}, OptionError, "there is no such file", "chatml"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_run(
    options: dict[str, Any], kind: type, says: str, hint: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=says) as caught:
        run(options.get("model", base), tmp_path / "run", steps=1, **{
            k: v for k, v in {"data": base / "chats.jsonl", **options}.items() if k != "model"
        })  # fmt: skip
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "run" / "run.json").exists()
