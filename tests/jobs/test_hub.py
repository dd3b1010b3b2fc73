"""Jobs on models and data of the Hub, end to end, against a small Hub on loopback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.jobs.export import card
from hocket.spec.run import RunFolder
from tests.families import LLAMA
from tests.hub_server import TOKEN, Repo, folder, offline

pytestmark = [pytest.mark.timeout(120)]

TEXT = "".join(f"sentence {i} of many that are alike. " for i in range(300))


def repos(tmp_path: Path) -> tuple[Repo, Repo]:
    """A tiny model with weights and tokenizer, and a data set."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    from hocket.training.tokenizer import resolve_tokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**LLAMA, "vocab_size": 257})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "made")
    resolve_tokenizer("bytes", model_dir=None).save(tmp_path / "made")
    rows = "".join(json.dumps({"text": TEXT[i : i + 200]}) + "\n" for i in range(0, 9000, 200))
    return (
        Repo("org/tiny", folder(tmp_path / "made")),
        Repo("org/set", {"data/train.jsonl": rows.encode()}, kind="dataset"),
    )


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
def test_train_resume_push_and_use_by_name(loopback, tmp_path, monkeypatch, capsys) -> None:
    model, data = repos(tmp_path)
    monkeypatch.chdir(tmp_path)
    few = ["--seq-len", "16", "--global-batch", "4", "--cluster", "none", "--layout", "dp2"]
    with loopback(model, data) as server:
        command = ["train", "org/tiny", "--data", "org/set[:40]", "--steps", "2", *few]
        assert main([*command, "--save-every", "1"]) == 0
        run = RunFolder(tmp_path / "runs" / "tiny-1")
        spec = run.load()
        assert spec.model == f"org/tiny@{model.commit}"
        assert spec.data == (f"org/set:train[:40]@{data.commit}",)
        assert "tokenizer of 257 ids" in capsys.readouterr().out

        # Resumed where there is no network: the cache has the commit of the run.
        offline(monkeypatch, True)
        assert main(["train", "--run", str(run.path), "--resume", "--steps", "3"]) == 0
        offline(monkeypatch, False)
        assert run.load().model == f"org/tiny@{model.commit}"

        # The same command goes on with it; one that names another revision does not.
        goes_on = [*command, "--run", str(run.path)]
        goes_on[goes_on.index("--steps") + 1] = "4"
        for name in ("org/tiny@main", f"org/tiny@{model.commit[:9]}"):
            assert main([goes_on[0], name, *goes_on[2:]]) == 0
        capsys.readouterr()
        assert main([goes_on[0], f"org/tiny@{'0' * 40}", *goes_on[2:]]) == 2
        assert "already holds a run of the model" in capsys.readouterr().err
        goes_on[goes_on.index("--data") + 1] = f"org/set[:40]@{'0' * 40}"
        assert main(goes_on) == 2
        assert "already holds a run of the data" in capsys.readouterr().err

        assert main([*command, "--run", "early", "--push-to-hub", "me/early"]) == 2
        assert not (tmp_path / "early").exists()  # rejected before the first step
        assert main(["export", str(run.path), "--push-to-hub", "me/tiny"]) == 2
        assert "hf auth login" in capsys.readouterr().err
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert main(["export", str(run.path), "--push-to-hub", "me/tiny", "--private"]) == 0
        assert f"{server.address}/me/tiny" in capsys.readouterr().out
        pushed = server.repos["model", "me/tiny"]
        assert pushed.private
        assert pushed.files["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
        text = pushed.files["README.md"].decode()
        for part in ('base_model: "org/tiny"', 'datasets: ["org/set"]', "| Steps | 4 |", "dp2"):
            assert part in text
        assert str(tmp_path) not in text

        assert main([*command, "--run", "pushed", "--push-to-hub", "me/trained"]) == 0
        assert f"{server.address}/me/trained" in capsys.readouterr().out
        trained = server.repos["model", "me/trained"].files["model.safetensors"]
        assert trained == (tmp_path / "pushed/model/model.safetensors").read_bytes()

        pushed.files["README.md"] = b"a card of my own"
        assert main(["export", str(run.path), "--push-to-hub", "me/tiny"]) == 0
        assert pushed.files["README.md"] == b"a card of my own"
        assert main(["generate", "me/tiny", "--prompt", "sent", "--max-new-tokens", "2"]) == 0
        capsys.readouterr()
    assert main(["export", str(run.path), "--push-to-hub", "me/tiny"]) == 2
    said = capsys.readouterr().err
    assert "me/tiny" in said
    assert "there is no folder" not in said  # which is said of models that are read


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
def test_lora_finds_its_base_again(loopback, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("peft")
    model, data = repos(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = ["--seq-len", "16", "--global-batch", "4", "--cluster", "none", "--lora-rank", "2"]
    with loopback(model, data):
        command = ["train", "org/tiny", "--data", "org/set", "--run", "run", *few]
        assert main([*command, "--steps", "1", "--save-every", "1"]) == 0
        settings = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == "org/tiny"
        assert settings["revision"] == model.commit
        shutil.rmtree(tmp_path / "hf")  # as on another machine
        assert main(["train", "--run", "run", "--resume", "--steps", "2"]) == 0
        shutil.rmtree(tmp_path / "hf")
        # The run's folder is its adapter on its base.
        assert main(["generate", "run", "--prompt", "sent", "--max-new-tokens", "2"]) == 0
        assert main(["export", "run", "--to", "merged", "--merge"]) == 0
        one = next((tmp_path / "cache" / "hocket" / "merged").iterdir()) / "model.safetensors"
        assert same(one, tmp_path / "merged" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, up to rounding."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    return all(torch.allclose(ours[k], theirs[k], rtol=0, atol=1e-6) for k in ours)


@pytest.mark.train
def test_the_data_is_looked_at_before_a_model_is_downloaded(loopback, monkeypatch, capsys) -> None:
    config = json.dumps(LLAMA).encode()
    one = Repo("org/tiny", {"config.json": config, "model.safetensors": b"1"})
    with loopback(one) as server:
        assert main(["train", "org/tiny", "--seq-len", "16", "--data", "org/nothing"]) == 2
        assert "has no data set org/nothing" in capsys.readouterr().err
        assert main(["train", "org/tiny", "--seq-len", "16", "--data", "x", "--layout", "tp7"]) == 2
        assert main(["serve", "org/tiny", "--layout", "tp7"]) == 2
        assert not server.fetched("model.safetensors")


@pytest.mark.train
def test_a_download_is_shown_on_stderr(loopback, capsys, tmp_path) -> None:
    config = json.dumps(LLAMA).encode()
    one = Repo("org/tiny", {"config.json": config, "model.safetensors": bytes(2_000_000)})
    with loopback(one):
        assert main(["generate", "org/tiny", "--prompt", "x"]) == 2  # zeros are no safetensors
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines()[0].startswith("org/tiny: 2 MB in ")


def test_a_card_names_files_of_this_machine_without_their_folders(tmp_path) -> None:
    from hocket.spec.layout import Layout
    from hocket.spec.run import RunSpec

    (tmp_path / "secret.txt").write_text("x")
    spec = RunSpec(
        model="tiny-llama", config={"model_type": "llama"}, layout=Layout(tp=2),
        data=(str(tmp_path / "secret.txt"),),
    )  # fmt: skip
    text = card(RunFolder(tmp_path), spec, "me/name", adapter=False)
    assert str(tmp_path) not in text
    assert "`secret.txt` (a local file)" in text
    assert "trained from random weights" in text
    assert "base_model" not in text
