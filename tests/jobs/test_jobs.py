"""The jobs end to end on a few ranks: train, resume, export, generate, check, as commands."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

import hocket
import hocket.launch
from hocket.cli.events import EVENTS
from hocket.cli.main import main
from hocket.spec.errors import OptionError, WeightsError
from hocket.spec.run import RunFolder
from tests.ranks import RankPool
from tests.support.warm import Warm

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm"), pytest.mark.timeout(200)]

SMALL = ["--seq-len", "32", "--global-batch", "8", "--eval-batches", "1"]
LINE = "One melody is dealt note by note to several voices, one sounding while another rests.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("jobs")
    (found / "text.txt").write_text(LINE * 200)
    return found


@pytest.fixture(scope="module")
def printed(folder: Path, ranks: RankPool) -> str:
    """What `train --json` prints, of the run that most tests here use."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(Warm, "pool", ranks)
        patch.setattr(hocket.launch, "Launcher", Warm)
        code = main(
            ["train", "tiny-llama", "--data", str(folder / "text.txt"), "--layout", "dp2.tp2",
             *SMALL, "--steps", "6", "--save-every", "3", "--lr", "3e-3", "--run",
             str(folder / "run"), "--json"]
        )  # fmt: skip
    assert code == 0, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def run(folder: Path, printed: str) -> Path:
    return folder / "run"


def rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_train_prints_events_as_json_and_nothing_else(printed: str, run: Path) -> None:
    lines = [json.loads(line) for line in printed.splitlines()]
    assert all(line["schema"] == 1 and line["event"] in EVENTS for line in lines)
    kinds = {line["event"] for line in lines}
    assert {"phase", "progress", "step", "eval", "saved", "done"} < kinds
    steps = [line for line in lines if line["event"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    result = lines[-1]
    assert (result["event"], result["steps"], result["run"]) == ("result", 6, str(run))
    assert result["loss"] == steps[-1]["loss"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3, "the loss falls"
    kept = rows(RunFolder(run).metrics_file)
    assert [row["loss"] for row in kept] == [row["loss"] for row in steps]
    assert "held_out_loss" in kept[-1]


def test_the_run_folder_is_complete(run: Path) -> None:
    folder = RunFolder(run)
    spec = folder.load()
    assert str(spec.layout) == "dp2.tp2:microbatches=1"
    assert spec.config["vocab_size"] == 257, "the vocabulary of the byte tokenizer"
    files = (folder.schedule_file, folder.timeline_file, folder.communication_file)
    for file in (*files, folder.background_load_file):
        assert file.stat().st_size > 0
    assert (folder.model / "model.safetensors").exists()


def test_theory_equals_the_recording(run: Path, ranks) -> None:  # type: ignore[no-untyped-def]
    from hocket.jobs.demo import compare_communication

    found = compare_communication(ranks.launcher, RunFolder(run))
    assert {row["axis"] for row in found} >= {"tp", "dp", "model", "world"}
    assert all(row["equal"] for row in found), found


def test_a_run_is_not_written_over(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    text = str(folder / "text.txt")
    command = ["train", "tiny-llama", "--data", text, "--run", str(run)]
    assert main([*command, "--seed", "7"]) == 2
    assert "seed is 7; the run in" in capsys.readouterr().err
    assert main(["train", "gpt2", *command[2:]]) == 2
    assert "already holds a run of the model tiny-llama, not of gpt2" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_resume_gives_the_same_losses(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    half = folder / "half"
    shutil.copytree(run, half)
    shutil.rmtree(half / "checkpoints" / "step-000006")
    (half / "checkpoints" / "latest").write_text("step-000003\n")
    assert main(["train", "--run", str(half), "--resume", "--json", "--quiet"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not {"phase", "progress", "note"} & {line["event"] for line in lines}
    printed = [line for line in lines if line["event"] == "step"]
    assert [row["step"] for row in printed] == [4, 5, 6]
    whole = rows(RunFolder(run).metrics_file)
    assert [row["loss"] for row in printed] == [row["loss"] for row in whole[3:]], "bit for bit"
    assert [row["step"] for row in rows(RunFolder(half).metrics_file)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layout", "dp3"], "global batch of 8 does not divide over dp 3"),
        (["--layout", "tp2"], "has taken all of its 6 steps"),
        (["--seq-len", "64"], "seq_len is 64"),
        (["--lr", "0.1"], "lr is 0.1"),
        (["--steps", "5"], "steps is 5"),
        (["--steps", "8", "--memory-per-rank", "0.1MB"], "needs 10.1 MB of 100 KB"),
    ],
)
def test_a_refused_resume_leaves_the_run_as_it_was(
    run: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "run.json").read_text()
    assert main(["train", "--run", str(run), "--resume", *flags]) == 2
    assert said in capsys.readouterr().err
    assert (run / "run.json").read_text() == before


def test_export_is_loaded_by_transformers(run: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = folder / "model"
    assert hocket.export(run, model) == model
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert loaded.config.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode("a note")) == "a note"


def test_an_export_replaces_no_other_model_unless_asked(run: Path, tmp_path: Path) -> None:
    """A mistyped --to once destroyed the model that was there."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    (theirs / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(OptionError, match="an export replaces what is there") as caught:
        hocket.export(run, theirs)
    assert str(tmp_path / "theirs-2") in str(caught.value.hint)
    assert (theirs / "model.safetensors").read_bytes() == b"precious"
    assert main(["export", str(run), "--to", str(theirs), "--overwrite"]) == 0
    assert (theirs / "model.safetensors").read_bytes() != b"precious"


@pytest.mark.parametrize("layout", ["dp1", "tp2.pp2"])
def test_generate_continues_as_transformers_does(run: Path, layout: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    streamed: list[str] = []
    (found,) = hocket.generate(
        run, "One melody", layout=layout, max_new_tokens=12, on_text=lambda _, t: streamed.append(t)
    )
    assert "".join(streamed) == found.text
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = torch.tensor([tokenizer.encode("One melody")])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert list(found.tokens) == expected.tolist()


def test_generate_refuses_replicas_and_noise(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", str(run), "--prompt", "a", "--layout", "dp2.tp2"]) == 2
    assert "--layout tp2" in capsys.readouterr().err
    assert main(["generate", "tiny-llama", "--prompt", "a"]) == 2
    assert "no weights" in capsys.readouterr().err
    assert main(["generate", str(run)]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_check_says_equal(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["check", "tiny-llama", "--layout", "tp2", "--seq-len", "16", "--global-batch", "2",
         "--steps", "1"]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0, said
    assert "equal: tp2" in said
    assert "model.layers.0.self_attn.q_proj.weight" in said


def test_check_exits_1_where_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hocket.spec import check

    report = check.CheckReport(
        model="m", layout="tp2", world_size=2, learning_rate=1e-3,
        steps=(check.StepRow(step=1, reference_loss=1.0, loss=1.1),),
        rows=(
            check.ParameterRow(
                step=1, name="w", shape=(2,), gradient=1.0, largest_gradient=1.0,
                gradient_limit=1e-4, value=0.0, value_limit=1e-4,
            ),
        ),
    )  # fmt: skip
    monkeypatch.setattr("hocket.jobs.check.check_layout", lambda *_, **__: report)
    assert main(["check", "tiny-llama", "--layout", "tp2"]) == 1
    said = capsys.readouterr().out
    assert "NOT equal" in said
    assert "ABOVE TOLERANCE" in said


def test_a_job_that_ends_before_its_first_step_leaves_its_name_free(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that do not fit are found by the ranks; the run can be started again."""
    from safetensors.numpy import save_file

    model = folder / "odd"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    import numpy as np

    save_file({"lm_head.wait": np.zeros((300, 32), np.float32)}, model / "model.safetensors")
    run = folder / "never"
    code = main(
        ["train", str(model), "--data", str(folder / "text.txt"), *SMALL, "--run", str(run)]
    )
    assert code == 2
    said = capsys.readouterr().err
    assert "holds weights and no tokenizer" in said
    code = main(
        ["train", str(model), "--data", str(folder / "text.txt"), *SMALL, "--run", str(run),
         "--tokenizer", "bytes"]
    )  # fmt: skip
    assert code == 2
    said = capsys.readouterr().err
    assert "lm_head.wait" in said
    assert "Traceback" not in said
    assert not (run / "run.json").exists()


def test_a_configuration_file_and_flags_that_win(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    Path("run.toml").write_text(
        'model = "tiny-gpt2"\ndata = ["text.txt"]\nlayout = "pp2:schedule=gpipe"\n'
        "seq-len = 32\nglobal_batch = 4\nsteps = 50\nheld_out = 0\n"
    )
    flags = ["--steps", "1", "--schedule", "sequential", "--run", "from-file", "--json"]
    assert main(["train", "--config", "run.toml", *flags]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines].count("step") == 1
    spec = RunFolder("from-file").load()
    assert spec.model == "tiny-gpt2"
    assert (spec.layout.pp, spec.layout.schedule) == (2, "sequential")
    assert spec.workload.seq_len == 32


def test_the_library_takes_the_flags_names(folder: Path) -> None:
    heard: list[str] = []
    summary = hocket.train(
        "tiny-llama",
        data=folder / "text.txt",
        layout="dp2",
        data_parallel="threads",
        seq_len=16,
        global_batch=4,
        steps=1,
        run=folder / "library",
        on_event=lambda event: heard.append(event["event"]),
    )
    assert summary.steps == 1
    assert summary.loss is not None
    assert summary.run == folder / "library"
    assert {"phase", "step", "done"} <= set(heard)
    with pytest.raises(hocket.HocketError, match="did you mean") as caught:
        hocket.train("tiny-llama", data=folder / "text.txt", global_bach=4)
    assert "global_batch" in (caught.value.hint or "")


def test_weights_that_do_not_fit_are_listed_before_ranks_start(run: Path, folder: Path) -> None:
    model = folder / "misfit"
    shutil.copytree(run / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    events: list[dict[str, object]] = []
    with pytest.raises(WeightsError, match=r"mlp\.up_proj\.weight is \[.* in the file"):
        hocket.train(
            model, data=[folder / "text.txt"], layout="dp2", seq_len=32, global_batch=8, steps=1,
            run=folder / "misfitting", on_event=events.append,
        )  # fmt: skip
    phases = [event["name"] for event in events if event["event"] == "phase"]
    assert phases
    assert "starting ranks" not in phases
