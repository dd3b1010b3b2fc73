"""Models of the Hub by name, against a small Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hocket.models import fetched, hub, repo_id
from hocket.models.source import fetch_again, resolve_model, run_source
from hocket.spec.errors import ModelError
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from tests.families import LLAMA
from tests.house.test_imports import WITHOUT_TORCH
from tests.hub_server import TOKEN, Repo, offline

pytestmark = [pytest.mark.train, pytest.mark.timeout(60)]

CONFIG = json.dumps(LLAMA).encode()
BIG = os.urandom(400_000)
CARD = b"---\nlicense: mit\nbase_model:\n- org/whole\n---\ntext\n"


def repo(**more: object) -> Repo:
    files = {
        "config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": BIG,
        "README.md": CARD, "pytorch_model.bin": b"\x80", "original/model.safetensors": b"1",
        "consolidated.safetensors": b"2", "onnx/model.onnx": b"3", "modeling_x.py": b"1 / 0",
    }  # fmt: skip
    return Repo("org/name", files, **more)  # type: ignore[arg-type]


def bodies(server) -> set[str]:
    """The files whose bodies were asked for."""
    oids = {r.etag(path): path for r in server.repos.values() for path in r.files}
    return {
        oids.get(path.rpartition("/")[2], path.partition("/resolve/")[2].partition("/")[2])
        for method, path, _ in server.requests
        if method == "GET" and ("/cdn/" in path or "/resolve/" in path)
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/name", ("org/name", None)),
        ("Qwen/Qwen3-0.6B@v1.0", ("Qwen/Qwen3-0.6B", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("https://huggingface.co/org/name", ("org/name", None)),
        ("https://huggingface.co/org/name/tree/dev", ("org/name", "dev")),
        ("https://hf-mirror.com/org/name/blob/main/config.json", ("org/name", "main")),
        ("hf://org/name", ("org/name", None)),
        ("https://huggingface.co/datasets/org/name", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("org/na--me", None),
        ("org/name@", None),
        ("ftp://host/org/name", None),
    ],
)
def test_what_names_a_repository(text, found) -> None:
    one = repo_id.parse_repo(text)
    assert (one and (one.id, one.revision)) == found


def test_a_directory_and_the_catalogue_come_before_the_hub(loopback, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_bytes(CONFIG)
    with loopback(repo()) as server:
        assert resolve_model("org/name").directory == Path("org/name")
        assert resolve_model("tiny-llama").repo is None
        assert server.requests == []


def test_a_model_is_downloaded_once_and_only_what_is_read(loopback) -> None:
    with loopback(repo()) as server:
        source = resolve_model("org/name", weights=False)
        assert (source.weights, source.dimensions.num_layers) == (None, LLAMA["num_hidden_layers"])
        assert bodies(server) == {"config.json"}
        source = resolve_model("org/name")
        assert source.repo == f"org/name@{server.repos['model', 'org/name'].commit}"
        assert source.weights == source.tokenizer == source.directory
        assert (source.weights / "model.safetensors").read_bytes() == BIG
        assert bodies(server) == {"config.json", "tokenizer.json", "model.safetensors"}
        before = len(server.requests)
        assert resolve_model("org/name").weights == source.weights
        assert len(server.requests) == before + 1  # which commit it is now
        assert resolve_model(source.repo).weights == source.weights
        assert len(server.requests) == before + 1
        page = f"{server.address}/org/name/tree/main"
        assert resolve_model(page).weights == source.weights


def test_shards_are_those_that_the_index_names(loopback) -> None:
    one = repo()
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    one.files |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "part-1.safetensors": b"1", "part-2.safetensors": b"22", "part-3.safetensors": b"333",
    }  # fmt: skip
    with loopback(one) as server:
        resolve_model("org/name")
        shards = {name for name in bodies(server) if name.endswith(".safetensors")}
        assert shards == {"part-1.safetensors", "part-2.safetensors"}
        one.files.pop("part-2.safetensors")
        with pytest.raises(ModelError, match=r"has no part-2\.safetensors, which its index"):
            resolve_model("org/name")


def test_code_of_a_repository_is_fetched_and_run_only_by_the_commands_flag(loopback) -> None:
    one = repo()
    one.files["config.json"] = json.dumps({**LLAMA, "auto_map": {"AutoConfig": "x.Y"}}).encode()
    with loopback(one) as server:
        with pytest.raises(ModelError, match="brings its own code"):
            resolve_model("org/name")
        assert "modeling_x.py" not in bodies(server)
        assert resolve_model("org/name", trust_remote_code=True).code is not None
        assert "modeling_x.py" in bodies(server)
        spec = RunSpec(model="org/name", config=json.loads(one.files["config.json"]),
                       layout=Layout())  # fmt: skip
        with pytest.raises(ModelError, match="brings its own code"):
            run_source(spec)


def test_a_broken_connection_is_resumed_where_it_ended(loopback, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    with loopback(repo(cuts=[150_000, 100_000])) as server:
        folder = resolve_model("org/name").weights
        assert folder is not None
        assert (folder / "model.safetensors").read_bytes() == BIG
        assert server.fetched("model.safetensors") == [None, "bytes=131072-", "bytes=196608-"]


def test_a_download_that_never_ends_says_what_is_kept(loopback, monkeypatch) -> None:
    with loopback(repo(cuts=[1000] * 60)) as server:
        with pytest.raises(ModelError, match="broke off 3 times") as caught:
            resolve_model("org/name")
        assert "run the command again" in str(caught.value.hint)
        server.repos["model", "org/name"].cuts.clear()
        server.requests.clear()
        assert resolve_model("org/name").weights is not None
        assert bodies(server) == {"model.safetensors"}


def test_another_process_continues_where_the_first_was_killed(loopback) -> None:
    import huggingface_hub

    code = (
        "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 65536\n"
        "from hocket.models.source import resolve_model\n"
        "try: resolve_model('org/name')\n"
        "except Exception as error: print(error)\n"
    )
    with loopback(repo(cuts=[200_000] + [0] * 100)) as server:
        broken = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
        )
        assert "broke off" in broken.stdout
        server.repos["model", "org/name"].cuts.clear()
        server.requests.clear()
        folder = resolve_model("org/name").weights
        assert folder is not None
        assert (folder / "model.safetensors").read_bytes() == BIG
        (ranged,) = server.fetched("model.safetensors")
        assert ranged is not None
        assert int(ranged.removeprefix("bytes=").rstrip("-")) >= 131_072
        blobs = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--org--name" / "blobs"
        assert not list(blobs.glob("*.partial"))


def test_a_busy_hub_is_asked_again(loopback, monkeypatch) -> None:
    monkeypatch.setattr(hub.time, "sleep", lambda _: None)
    with loopback(repo(busy=[503] * 90)), pytest.raises(ModelError, match="answers 503"):
        resolve_model("org/name")
    with loopback(repo(busy=[503, 502])):
        assert resolve_model("org/name").weights is not None


def test_a_file_with_another_sha256_is_found_and_removed(loopback) -> None:
    with loopback(repo(damaged=["model.safetensors"])) as server:
        with pytest.raises(ModelError, match=r"model\.safetensors of org/name arrived damaged"):
            resolve_model("org/name")
        folder = resolve_model("org/name").weights
        assert folder is not None
        assert (folder / "model.safetensors").read_bytes() == BIG
        assert len(server.fetched("model.safetensors")) == 2


def test_damage_is_found_by_the_next_process_where_one_ended_in_between(
    loopback, monkeypatch
) -> None:
    def ended() -> None:
        raise KeyboardInterrupt

    with loopback(repo(damaged=["model.safetensors"])):
        with monkeypatch.context() as patch:
            patch.setattr(hub, "hashlib", types.SimpleNamespace(sha256=ended))
            with pytest.raises(KeyboardInterrupt):
                resolve_model("org/name")
        with pytest.raises(ModelError, match="arrived damaged"):
            resolve_model("org/name")
        hashed: list[int] = []
        assert resolve_model("org/name").weights is not None
        counted = types.SimpleNamespace(sha256=lambda: hashed.append(1))
        monkeypatch.setattr(hub, "hashlib", counted)
        assert resolve_model("org/name").weights is not None  # compared once
        assert not hashed


def test_two_processes_download_once(loopback) -> None:
    code = (
        "from hocket.models.source import resolve_model; print(resolve_model('org/name').weights)"
    )
    with loopback(repo()) as server:
        both = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        said = {process.communicate(timeout=100)[0] for process in both}
        assert len(said) == 1
        assert "snapshots" in said.pop()
        assert len(server.fetched("model.safetensors")) == 1


def test_gated_names_its_page_and_the_login(loopback, monkeypatch) -> None:
    with loopback(repo(gated="token")) as server:
        with pytest.raises(ModelError, match="gated: its licence has to be accepted") as caught:
            resolve_model("org/name")
        assert f"{server.address}/org/name" in str(caught.value.hint)
        assert "hf auth login" in str(caught.value.hint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert resolve_model("org/name").weights is not None
    closed = Repo("org/closed", {"config.json": CONFIG}, gated="licence")
    with loopback(closed), pytest.raises(ModelError, match="the token in use has no access"):
        resolve_model("org/closed")


def test_what_is_not_there_has_near_names(loopback) -> None:
    with loopback(repo(branches=("main", "v1.0"))) as server:
        with pytest.raises(ModelError, match="has no model org/nmae") as caught:
            resolve_model("org/nmae")
        assert caught.value.hint == "did you mean org/name?"
        with pytest.raises(ModelError, match="has no revision 'v1'") as caught:
            resolve_model("org/name@v1")
        assert caught.value.hint == "did you mean org/name@v1.0?"
        assert resolve_model("org/name@v1.0").repo == resolve_model("org/name").repo
        with pytest.raises(ModelError) as caught:
            resolve_model("other/thing")
        assert server.address in str(caught.value.hint)


def test_without_a_network_the_cache_answers(loopback, monkeypatch) -> None:
    with loopback(repo()):
        source = resolve_model("org/name")
    assert resolve_model("org/name").weights == source.weights  # nothing listens there any more
    with pytest.raises(ModelError, match=r"cannot be reached .* not hold model org/other"):
        resolve_model("org/other")
    offline(monkeypatch, True)
    assert resolve_model("org/name").weights == source.weights
    assert source.repo is not None
    assert resolve_model(source.repo).weights == source.weights
    with pytest.raises(ModelError, match=r"OFFLINE is set, and the cache .*/hub") as caught:
        resolve_model("org/other")
    assert "hf download org/other --local-dir other" in str(caught.value.hint)
    with pytest.raises(ModelError) as caught:
        resolve_model("mistralai/Mistral-7B-v0.1", weights=False)
    assert str(caught.value.hint).endswith("plan and rehearse have its shape as mistral-7b")


def test_offline_with_half_of_a_model_names_what_is_missing(loopback, monkeypatch) -> None:
    with loopback(repo()):
        resolve_model("org/name", weights=False)
    offline(monkeypatch, True)
    assert resolve_model("org/name", weights=False).directory is not None
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/name")


def test_formats_that_are_not_read_are_named(loopback, tmp_path) -> None:
    gguf = Repo("org/gguf", {"a.Q4_K.gguf": b"1", "README.md": CARD})
    pickled = Repo("org/old", {"config.json": CONFIG, "pytorch_model-1.bin": b"1"})
    other = Repo("org/flax", {"config.json": CONFIG, "flax_model.msgpack": b"1"})
    no_model = Repo("org/code", {"main.c": b"1"})
    quantized = Repo("org/gptq", {"README.md": CARD, "config.json": json.dumps(
        {**LLAMA, "quantization_config": {"quant_method": "aqlm"}}).encode()})  # fmt: skip
    with loopback(gguf, pickled, other, no_model, quantized) as server:
        for weights in (True, False):
            with pytest.raises(ModelError, match=r"GGUF weights \(a.Q4_K.gguf\)") as caught:
                resolve_model("org/gguf", weights=weights)
            assert str(caught.value.hint).endswith("org/whole")
            with pytest.raises(ModelError, match=r"quantized \(aqlm\), which is not") as caught:
                resolve_model("org/gptq", weights=weights)
            assert str(caught.value.hint).endswith("org/whole")
        with pytest.raises(ModelError, match=r"as pytorch_model-1\.bin, a pickle") as caught:
            resolve_model("org/old")
        assert "M.from_pretrained('org/old').save_pretrained('old-saf" in str(caught.value.hint)
        with pytest.raises(ModelError, match=r"no weights in safetensors .*msgpack") as caught:
            resolve_model("org/flax")
        assert "hf download org/flax config.json" in str(caught.value.hint)
        with pytest.raises(ModelError, match=r"no config.json \(it has main.c\)"):
            resolve_model("org/code")
        assert not {name for name in bodies(server) if name.endswith((".bin", ".gguf"))}
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "m.gguf", tmp_path):
        (tmp_path / "config.json").write_bytes(CONFIG)
        with pytest.raises(ModelError, match="GGUF weights"):
            resolve_model(path)


def test_the_line_that_saves_a_pickle_again_saves_it(tmp_path, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    old = tmp_path / "old"
    model.config.save_pretrained(old)
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        resolve_model(old)
    line = str(caught.value.hint)
    assert line.startswith('python -c "')
    code = line.removeprefix('python -c "').removesuffix('"')
    monkeypatch.chdir(tmp_path)
    exec(";".join(code.split(";")[:2]))  # this model has no tokenizer
    assert resolve_model(tmp_path / "old-safetensors").weights is not None


def test_a_run_finds_its_model_again(loopback, tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    with loopback(repo()) as server:
        source = resolve_model("org/name")
        assert source.repo is not None
        spec = RunSpec(model=source.repo, config=LLAMA, layout=Layout(),
                       weights=str(source.weights))  # fmt: skip
        assert run_source(spec).weights == source.weights
        assert run_source(spec).repo == source.repo
        # A host whose cache is elsewhere, and empty.
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
        there = RunSpec(**{**vars(spec), "weights": str(tmp_path / "gone")})
        server.repos["model", "org/name"].branches = ()  # the commit alone is asked for
        fetch_again(there)
        weights = run_source(there).weights
        assert weights is not None
        assert weights.is_relative_to(tmp_path / "elsewhere")
        assert (weights / "model.safetensors").read_bytes() == BIG


def test_a_plan_of_a_catalogue_model_by_its_id_needs_no_torch(loopback) -> None:
    from hocket.catalogue import models

    entry = models.entry("qwen3-8b")
    assert entry.hub_id is not None
    config = {**entry.config, "transformers_version": "4.51.0"}
    one = Repo(entry.hub_id, {"config.json": json.dumps(config).encode()})
    code = (
        f"{WITHOUT_TORCH}\nfrom hocket.cli.main import main\nassert main(['plan', "
        f"{entry.hub_id!r}, '--cluster', '8xH100', '--global-batch', '8', '--top', '1']) == 0"
    )
    with loopback(one) as server:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"hocket train {entry.hub_id}" in done.stdout
        assert bodies(server) == {"config.json"}


def test_the_last_checkpoint_of_transformers_trainer(tmp_path) -> None:
    for step in (90, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_bytes(CONFIG)
    (tmp_path / "checkpoint-110").mkdir()  # not complete
    assert resolve_model(tmp_path).directory == tmp_path / "checkpoint-100"


def test_the_base_that_a_card_names(tmp_path) -> None:
    card = tmp_path / "README.md"
    for text, base in (
        ("---\nbase_model: org/a\n---\n", "org/a"),
        ("---\nbase_model:\n  - 'org/b'\n---\n", "org/b"),
        ("---\nlicense: mit\n---\nbase_model: org/c\n", None),
        ("no header", None),
    ):
        card.write_text(text)
        assert fetched.base_in(card) == base


def test_an_adapter_stands_for_its_base_with_it_merged(loopback, tmp_path, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"],
                             use_rslora=True, task_type="CAUSAL_LM")  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    adapted.save_pretrained(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "org/base"
    files = {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir() if p.is_file()}
    files["adapter_config.json"] = json.dumps(settings).encode()
    base = {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()}
    with loopback(Repo("org/adapter", files), Repo("org/base", base)) as server:
        assert resolve_model("org/adapter", weights=False).weights is None
        assert "adapter_model.safetensors" not in bodies(server)
        source = resolve_model("org/adapter")
        assert source.weights is not None
        assert resolve_model("org/adapter").weights == source.weights
    merged = {}
    for file in source.weights.glob("*.safetensors"):
        merged |= load_file(file)
    expected = adapted.merge_and_unload().state_dict()
    tied = {"lm_head.weight"} if LLAMA.get("tie_word_embeddings", True) else set()
    assert merged.keys() >= expected.keys() - tied
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    moved = max((merged[n] - load(tmp_path / "base")[n]).abs().max().item() for n in merged)
    assert moved > 0.01
    settings |= {"use_dora": True}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="with use_dora; adapters are read that are plain LoRA"):
        resolve_model(tmp_path / "adapter")


def load(folder):
    from safetensors.torch import load_file

    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
