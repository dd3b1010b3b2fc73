"""`hocket plan` from the command line: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hocket
from hocket.catalogue import models
from hocket.cli.main import main
from hocket.planning.search import simulate_all
from hocket.planning.stacks import ALIASES, STACKS
from hocket.spec import renamed
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.prediction_layers import COUNTS

ASKED = ["llama-3-8b", "--cluster", "2x8xH100-SXM", "--seq-len", "2048", "--global-batch", "32"]


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["plan", *ASKED, *flags]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--top", "4")
    rows = [line for line in said.splitlines() if re.match(r"(dp|pp|tp|cp)\d", line)]
    assert len(rows) == 4
    assert "legal layouts" in said
    command = said.splitlines()[-2].split()
    assert command[0] == "next:"
    assert command[2:7] == ["train", "llama-3-8b", "--data", "DATA", "--layout"]
    assert str(Layout.parse(command[7])) == rows[0].split()[0]


def test_the_command_is_one_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from hocket.jobs.request import request

    words = plan(capsys).splitlines()[-2].split()[1:]
    flags = {f[2:].replace("-", "_"): v for f, v in zip(words[3::2], words[4::2], strict=True)}
    sizes = {name: int(flags[name]) for name in ("seq_len", "global_batch")}
    found = request({"model": words[2], **flags, **sizes})
    assert found.layout == Layout.parse(flags["layout"])
    assert (found.workload.seq_len, found.workload.dtype) == (2048, "bf16")


@pytest.mark.parametrize(
    "flags",
    [
        ["--grad-dtype", "bf16"],
        ["--optimizer", "adamw_8bit"],
        ["--dtype", "fp32"],
        ["--dtype", "fp8"],
    ],
)
def test_both_commands_are_of_what_was_asked(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    train, rehearse = plan(capsys, "--top", "1", *flags).splitlines()[-2:]
    assert shlex.join(flags) in train
    assert "rehearse" in rehearse
    assert shlex.join(flags) in rehearse


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan(capsys, "--json", "--all", "--top", "2"))
    assert len(data["layouts"]) == 2
    best = data["layouts"][0]
    assert best["step_seconds"]["low"] < best["step_seconds"]["high"]
    assert {"mfu", "memory_high", "bubble", "exposed", "runs_here", "unsupported"} <= set(best)


def test_the_library_answers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan(capsys, "--json"))
    found = hocket.plan("llama-3-8b", cluster="2x8xH100-SXM", seq_len=2048, global_batch=32)
    assert data.pop("schema") == 1
    assert json.loads(json.dumps(renamed.with_old_keys(found.to_json()))) == data


def test_explanations_follow_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--explain")
    assert " takes " in said
    assert "step time" in said
    assert re.search(r"NVLink (matters|does not matter) here: with PCIe instead", said)


def test_one_layout(capsys: pytest.CaptureFixture[str]) -> None:
    said = plan(capsys, "--layout", "dp16")
    assert "It does not fit" in said
    assert "hocket train" not in said


def test_a_sequence_beyond_the_models_positions_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--cluster", "8xH100", "--global-batch", "16", "--seq-len"]
    assert main(["plan", "gpt2", *asked, "2048"]) == 0
    assert "configured for 1024 positions" in capsys.readouterr().out
    assert main(["plan", "gpt2", *asked, "1024"]) == 0
    assert "positions" not in capsys.readouterr().out


def test_layers_of_multi_token_prediction_are_not_planned_and_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The configuration may be that of the language model of a multimodal one."""
    config = models.config("tiny-llama")
    given = {key: {**config, key: 1} for key in COUNTS}
    outside = {"model_type": "glm4v_moe", "text_config": given[COUNTS[0]]}
    plans = []
    for name, values in {"without": config, **given, "inside": outside}.items():
        file = tmp_path / name / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(values))
        assert main(["plan", str(file.parent), "--cluster", "1x8xH100-SXM", "--seq-len", "64"]) == 0
        plans.append(capsys.readouterr().out)
    assert "multi-token prediction" not in plans[0]
    for plan in plans[1:]:
        assert "without the layer for multi-token prediction" in plan


def test_pins(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan(capsys, "--pin", "tp=2", "pp=4", "--json"))
    layouts = [Layout.parse(found["layout"]) for found in data["layouts"]]
    assert {(one.pp, one.tp) for one in layouts} == {(4, 2)}


def test_emit(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tensor-model-parallel-size" in plan(capsys, "--emit", "megatron")


def test_json_holds_what_is_emitted(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan(capsys, "--emit", "megatron", "--json"))
    assert data["emitted"] == plan(capsys, "--emit", "megatron")


def test_a_closed_form_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--layout", "pp8:microbatches=16", "--cluster", "8xH100"]
    assert "~" not in plan(capsys, *asked)
    monkeypatch.setattr(simulate_all, "__kwdefaults__", {"most": 10})
    said = plan(capsys, *asked)
    assert "pp8:microbatches=16  ~" in said
    assert "~: estimated by closed forms" in said


def test_the_library_asks_for_what_it_needs() -> None:
    with pytest.raises(OptionError, match="which GPUs") as caught:
        hocket.plan("llama-3-8b", seq_len=2048, global_batch=32)  # type: ignore[call-overload]
    assert caught.value.hint == 'cluster="8xH100"'
    with pytest.raises(OptionError, match="unknown option 'layot'") as caught:
        hocket.plan("llama-3-8b", cluster="8xH100", global_batch=64, layot="dp8")
    assert caught.value.hint == "did you mean 'layout'?"


def test_the_library_has_the_defaults_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "64", "--json"]) == 0
    )
    said = json.loads(capsys.readouterr().out)
    found = hocket.plan("llama-3-8b", cluster="8xH100", global_batch=64, dtype="bf16")
    assert str(found.best.layout) == said["layouts"][0]["layout"]
    assert found.seq_len == said["seq_len"]


@pytest.mark.parametrize(
    ("cluster", "more", "batch"),
    [
        ("8xH100", ("--layout", "dp8"), 64),
        ("2xH100", ("--layout", "tp2"), 32),
        ("64x8xH100", ("--layout", "dp64.tp8"), 1024),
        ("8xH100", ("--seq-len", "131072", "--layout", "cp8"), 32),
        ("8xH100", ("--layout", "pp8:microbatches=12"), 72),
        ("8xH100", ("--pin", "dp=8", "microbatch=3"), 72),
    ],
)
def test_a_global_batch_that_is_not_given_is_chosen_and_named(
    cluster: str, more: tuple[str, ...], batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama-3-8b", "--cluster", cluster, "--top", "1", *more]) == 0
    said = capsys.readouterr().out
    assert f"global batch {batch:,}\n" in said
    assert f"Global batch: {batch:,} sequences, " in said
    assert "--global-batch N sets it" in said
    if "next: " in said:
        assert f"--global-batch {batch}" in said


def test_a_tool_names_its_stack(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--cluster", "8xH100", "--top", "1", "--stack"]
    titan, fsdp = plan(capsys, *asked, "torchtitan"), plan(capsys, *asked, "fsdp")
    assert titan == fsdp
    assert "only layouts that torchtitan 0.2.2 can run" in titan
    assert set(ALIASES.values()) <= set(STACKS)
    assert not set(ALIASES) & set(STACKS)


def test_a_tiny_model_is_not_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-llama", "--cluster", "2xA100-40", "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "0 (0-0)" not in said
    assert "sequences of 1,024" in said  # its positions: what `train` takes, and a probed machine


def test_a_machine_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from hocket.catalogue.hardware import cluster, to_toml

    file = tmp_path / "mine.toml"
    file.write_text(to_toml(cluster("2x8xH100-SXM")))
    assert main(["plan", "llama-3-8b", "--cluster", str(file), *ASKED[3:]]) == 0
    assert "dp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["llama-3-9b", *ASKED[1:]], "the catalogue has 'llama-3-8b', another model"),
        (
            ["llama-3-8b", "--cluster", "8xH10O", "--global-batch", "8"],
            "hint: hocket plan llama-3-8b --cluster 8xH100-SXM-80 --global-batch 8",
        ),
        (["llama-3-8b", "--cluster", "8xH10"], "the nearest are H100-SXM-80, H20-SXM-96, A10-24 ("),
        (["llama-3-8b", "--cluster", "8xXYZ", "--serve"], "hint: hocket models --gpus lists all"),
        (["llama-3-8b", "8xH100"], "hint: hocket plan llama-3-8b --cluster 8xH100\n"),
        (["llama-3-8b", "--global-batch", "8"], "which GPUs?"),
        (["--cluster", "8xH100"], "which model?"),
        ([*ASKED, "--objective", "speed"], "unknown objective 'speed'"),
        ([*ASKED, "--pin", "tpp=4"], "--pin tp=4"),
        ([*ASKED, "--pin", "tp=3"], "is legal on"),
        (["mixtral-8x7b", *ASKED[1:], "--pin", "recompute=mlp"], "has a feed-forward module (mlp)"),
        (["bloom-176b", *ASKED[1:], "--pin", "recompute=selective"], "its attention is code of"),
        (["gpt-j-6b", *ASKED[1:], "--layout", "dp8:recompute=core_attn"], "by themselves: its"),
        (["opt-6.7b", *ASKED[1:], "--layout", "dp8:recompute=mlp"], "--layout dp8:recompute=full"),
        ([*ASKED, "--layout", "tp3.dp2"], "heads do not divide over tp 3"),
        ([*ASKED, "--layout", "dp2", "--pin", "tp=2"], "one of the two"),
        ([*ASKED, "--emit", "megatorn"], "--emit megatron"),
        ([*ASKED, "--dtype", "bf17"], "unknown dtype 'bf17'"),
        ([*ASKED, "--stack", "megatrom"], "unknown stack"),
        ([*ASKED, "--seq-len", "0"], "seq_len is 0"),
        ([*ASKED, "--top", "0"], "top is 0"),
        (["llama-3-70b", "--cluster", "4xH100", "--global-batch", "8"], "the smallest that"),
        (["LLAMA-3-8B", *ASKED[1:]], "hocket plan llama-3-8b "),
        (["meta-llama/Llama-3-8B", *ASKED[1:]], "hf download meta-llama/Llama-3-8B"),
        (["/no/such/folder", *ASKED[1:]], "there is no directory /no/such/folder"),
        (["llama-3-8b", "--cluster", "H100,A100", "--global-batch", "8"], "one at a time"),
        (["llama-3-8b", "--cluster", "99999999x8xH100", "--global-batch", "8"], "are planned"),
        ([*ASKED, "--global-batch", "99999999999999999999"], "at most 1,000,000,000"),
        ([*ASKED, "--pin", "ep=2"], "has no experts"),
        ([*ASKED, "--layout", "pp8:schedule=zb-v,virtual_stages=1"], "two stages on a rank"),
        ([*ASKED, "--layout", "pp8:schedule=interleaved"], "several stages on a rank"),
        ([*ASKED, "--layout", "pp8:schedule=zero-bubble,virtual_stages=2"], "one stage on a rank"),
    ],
)  # fmt: skip
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["plan", *flags]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert said in found.err
    assert "Traceback" not in found.err


@pytest.mark.timeout(300)
def test_405b_on_16384_gpus_without_torch() -> None:
    """Half a million layouts; the work is bounded, so that it takes seconds."""
    code = (
        "from hocket.cli.main import main\n"
        "import sys\n"
        "assert main(['plan', 'llama-3.1-405b', '--cluster', '2048x8xH100-SXM', '--seq-len',"
        " '8192', '--global-batch', '2048', '--all']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    considered = int(re.search(r"([\d,]+) legal layouts", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    assert considered > 100_000


@pytest.mark.torch
def test_a_directorys_model_reads_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from hocket.catalogue import models

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(models.config("tiny-llama")))
    asked = ["--cluster", "8xA100-80", "--seq-len", "64", "--global-batch", "16", "--json"]
    assert main(["plan", str(folder), *asked]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["plan", "tiny-llama", *asked]) == 0
    known = json.loads(capsys.readouterr().out)
    assert own["model"] == str(folder)  # so that the command it prints can be pasted
    assert own["layouts"] == known["layouts"]
    assert main(["plan", str(folder), *asked[:-1], "--seq-len", "65536"]) == 0
    said = capsys.readouterr().out
    assert f"hocket train {folder} --data DATA --layout" in said
    assert "configured for" in said
    long = ["--prompt-len", "65536", "--cluster", "H100"]
    assert main(["plan", str(folder), "--serve", *long]) == 2
    assert "is made for" in capsys.readouterr().err


def test_a_quantized_checkpoint_is_planned_as_it_is_run_and_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 64,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    asked = ["plan", str(tmp_path), "--cluster", "8xH100", "--top", "1"]
    assert main([*asked, "--seq-len", "64", "--global-batch", "8"]) == 0
    assert "stored by gptq in 4 bits, 2 MB" in capsys.readouterr().out


def test_a_page_says_whose_step_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of hocket itself, no GPU run of which was measured; of another stack not."""
    asked = ["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "64", "--top", "1"]
    for stack, said in (([], True), (["--stack", "megatron-core"], False)):
        assert main([*asked, *stack, "--html", str(tmp_path / "page.html")]) == 0
        assert ("no run of hocket" in (tmp_path / "page.html").read_text()) is said
        assert main([*asked, *stack]) == 0
        assert ("no run of hocket" in capsys.readouterr().out) is said
