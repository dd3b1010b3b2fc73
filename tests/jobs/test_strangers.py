"""A run folder from someone else: nothing in it is executed, and nothing altered is trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue import models as catalogue
from hocket.cli.main import main
from hocket.jobs import prepare, resume
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.train import resumed
from hocket.spec.errors import DataError, HocketError, ModelError, RunFolderError
from hocket.spec.files import json_crc32
from hocket.spec.run import RunFolder

pytestmark = pytest.mark.train

EVIL = "import pathlib\npathlib.Path({marker!r}).touch()\nraise RuntimeError('executed')\n"
SIZES = {"seq_len": 16, "global_batch": 4, "steps": 4, "save_every": 2, "device": "cpu",
         "cluster": "none"}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a run leaves it that ended after its first checkpoint."""
    here = tmp_path_factory.mktemp("made")
    chats = [
        [{"role": "user", "content": "a" * (n % 3)}, {"role": "assistant", "content": f"b{n}"}]
        for n in range(60)
    ]
    lines = [json.dumps({"messages": turns}) for turns in chats]
    (here / "chats.jsonl").write_text("\n".join(lines))
    (here / "template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    wanted = request(
        {"model": "tiny-llama", "data": [str(here / "chats.jsonl")], "run": str(here / "run"),
         "packing": "across", "eval_fraction": 0.3,
         "chat_template_file": str(here / "template.jinja"), **SIZES}
    )  # fmt: skip
    job = prepare.prepare_job(wanted)
    folder = prepare.train_folder(wanted)
    _, tokens, config = prepare.data(job, folder)
    assert tokens.flags
    prepare.write_run(prepare.fitted_to(job, tokens), folder, config, "train")
    checkpoint = folder.checkpoints / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (folder.checkpoints / "latest").write_text("step-000002\n")
    return folder.path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def goes_on(run: Path, **given: Any) -> None:
    """What `hocket train --resume` does before ranks start."""
    found = resume.resume_job(request({"model": run, "run": run, "resume": True, **given}))
    resumed(found, JobRecorder(None), launcher=None)  # type: ignore[arg-type]


def edit(file: Path, **values: Any) -> None:
    """Change a file as a stranger does who knows its checksum."""
    body = json.loads(file.read_text())
    for key, value in values.items():
        inner = body
        *path, last = key.split("__")
        for name in path:
            inner = inner[name]
        inner[last] = value
    body.pop("crc32", None)
    file.write_text(json.dumps({**body, "crc32": json_crc32(body)}))


# --- files ---------------------------------------------------------------------------------------


def test_an_untouched_folder_goes_on(run: Path) -> None:
    goes_on(run)


@pytest.mark.parametrize("dtype", ["O", "float16", "uint64", ">u2", "S4", "U1"])
def test_no_other_dtype_is_read(run: Path, dtype: str) -> None:
    edit(run / "data" / "tokens.json", dtype=dtype)
    with pytest.raises(DataError, match="it is uint16 or uint32"):
        goes_on(run)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_tokens", -1), ("train_tokens", 2**70), ("valid_tokens", 1.5), ("train_rows", 3),
        ("vocab_size", 0), ("largest", 2**16), ("eos_id", -1), ("packing", "documents"),
        ("packing", "other"), ("version", 2), ("flags", 1), ("files", {"../run.json": [1, 2]}),
        ("files", {"tokens.bin": ["1", 2]}), ("sources", [1]), ("learned_tokens", True),
    ],
)  # fmt: skip
def test_every_value_of_the_manifest_is_checked(run: Path, field: str, value: Any) -> None:
    edit(run / "data" / "tokens.json", **{field: value})
    with pytest.raises(DataError):
        goes_on(run)


@pytest.mark.parametrize("how", ["cut", "grown", "permuted", "gone"])
@pytest.mark.parametrize(
    "name", ["tokens.bin", "valid.bin", "tokens.flags.bin", "valid.flags.bin", "tokenizer.json"]
)
def test_an_altered_file_is_not_trained_on(run: Path, name: str, how: str) -> None:
    file = run / "data" / name
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        half = len(data) // 4 * 2
        changed = {"cut": data[:half], "grown": data + data, "permuted": data[half:] + data[:half]}
        file.write_bytes(changed[how])
        assert file.read_bytes() != data
    with pytest.raises(DataError, match=name):
        goes_on(run)


def test_a_cut_file_is_not_trained_on_without_checksums_either(run: Path) -> None:
    edit(run / "data" / "tokens.json", files=None)
    file = run / "data" / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"tokens\.bin"):
        goes_on(run)


def test_a_folder_without_checksums_goes_on_and_gets_them(run: Path) -> None:
    manifest = run / "data" / "tokens.json"
    old = json.loads(manifest.read_text())
    del old["files"], old["crc32"]
    manifest.write_text(json.dumps(old))
    notes: list[dict[str, Any]] = []
    found = resume.resume_job(request({"model": run, "run": run, "resume": True}))
    resumed(found, JobRecorder(notes.append), launcher=None)  # type: ignore[arg-type]
    assert any("without checksums" in str(event.get("text")) for event in notes)
    file = run / "data" / "tokens.bin"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(DataError, match="checksum differs"):
        goes_on(run)


def test_a_value_of_run_json_is_not_changed_in_silence(run: Path) -> None:
    file = run / "run.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(RunFolderError, match="its checksum differs"):
        goes_on(run)


@pytest.mark.parametrize(
    ("field", "value"),
    [("options__lr", -1.0), ("options__threads", 0), ("options__beta1", 2), ("options__lr", "x"),
     ("workload__global_batch", 0), ("workload__seq_len", -3), ("options__device", "tpu"),
     ("layout", "dp0"), ("config", []), ("model", 3), ("weights", 3), ("data", 3), ("version", 9)],
)  # fmt: skip
def test_every_value_of_run_json_is_checked(run: Path, field: str, value: Any) -> None:
    edit(run / "run.json", **{field: value})
    with pytest.raises(HocketError):
        goes_on(run)


# --- code ----------------------------------------------------------------------------------------


@pytest.fixture
def evil(run: Path, tmp_path: Path) -> Path:
    """The run of a model with code of its own, which run.json says is trusted."""
    config = {**catalogue.config("tiny-llama"), "vocab_size": 257}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    model = run / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "executed")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(run / "data" / name, model / name)
    edit(run / "run.json", config=config, model=str(model), options__trust_remote_code=True)
    return run


@pytest.mark.parametrize("joined", [False, True])
def test_a_resume_runs_code_by_its_own_flag_alone(
    evil: Path,
    tmp_path: Path,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if joined:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"),
                            ("MASTER_PORT", "1")):  # fmt: skip
            monkeypatch.setenv(name, value)
    assert main(["train", "--run", str(evil), "--resume", "--steps", "6"]) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    asked = {"model": evil, "run": evil, "resume": True, "trust_remote_code": True}
    assert resume.resume_job(request(asked)).job.source.code == evil / "model"


def test_ranks_run_code_by_the_flag_of_the_command_alone(evil: Path) -> None:
    from hocket.models.source import run_source

    folder = RunFolder(evil)
    with pytest.raises(ModelError, match="brings its own code"):
        run_source(folder.load())
    spec = folder.load(trust_remote_code=True)
    assert prepare.rank_payload(folder, spec)["trust_remote_code"]
    folder.save(spec)
    assert not json.loads(folder.spec_file.read_text())["options"]["trust_remote_code"]


@pytest.mark.parametrize(
    ("command", "rc"),
    [
        (["generate", "RUN", "--prompt", "hi"], 2),
        (["serve", "RUN"], 2),
        (["check", "RUN", "--layout", "tp2"], 2),
        (["export", "RUN", "--to", "OUT"], 0),
        (["report", "RUN", "--format", "text"], 0),
    ],
)
def test_no_verb_runs_the_code_of_a_folder(
    evil: Path, tmp_path: Path, command: list[str], rc: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(evil / "checkpoints")
    names = {"RUN": str(evil), "OUT": str(tmp_path / "out")}
    assert main([names.get(word, word) for word in command]) == rc
    assert ("trust" in capsys.readouterr().err) == (rc == 2)
    assert not (tmp_path / "executed").exists()


@pytest.mark.torch
def test_a_merge_runs_code_by_its_own_flag_alone(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, evil / "model" / "model.safetensors")
    adapter = evil / "adapter"
    adapter.mkdir()
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    shutil.rmtree(evil / "checkpoints")
    plain = {**catalogue.config("tiny-llama"), "vocab_size": 257}
    # The weights that run.json names bring the code; its own configuration is innocent.
    edit(evil / "run.json", config=plain, weights=str(evil / "model"), options__lora_rank=2)
    command = ["export", str(evil), "--merge", "--to", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    assert main([*command, "--trust-remote-code"]) == 2
    assert (tmp_path / "executed").exists(), "with the flag it is run: the test can see it"
    assert not (tmp_path / "out").exists()
