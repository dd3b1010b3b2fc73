"""Bad input: one clear message with the numbers and a hint, code 2, and nothing started."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.catalogue import models as catalogue
from hocket.cli.main import main
from hocket.jobs import prepare, resume
from hocket.jobs.request import request
from hocket.jobs.serving import request as serving_request
from hocket.probing import devices
from hocket.runtime import host_memory
from hocket.spec.errors import LayoutError
from hocket.spec.layout import Layout
from hocket.spec.run import RunFolder, RunSpec, TrainOptions, Workload

pytestmark = pytest.mark.train

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("One melody, dealt note by note to several voices. " * 400)
    return str(file)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A refused job starts no process."""
    real = subprocess.Popen

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.chdir(tmp_path)
    assert real is not subprocess.Popen


Run = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command that must be refused; what it said."""

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        try:
            code = main(arguments)
        except SystemExit as end:  # the parser's own refusals
            code = end.code if isinstance(end.code, int) else 1
        said = capsys.readouterr()
        assert code == 2, said
        assert said.out == ""
        assert "Traceback" not in said.err
        assert sorted(tmp_path.rglob("*")) == before, "a refused job leaves nothing behind"
        return said.err

    return run


def test_heads_that_do_not_divide(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--layout", "tp4", "--seq-len", "32")
    assert "6 attention heads do not divide over tp 4" in said
    assert " --layout tp3" in said


def test_key_value_heads_that_do_not_divide(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--layout", "tp2", "--seq-len", "32")
    assert "3 key/value heads neither divide over tp 2 nor are a divisor of it" in said
    assert " --layout" in said


def test_slices_of_one_tensor_rank(refused: Run, model: str, text: str) -> None:
    said = refused(
        "train", model, "--data", text, "--layout", "dp2:zero=1,sequence_parallel=true",
        "--seq-len", "32",
    )  # fmt: skip
    assert "of which there must be at least 2; tp is 1" in said
    assert " --layout dp2:zero=1\n" in said


@pytest.mark.parametrize(
    ("layout", "says", "hint"),
    [
        ("dp2:recompute=full,recompute_layers=4", "the model has 3 layers", "dp2:recompute=full"),
        (
            "pp2:recompute=full,recompute_layers=3",
            "stages holds at most 2 of its 3",
            "pp2:recompute=full",
        ),
        (
            "pp2:pipeline_split=1-2,recompute=full,recompute_layers=3",
            "longest of 2 stages holds at most 2",
            "pp2:rec",
        ),
        (
            "pp3:pipeline_split=even,recompute=full,recompute_layers=2",
            "at most 1 of its 3",
            "pp3:recompute",
        ),
    ],
)
def test_more_layers_to_recompute_than_a_stage_has(
    refused: Run, model: str, text: str, layout: str, says: str, hint: str
) -> None:
    said = refused("train", model, "--data", text, "--layout", layout, "--seq-len", "32")
    assert "recompute_layers is " in said
    assert says in said
    assert f" --layout {hint}" in said


def test_layers_that_are_too_few(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--layout", "pp4", "--seq-len", "32")
    assert "3 layers cannot be cut into 4 stages" in said
    assert "--layout pp3" in said


def test_layers_that_do_not_divide_evenly(refused: Run, model: str, text: str) -> None:
    said = refused(
        "train",
        model,
        "--data",
        text,
        "--layout",
        "pp2",
        "--pipeline-split",
        "even",
        "--seq-len",
        "32",
    )
    assert "3 layers do not divide evenly into 2 stages" in said
    assert " --pipeline-split balanced" in said


def test_a_cut_of_another_number_of_layers(refused: Run, model: str, text: str) -> None:
    said = refused(
        "train",
        model,
        "--data",
        text,
        "--layout",
        "pp2",
        "--pipeline-split",
        "2-2",
        "--seq-len",
        "32",
    )
    assert "pipeline_split 2-2 places 4 layers; the model has 3" in said


def test_a_cut_of_another_number_of_stages(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--layout", "pp2", "--pipeline-split", "1-1-1")
    assert "names 3 stages, the layout has 2" in said
    assert " --layout pp3:pipeline_split=1-1-1" in said


@pytest.mark.parametrize("command", ["train", "serve"])
@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["--layout", "ep2"], "ep 2 must divide dp x cp = 1", "--layout dp1"),
        (["--layout", "dp0"], "dp is 0; a degree is a whole number of at least 1", "--layout dp1"),
        (["--layout", "tp0.pp2"], "tp is 0; a degree", "--layout pp2"),
        (
            ["--pipeline-split", "1-2"],
            "names 2 stages, the layout has 1",
            "--layout pp2:pipeline_split=1-2",
        ),
    ],
)
def test_a_layout_that_cannot_be(
    refused: Run, model: str, command: str, arguments: list[str], says: str, hint: str
) -> None:
    said = refused(command, model, *arguments)
    assert says in said
    assert said.endswith(f" {hint}\n")
    assert f"hint: hocket {command} " in said


@pytest.mark.parametrize("verb", ["train", "check"])
def test_chunks_shorter_than_a_convolution(
    refused: Run, tmp_path: Path, text: str, verb: str
) -> None:
    hybrid = tmp_path / "hybrid.json"
    hybrid.write_text(json.dumps({**TINY, "model_type": "lfm2", "conv_L_cache": 7}))
    data = ["--data", text] if verb == "train" else []
    said = refused(verb, str(hybrid), *data, "--layout", "cp2", "--seq-len", "20")
    assert "20 tokens are cut into 2 x cp = 4 chunks of 5, fewer than the 6 earlier inputs" in said
    assert "--seq-len 24 is enough" in said


def test_a_batch_that_does_not_divide(refused: Run, model: str, text: str) -> None:
    said = refused(
        "train", model, "--data", text, "--layout", "dp3", "--global-batch", "8", "--seq-len", "32"
    )
    assert "global batch of 8 does not divide over dp 3" in said
    assert "--layout dp2" in said


def test_microbatches_that_do_not_divide(refused: Run, model: str, text: str) -> None:
    said = refused(
        "train", model, "--data", text, "--layout", "dp2", "--microbatches", "3",
        "--global-batch", "8", "--seq-len", "32",
    )  # fmt: skip
    assert "batch of 4 sequences" in said
    assert "does not divide into 3 microbatches" in said
    assert "--microbatches 4" in said


def test_a_vocabulary_smaller_than_the_ranks(refused: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 4}))
    said = refused("train", str(tmp_path), "--data", text, "--layout", "tp3", "--seq-len", "32")
    assert "vocabulary of 4" in said
    assert "tp 3" in said


def test_a_world_of_another_size(
    refused: Run, model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "LOCAL_RANK": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    said = refused("train", model, "--data", text, "--layout", "dp2", "--seq-len", "32")
    assert "the layout dp2 needs 2 ranks; the launcher started 3" in said
    assert "--layout pp3" in said


def test_a_sequence_longer_than_the_positions(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--seq-len", "128")
    assert "seq_len is 128; the model has 64 positions" in said
    assert "--seq-len 64" in said


def test_an_unknown_flag(refused: Run, model: str, text: str) -> None:
    said = refused("train", model, "--data", text, "--layuot", "dp2")
    assert "--layuot" in said
    assert "--layout" in said


def test_an_unknown_verb(refused: Run) -> None:
    assert "hint: hocket train\n" in refused("trian")


def test_no_verb_at_all(refused: Run) -> None:
    assert "usage: hocket VERB" in refused()


def test_an_unknown_key(refused: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('model = "tiny-llama"\nsteps = 3\nglobal_bach = 8\n')
    said = refused("train", "--config", str(config))
    assert "unknown option 'global_bach'" in said
    assert repaired(said) == 'model = "tiny-llama"\nsteps = 3\nglobal_batch = 8\n'
    config.write_text("[training]\nwarm-pu = 3\n")
    assert repaired(refused("train", "--config", str(config))) == "[training]\nwarmup = 3\n"
    for strange in ("wamrup/e;", "wamrup'"):  # no part of a name becomes part of a command
        config.write_text(f'"{strange}" = 3\n')
        assert "hint: sed" not in refused("train", "tiny-llama", "--config", str(config))
        config.write_text(f'["{strange}".deep]\nwarmup = 3\n')
        assert "hint: sed" not in refused("train", "tiny-llama", "--config", str(config))


def repaired(said: str) -> str:
    """A file of options after the command of a hint, without the hint's reason."""
    (line,) = re.findall("hint: (sed .*)", said)
    words = shlex.split(line)
    os.spawnvp(os.P_WAIT, words[0], words)
    return Path(words[-1]).read_text()


def test_a_key_of_another_type(refused: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('lr = 0.1\nsteps = "many"\n')
    said = refused("train", "tiny-llama", "--config", str(config))
    assert "steps is 'many'; a whole number is needed" in said
    assert repaired(said) == "lr = 0.1\nsteps = 100\n"


@pytest.mark.parametrize("body", ["steps = = 3", "[training.more]\nsteps = 3"])
def test_a_file_that_is_no_configuration(refused: Run, tmp_path: Path, body: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(body)
    assert str(config) in refused("train", "tiny-llama", "--config", str(config))


def test_a_configuration_that_is_not_there(refused: Run) -> None:
    assert "there is no file nowhere.toml" in refused("train", "--config", "nowhere.toml")


def test_a_folder_that_is_named_as_a_file(refused: Run, tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    assert f"{folder} is a folder" in refused("train", "--config", str(folder))
    assert f"{folder} is a folder" in refused(
        "plan", "tiny-llama", "--global-batch", "8", "--cluster", str(folder)
    )
    assert f"{folder} is a folder" in refused("validate", str(folder))


def test_an_unknown_schedule(refused: Run, text: str) -> None:
    said = refused("train", "tiny-llama", "--data", text, "--layout", "pp2", "--schedule", "1b1f")
    assert "unknown schedule '1b1f'" in said
    assert "--schedule 1f1b" in said


def test_a_schedule_that_deadlocks(refused: Run, text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(
        "# hocket schedule 1\n# name: mine\n# microbatches: 2\n# stage ranks: 0 1\n"
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    )
    said = refused(
        "train", "tiny-llama", "--data", text, "--layout", "pp2", "--schedule", str(file),
        "--microbatches", "2",
    )  # fmt: skip
    assert ">>" in said, "the board is printed, the failing cell marked"
    assert "rank 1" in said


def test_an_unknown_model(refused: Run, text: str) -> None:
    said = refused("train", "tiny-lama", "--data", text)
    assert "unknown model 'tiny-lama'" in said
    assert "hint: hocket train tiny-llama " in said


def test_no_model(refused: Run) -> None:
    assert "no model was named" in refused("train")


def test_no_data(refused: Run) -> None:
    assert "no data was named" in refused("train", "tiny-llama")


def test_data_that_is_not_there(refused: Run) -> None:
    assert "data nowhere.txt" in refused("train", "tiny-llama", "--data", "nowhere.txt")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layout", "dp2.xp2"], "unknown axis 'xp'"),
        (["--layout", "dp0"], "dp is 0"),
        (["--layout", "dp2:schedule=gpipe", "--schedule", "1f1b"], "the flag has 1f1b"),
        (["--recompute", "norm", "--compile"], "compiled layer chooses itself"),
        (["--layout", "dp1:recompute=norm+mpl"], "unknown recompute 'mpl'"),
        (["--layout", "dp2:zero=4"], "zero is 4"),
        (["--layout", "dp3:zero=3", "--global-batch", "8"], "--layout dp4:zero=3\n        or"),
        (["--layout", "dp2.tp2", "--data-parallel", "threads"], "takes no other axis"),
        (["--steps", "0"], "steps is 0; it must be at least 1"),
        (["--dtype", "fp61"], "unknown dtype 'fp61'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--eval-fraction", "1.5"], "eval_fraction is 1.5"),
        (["--seq-len", "many"], "--seq-len"),
        (["--resume"], "--resume continues a run, and none was named"),
        (["--tokenizer", "nowhere"], "--tokenizer 'nowhere'"),
    ],
)
def test_a_value_that_cannot_be(refused: Run, text: str, flags: list[str], said: str) -> None:
    assert said in refused("train", "tiny-llama", "--data", text, *flags)


def test_a_folder_that_holds_a_run(refused: Run, text: str, tmp_path: Path) -> None:
    run = tmp_path / "first"
    run.mkdir()
    RunFolder(run).spec_file.write_text("{}")
    said = refused("train", "tiny-llama", "--data", text, "--run", str(run))
    assert "ended before its first step" in said
    assert f"rm -r {run}" in said
    RunFolder(run).metrics_file.write_text("{}")
    said = refused("train", "tiny-llama", "--data", text, "--run", str(run))
    assert f"{run} already holds a run" in said
    assert "--resume\n        to continue it, or another name: --run" in said
    assert f"--run {run}-2" in said


def test_resuming_what_is_no_run(refused: Run, tmp_path: Path) -> None:
    said = refused("train", "--run", str(tmp_path), "--resume")
    assert "holds no run" in said


def test_a_dry_run_of_what_is_resumed(refused: Run) -> None:
    """It was one of a new run, from the model that the run had exported."""
    said = refused("train", "--run", "runs/first", "--resume", "--dry-run")
    assert "hint: hocket config show train --config runs/first/run.toml\n" in said


def test_the_wrong_kind_of_value_for_a_flag(refused: Run, text: str) -> None:
    said = refused("train", "tiny-llama", "--data", text, "--steps", "three")
    assert "--steps" in said
    assert "three" in said


@pytest.mark.parametrize("name", ["x" * 300, "text.txt/run"])
def test_a_run_folder_that_no_file_system_holds(refused: Run, text: str, name: str) -> None:
    said = refused("train", "tiny-llama", "--data", text, "--run", name)
    assert name in said


def test_data_of_a_name_that_no_file_system_holds(refused: Run) -> None:
    assert "name too long" in refused("train", "tiny-llama", "--data", "x" * 300).lower()


def test_a_name_does_not_steer_the_terminal(refused: Run) -> None:
    said = refused("train", "tiny-llama", "--data", "red\x1b[31m.txt")
    assert "\x1b" not in said
    assert r"red\x1b[31m.txt" in said


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_data_that_may_never_end(refused: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or a pipe" in refused("train", "tiny-llama", "--data", name)


def test_data_of_no_name_is_not_the_current_folder(refused: Run, text: str) -> None:
    assert "there is no such file" in refused("train", "tiny-llama", "--data", "")


def test_sequence_parallelism_without_tensor_ranks(refused: Run, text: str) -> None:
    """The hint is one that is taken, whether the flag or the layout asked for it."""
    for asked in (["--sequence-parallel"], ["--layout", "dp2:sequence_parallel=true"]):
        said = refused("train", "tiny-llama", "--data", text, "--seq-len", "32", *asked)
        assert "tp is 1" in said
        assert ".tp2:sequence_parallel=true" in said or " tp2:sequence_parallel=true" in said
        assert "--sequence-parallel" not in said.rpartition("hint:")[2]


def test_a_run_that_is_not_there_names_those_that_are(
    refused: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    said = refused("export", "runs/frist", "--to", "x")
    assert "holds no run" in said
    assert "hint: hocket export runs/first --to x" in said
    said = refused("train", "runs/frist", "--resume")
    assert "hint: hocket train runs/first --resume" in said
    assert "the runs in runs: first, second" in refused("export", "runs/zzzzzz", "--to", "x")
    said = refused("generate", "runs/frist", "--prompt", "x")
    assert "there is no directory runs/frist" in said
    assert "did you mean runs/first?" in said
    assert "--run elsewhere/a" in refused("export", "elsewhere/a", "--to", "x")


def test_lora_of_a_configuration_names_the_weights(refused: Run, text: str) -> None:
    said = refused("train", "gpt2", "--data", text, "--lora-rank", "4")
    assert "hocket train openai-community/gpt2" in said


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("train", "--layout", "dp1"), "plan FOLDER --cluster 4x8xH100 --seq-len 256"),
        (("train", "--data", "text.txt", "--lora-rank", "8"), "plan FOLDER --cluster 4x8xH100"),
        (("train", "--memory-per-rank", "9TB"), "plan FOLDER --cluster 4x8xH100"),
        (("check", "--layout", "tp2"), "check --matrix --types llama --layouts tp2"),
        (
            ("check", "--serve", "--layout", "tp2"),
            "check --serve --matrix --types llama --layouts tp2",
        ),
        (("compare",), "plan FOLDER --cluster 4x8xH100 --seq-len 128"),
        (("generate", "--prompt", "x"), "plan FOLDER --serve --cluster H100"),
        (("serve", "--layout", "tp2"), "plan FOLDER --serve --cluster H100"),
    ],
)
def test_a_model_far_too_large_is_rejected_by_its_configuration(
    refused: Run,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    hint: str,
) -> None:
    """`check`, `compare` and `generate` once took all memory; `train` read the data first, and with
    LoRA all of the weights."""
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 24_000_000_000)
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(catalogue.config("llama-3-70b")))
    verb, *rest = command
    said = refused(verb, str(folder), *rest)
    assert "is too large for this machine: " in said
    assert "of memory is free" in said
    assert f"hint: hocket {hint.replace('FOLDER', str(folder))}" in said
    if verb == "serve":  # rehearsed on GPUs of any memory, so its weights are what it lacks
        assert "has no weights" in refused(verb, str(folder), *rest, "--dry-run")


@pytest.mark.parametrize(
    ("path", "local", "words"),
    [
        ("train", 2, "this machine: .* and 24 GB of memory"),
        ("train", 1, "2 machines like this one: .* and 48 GB of memory"),
        ("resume", 2, "this machine: .* and 24 GB of memory"),
        ("serve", 2, "this machine: .* and 24 GB of memory"),
        ("train", None, "2 GPUs: .* and 160 GB of memory"),
        ("resume", None, "2 GPUs: .* and 160 GB of memory"),
    ],
)
def test_a_model_far_too_large_is_rejected_on_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, local: int | None, words: str
) -> None:
    """A launcher's ranks, a resumed run and GPUs once went past this. `local`: ranks of the
    launcher's two that are on this host; None: two GPUs, and no launcher."""
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 24_000_000_000)
    monkeypatch.setattr(devices, "free_device_memory", lambda count: 80_000_000_000)
    monkeypatch.setattr(prepare, "device_checked", lambda options: None)
    world = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**world, "MASTER_PORT": 1}.items():
        if local is not None:
            monkeypatch.setenv(name, str(value))
    config, layout = catalogue.config("llama-3-70b"), "dp2:zero=1"
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"model": str(tmp_path), "layout": layout, "device": "cpu" if local else "cuda"}
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    run.save(
        RunSpec(
            model=str(tmp_path),
            config=config,
            layout=Layout.parse(layout),
            workload=Workload(global_batch=2),
            options=TrainOptions(device=given["device"]),
        )
    )
    asked: dict[str, Callable[[], object]] = {
        "serve": lambda: serving_request.server({**given, "layout": "tp2"}),
        "train": lambda: prepare.prepare_job(
            request({**given, "dtype": "bf16"}), world_size=local and 2
        ),
        "resume": lambda: resume.resume_job(
            request({"model": str(run.path), "run": str(run.path), "resume": True}),
            world_size=local and 2,
        ),
    }
    with pytest.raises(LayoutError, match=f"is too large for {words} is free"):
        asked[path]()


@pytest.mark.parametrize(
    "command", [("train", "--data", "text.txt"), ("check", "--layout", "dp2"), ("compare",)]
)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "nccl"], "--backend nccl connects CUDA devices; this job would run on cpu"),
        (["--device", "cuda"], "torch sees no CUDA device"),
    ],
)
def test_what_needs_a_gpu_is_rejected_before_ranks_start(
    refused: Run, text: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
    flags: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    verb, *rest = command
    said = refused(verb, "tiny-llama", *rest, *flags)
    assert words in said
    assert said.endswith((" --backend auto\n", " --device cpu\n"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["train", "tiny-llama", "text.txt", "--steps", "2"],
            "tiny-llama --steps 2 --data text.txt",
        ),
        (["train", "tiny-llama", "a.txt", "b.txt"], "tiny-llama --data a.txt b.txt"),
        (["generate", "tiny-llama", "Once upon"], "tiny-llama --prompt 'Once upon'"),
        (["check", "tiny-llama", "tp2"], "tiny-llama --layout tp2"),
        (["serve", "tiny-llama", "8000"], "--help"),
    ],
)
def test_a_second_positional_argument(refused: Run, arguments: list[str], hint: str) -> None:
    said = refused(*arguments)
    assert f"unexpected argument {arguments[2]!r}" in said
    assert said.endswith(f"hint: hocket {arguments[0]} {hint}\n")


@pytest.mark.parametrize("verb", ["train", "serve", "generate", "check", "compare"])
def test_a_verb_without_a_model_shows_its_own_form(refused: Run, verb: str) -> None:
    """`compare` once showed that of `train`."""
    assert f"no model was named\n  hint: hocket {verb} " in refused(verb)


def test_a_demo_that_cannot_be_leaves_no_run(refused: Run) -> None:
    """A launcher was warmed up, and a folder made, before its layout was looked at."""
    assert "hint: hocket demo --layout tp4" in refused("demo", "--layout", "tp3")


def test_data_in_place_of_a_model(refused: Run, text: str) -> None:
    said = refused("train", text)
    assert f"{text} is a file; a model is" in said
    assert f"hocket train MODEL --data {text}" in said


@pytest.mark.parametrize("verb", ["train", "plan", "serve"])
def test_a_key_that_is_far_from_all(refused: Run, tmp_path: Path, verb: str) -> None:
    (tmp_path / "run.yaml").write_text("zzzqq: 8\n")
    said = refused(verb, "--config", "run.yaml")
    assert said.count("\n") == 2
    assert len(said) < 200
    assert said.endswith(f"hint: hocket {verb} --help all lists every option\n")


def test_a_key_that_is_near_some(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batchsize_global: 8\n")
    said = refused("train", "--config", "run.yaml")
    assert "unknown option 'batchsize_global'; the nearest are micro_batch_size, " in said


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        (["--set", "a.b=c"], "hocket train --help all lists every option"),
        (["--set", "training.warmpu=2"], "hocket train tiny-llama --set training.warmup=2"),
        (["--set=warmpu=2", "--set", "lr=1"], "tiny-llama --set=warmup=2 --set lr=1"),
        (["--set", "batch_size=2"], "use --global-batch"),
    ],
)
def test_a_setting_of_no_option(refused: Run, setting: list[str], hint: str) -> None:
    said = refused("train", "tiny-llama", *setting)
    assert f"--set {setting[-1 if len(setting) == 2 else 0].removeprefix('--set=')}: " in said
    assert "hocket train has no option" in said
    assert hint in said


@pytest.mark.parametrize(
    ("name", "words"), [(None, "g++ was"), ("no-such-c++ -O2", "no-such-c++ was")]
)
def test_compiling_without_a_compiler(
    refused: Run, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str | None,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    if name is not None:
        monkeypatch.setenv("CXX", name)
    said = refused("train", "tiny-llama", "--data", text, "--device", "cpu", "--compile")
    assert f"--compile needs a compiler, and {words} not found" in said
    assert "leave --compile out" in said


def test_the_data_of_a_printed_command(refused: Run) -> None:
    said = refused("train", "tiny-llama", "--data", "DATA")
    assert "DATA stands for your data" in said
    assert said.endswith("hint: hocket train tiny-llama --data 'roneneldan/TinyStories[:2000]'\n")


MANY = "9" * 5000
"""A number that int() does not read: it stops at 4,300 digits, with a ValueError."""


@pytest.mark.parametrize(
    "words",
    [
        f"rehearse tiny-llama --layout dp{MANY}",
        f"rehearse tiny-llama --layout dp2 --rank {MANY}",
        f"rehearse tiny-llama --layout dp2 --microbatches {MANY}",
        f"rehearse tiny-llama --layout pp2 --pipeline-split {MANY}-1",
        f"rehearse tiny-mixtral --layout dp2.ep2 --expert-dispatch node:{MANY}",
        "rehearse tiny-mixtral --layout dp2.ep2 --expert-dispatch node:\u00b2",
        f"plan tiny-llama --gpus 8 --pin tp={MANY}",
        f"plan tiny-llama --gpus 8 --pin microbatch={MANY}",
        f"train tiny-llama --layout dp2 --data owner/name[:{MANY}]",
        f"train tiny-llama --layout dp2 --data TEXT --save-every {MANY}",
        f"train tiny-llama --layout dp2 --data TEXT --save-every {MANY}s",
        f"train tiny-llama --data TEXT --layout dp2 --emulate-links nvlink3x{MANY}+net100g",
        "rehearse tiny-mixtral --layout dp999999999999999999.ep7",
    ],
    ids=lambda words: words.replace(MANY, "9...9"),
)
def test_a_number_of_more_digits_than_int_reads(refused: Run, text: str, words: str) -> None:
    assert refused(*words.replace("TEXT", text).split())


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
@pytest.mark.parametrize("value", [MANY, "[" * 5000 + "]" * 5000], ids=["9...9", "[...]"])
def test_a_file_of_options_that_no_parser_reads(
    refused: Run, tmp_path: Path, suffix: str, value: str
) -> None:
    file = tmp_path / f"options{suffix}"
    file.write_text(f"steps {'=' if suffix == '.toml' else ':'} {value}\n")
    assert "cannot be read as" in refused("train", "tiny-llama", "--config", str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train tiny-llama --data TEXT --layout pp2 --microbatches 1000000000",
         "1,000,000,000 microbatches in 2 stages; a step has at most 500,000"),
        ("plan MODEL --cluster 8xH100-SXM", "num_hidden_layers is 1000000000 in"),
        ("plan MODEL --serve --cluster 8xH100-SXM", "num_hidden_layers is 1000000000 in"),
        ("train MODEL --data TEXT --layout pp2", "num_hidden_layers is 1000000000 in"),
    ],
)  # fmt: skip
def test_counts_that_no_memory_holds_one_by_one(
    refused: Run, tmp_path: Path, text: str, words: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY | {"num_hidden_layers": 10**9}))
    said = refused(*words.replace("TEXT", text).replace("MODEL", str(file)).split())
    assert message in said
    assert len(said.splitlines()) <= 2, "a message, and a hint of one line"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("plan MODEL --cluster 8xH100-SXM", "max_position_embeddings", "many"),
        ("plan MODEL --cluster 8xH100-SXM", "max_position_embeddings", float("inf")),
        ("plan MODEL --cluster 8xH100-SXM", "n_positions", [64]),
        ("plan MODEL --cluster 8xH100-SXM", "intermediate_size", 2**40),
        ("train MODEL --data TEXT --layout pp2", "intermediate_size", -96),
        ("train MODEL --data TEXT --layout pp2", "intermediate_size", 10**400),
        ("train MODEL --data TEXT --layout pp2", "num_key_value_heads", -3),
        ("train MODEL --data TEXT --layout pp2", "head_dim", 1e30),
        ("train MODEL --data TEXT --layout pp2", "num_local_experts", "8"),
    ],
)
def test_dimensions_that_are_no_size(
    refused: Run, tmp_path: Path, text: str, words: str, key: str, value: object
) -> None:
    file = tmp_path / "config.json"
    config = {name: size for name, size in TINY.items() if name != "max_position_embeddings"}
    file.write_text(json.dumps(config | {key: value}))
    said = refused(*words.replace("TEXT", text).replace("MODEL", str(file)).split())
    assert f"{key} is {value!r} in the model's configuration; it must be a whole number" in said
