"""The entry point: verbs, exit codes, --quiet, hints as commands, completion, options files."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest

from hocket.cli import completion, config, spelling
from hocket.cli import main as entry
from hocket.cli.flags import parse_flags
from hocket.cli.main import EXIT_CODES, VERBS, main, usage
from hocket.spec.errors import OptionError
from hocket.spec.run import TrainOptions, Workload

ROOT = Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", ["-V", "--version", "version"])
def test_the_version(capsys: pytest.CaptureFixture[str], words: str) -> None:
    from hocket import __version__

    assert run(capsys, words) == (0, f"hocket {__version__}\n", "")


def test_help_of_a_verb_by_both_orders(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help", "models") == run(capsys, "models", "--help")
    assert all(verb in usage() for verb in VERBS)


@pytest.mark.parametrize(
    ("wrong", "right"), [("trian", "hocket train x"), ("versin", "hocket version x")]
)
def test_an_unknown_verb_names_the_nearest(
    capsys: pytest.CaptureFixture[str], wrong: str, right: str
) -> None:
    code, _, err = run(capsys, wrong, "x")
    assert (code, err) == (2, f"hocket: unknown verb '{wrong}'\n  hint: {right}\n")


def test_a_far_verb_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "environment")[2].endswith("hint: hocket --help\n")


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in page
    from hocket.cli.internal_error import INTERNAL
    from hocket.spec.errors import STOPPED, HocketError, RankFailure

    ours = {HocketError.exit_code, RankFailure.exit_code, STOPPED, INTERNAL}
    assert {0, 1, 2, 130, 141, *ours} == set(EXIT_CODES)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), (OptionError("x"), 2), (None, 0)]
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | type[BaseException] | None,
    code: int,
) -> None:
    def verb(arguments: list[str]) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr("hocket.cli.models.main", verb)
    assert run(capsys, "models")[0] == code


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = 'set -o pipefail; hocket() { python3 -m hocket "$@"; }; hocket models | head -0'
    import sys

    command = command.replace("python3", shlex.quote(sys.executable))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("schedule --layout pp2:schedule=gpip", "hocket schedule --layout pp2:schedule=gpipe"),
        ("schedule --layout pp2 --schedule x", "hocket schedule --help schedule"),
        ("schedule --layout zro2", "hocket schedule --help layout"),
        ("schedule --layout pp2:offload=x", "hocket schedule --help layout"),
        ("completion x", "hocket completion --help"),
        ("chaos tiny-llama --kinds x", "hocket chaos --help kinds"),
        ("plan nothing --cluster 8xH100", None),
        ("plan tiny-llama --cluster 0xH100", "hocket plan tiny-llama --cluster 8xH100-SXM-80"),
        ("plan m --ttft-ms 9", "hocket plan m --ttft-ms 9 --serve"),
    ],
)
def test_a_hint_is_a_command_also_where_no_name_is_near(
    capsys: pytest.CaptureFixture[str], typed: str, hint: str | None
) -> None:
    code, _, err = run(capsys, *typed.split())
    assert code == 2
    if hint is None:
        assert "the catalogue has" not in err  # nothing there is like it
    else:
        assert err.endswith(f"  hint: {hint}\n")


@pytest.mark.parametrize(
    ("typed", "hint", "mended"),
    [
        (["train", "m", "--steps", "3"], "--steps 4", "hocket train m --steps 4"),
        (["train", "m", "--steps=3", "--json"], "--steps 4", "hocket train m --json --steps 4"),
        (["plan", "m"], "--cluster 8xH100 --top 2", "hocket plan m --cluster 8xH100 --top 2"),
        (["train", "--data", "a", "b", "--lr", "1"], "--data c", "hocket train --lr 1 --data c"),
        (
            ["train", "m", "--pp", "2", "--cp", "2", "--microbatches", "1", "--zero", "1"],
            "--layout dp2:microbatches=4",
            "hocket train m --zero 1 --layout dp2:microbatches=4",
        ),
        (
            ["serve", "m", "--max-num-seqs", "-1"],
            "--max-num-seqs 1",
            "hocket serve m --max-num-seqs 1",
        ),
        (["train"], "--steps 3, or more data", None),
        (["train"], "--layout pp2 or --layout dp2", None),
        (["train"], "--resume to continue it", None),
        (
            ["train", "m", "--gradient-accumulation-steps", "2", "--global-batch", "7"],
            "--microbatches 1",
            "hocket train m --global-batch 7 --microbatches 1",
        ),
        (["train", "m", "--steps", "3", "--lr", "1"], "leave --steps out", "hocket train m --lr 1"),
        (
            ["train", "m", "--steps", "3", "--max-steps=4"],
            "leave --max-steps out",
            "hocket train m --steps 3",
        ),
        (["train", "m"], "leave --steps out", None),
        (["train", "m"], "--data a:0.3 b:1", "hocket train m --data a:0.3 b:1"),
        (
            ["train", "m", "--layout", "pp2:pipeline_split=3-4,zero=1"],
            "--pipeline-split even",
            "hocket train m --layout pp2:zero=1 --pipeline-split even",
        ),
    ],
)
def test_a_hint_of_flags_is_a_whole_command(
    typed: list[str], hint: str, mended: str | None
) -> None:
    assert spelling.mended(typed, hint) == mended


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("--steps 4", "hocket train m --steps 4"),
        ("--steps 4, or more data", "hocket train m --steps 4\n        or more data"),
        ("--resume to continue it", "hocket train m --steps 3 --resume\n        to continue it"),
        (
            "--layout pp2 or --layout dp2",
            "hocket train m --steps 3 --layout pp2\n        or --layout dp2",
        ),
        ("--resume; it is free", "hocket train m --steps 3 --resume\n        it is free"),
        ("more data", "more data"),
    ],
)
def test_words_after_a_hint_of_flags_are_a_line_of_their_own(hint: str, shown: str) -> None:
    assert spelling.pasted(["train", "m", "--steps", "3"], hint) == shown


def test_errors_are_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "train", "tiny-llama", "--data", "README.md", "--lr=-1", "--json")
    (line,) = map(json.loads, out.splitlines())
    assert (line["schema"], line["event"]) == (1, "error")
    error = line["error"]
    assert error["exit_code"] == code == 2
    assert error["message"] in err
    assert error["hint"] in err


_DRY = [
    *("train", "tiny-llama", "--data", "README.md", "--seq-len", "32"),
    *("--global-batch", "4", "--dry-run"),
]


@pytest.mark.usefixtures("warm_workers")
def test_what_is_pasted_from_a_hint_fails_no_longer_for_the_same_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for typed in (
        ["plan", "--cluster", "8xH100", "--global-batch", "8"],
        ["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "8", "--top", "0"],
        ["plan", "llama-3-8b", "--global-batch", "8"],
        ["plan", "llama-3-8b", "--links", "--layout", "dp8"],
        [*_DRY, "--global-batch", "3", "--gradient-accumulation-steps", "2"],
        [*_DRY, "--epochs", "1", "--steps", "5"],
        [*_DRY, "--eval-data", "CONTRIBUTING.md", "--eval-fraction", "0.2"],
    ):
        code, _, err = run(capsys, *typed)
        assert code == 2
        hint = err.partition("hint: ")[2].strip()
        assert run(capsys, *shlex.split(hint)[1:])[0] == 0, hint


@pytest.mark.parametrize(
    ("typed", "message", "pasted"),
    [
        ("plan tiny-llama --links --cluster 2xH100", "which layout?", "--layout dp4.tp2"),
        (
            "plan tiny-llama --links --cluster 2xH100 --layout tp2 --top 3",
            "--top is not used with --links",
            "--layout tp2",
        ),
        ("plan tiny-llama --links --serve --cluster H100", "--links is about training", "--serve"),
        ("report --last 3", "--last is about --history", "hocket report --history --last"),
        ("report runs/x --history", "runs/x is of a run's page", "hocket report --history"),
        ("report --history --format png", "--format is of a run's page", "hocket report --history"),
        ("report --history --last -1", "it is a number of runs", "--last 10"),
    ],
)
def test_flags_of_another_form_are_rejected(
    typed: str, message: str, pasted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *typed.split())
    assert code == 2
    assert message in err
    assert pasted in err.partition("hint: ")[2]


def test_quiet_prints_results_only(capsys: pytest.CaptureFixture[str]) -> None:
    from hocket.cli.progress import note, progress, silenced

    note("shown")
    assert capsys.readouterr().err == "shown\n"
    with silenced(True), progress() as on_event:
        note("hidden")
        on_event({"event": "phase", "name": "hidden"})
        assert on_event.heard
    assert capsys.readouterr() == ("", "")
    code, out, _ = run(capsys, "models")
    assert run(capsys, "models", "--quiet") == run(capsys, "models", "-q")
    assert out.startswith(run(capsys, "models", "-q")[1])
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--steps", "abc"], "--steps is 'abc'; it must be a whole number", "train --help steps"),
        (["--lr=x"], "--lr is 'x'; it must be a number", "train --help lr"),
        (["--steps"], "--steps has no value", "train m --steps INT"),
        (["--dtype", "bfloat17"], "unknown dtype 'bfloat17'", "train m --dtype bf16"),
        (["--steps", "--lr", "1"], "--steps has no value", "train m --lr 1 --steps INT"),
    ],
)
def test_a_value_of_another_type_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, hint: str
) -> None:
    code, out, err = run(capsys, "train", "m", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"hocket: {message}")
    assert err.endswith(f"{hint}\n")


def test_number_formats_by_pytorchs_names_and_a_gpu_as_a_device() -> None:
    known = spelling.flags_of(importlib.import_module("hocket.cli.train"))
    found = spelling.checked_arguments(
        "train", ["--dtype", "bfloat16", "--grad-dtype=float32", "--device", "gpu"], known
    )
    assert found == ["--dtype", "bf16", "--grad-dtype=fp32", "--device", "cuda"]


def test_resume_names_a_run(tmp_path: Path) -> None:
    from hocket.cli.train import read_train_flags

    run = tmp_path / "a"
    run.mkdir()
    (run / "run.json").write_text("{}")
    a = str(run)
    for words in (
        ["--resume", a],
        [a, "--resume"],
        ["--run", a, "--resume"],
        ["-o", a, "--resume"],
    ):
        flags, given = read_train_flags([*words, "--steps", "9"])
        assert (given["run"], given["resume"], given["steps"]) == (a, True, 9)
        assert not flags.model
    assert "run" not in read_train_flags(["tiny-llama", "--resume"])[1], "a model is not a run"
    assert read_train_flags(["m", "--resume", "--run", "r"])[0].model == "m"


# --- next commands --------------------------------------------------------------------------------


def next_commands(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("next: ")]
    return [shlex.split(line)[2:] for line in lines]


@pytest.mark.parametrize(
    "arguments",
    [
        ["models"],
        ["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "64", "--top", "1"],
        ["plan", "llama-3-8b", "--serve", "--cluster", "H100"],
    ],
)
def test_next_commands_are_read_by_their_verbs(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    found = next_commands(run(capsys, *arguments)[1])
    assert 1 <= len(found) <= 2
    for verb, *rest in found:
        module = importlib.import_module(f"hocket.cli.{verb}")
        known = spelling.flags_of(module)
        rest = spelling.checked_arguments(verb, spelling.current(verb, rest, known), known)
        kind = spelling.flags_class(module)
        parse_flags(kind, verb, rest, kind())
        if verb == "plan":
            assert run(capsys, verb, *rest)[0] == 0
    assert not next_commands(run(capsys, *arguments, "--quiet")[1])


def test_emit_hocket_is_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama-3-8b", "--serve", "--cluster", "H100"]
    (words,) = next_commands(run(capsys, *arguments)[1])
    assert run(capsys, *arguments, "--emit", "hocket")[1] == shlex.join(["hocket", *words]) + "\n"


# --- completion -----------------------------------------------------------------------------------


def completed(script: str, *words: str) -> set[str]:
    listed = " ".join(map(shlex.quote, words))
    text = (
        f"{script}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _hocket; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_verbs_flags_and_values() -> None:
    script = completion.bash(completion.every_verb())
    assert completed(script, "hocket", "") >= set(VERBS)
    assert completed(script, "hocket", "train", "--eval-f") == {"--eval-fraction"}
    assert completed(script, "hocket", "train", "--grad-dtype", "") == {"fp32", "bf16"}
    assert completed(script, "hocket", "completion", "") == {"bash", "zsh", "fish"}
    for verb in VERBS:
        known = {spelling.spelled(name) for name in completion.every_verb()[verb]}
        assert completed(script, "hocket", verb, "--") >= known


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_flag(shell: str, tmp_path: Path) -> None:
    script = completion.SCRIPTS[shell](completion.every_verb())
    for verb, flags in completion.every_verb().items():
        for name in flags:
            dashed = name.replace("_", "-")
            assert f"'--{dashed}[" in script or f"from {verb}' -l {dashed} " in script
    assert shlex.split(script, comments=shell == "zsh"), "quotes are closed"
    if program := shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(script)
        subprocess.run([program, "-n", str(file)], check=True)


# --- options files --------------------------------------------------------------------------------


def test_config_show_is_a_file_that_gives_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(
        capsys, "config", "show", "train", "tiny-llama", "--lr", "1e-4", "--layout", "dp2",
        "--set", "training.eval_fraction=0.5", "--compile",
    )  # fmt: skip
    assert code == 0
    found = tomllib.loads(out)
    assert found["lr"] == 1e-4
    assert found["eval_fraction"] == 0.5
    assert found["compile"] is True
    for kind in (TrainOptions, Workload):
        for name, value in vars(kind()).items():
            assert value is None or name in found or name in config.NOT_OPTIONS
    file = tmp_path / "run.toml"
    file.write_text(out)
    assert run(capsys, "config", "show", "train", "--config", str(file))[1] == out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'lr = 1e-4\nlayout = "dp2"\n[evaluation]\neval-every = 7\n'),
        ("run.yaml", "lr: 1e-4\nlayout: dp2\nevaluation:\n  eval_every: 7\n"),
    ],
)
def test_toml_and_yaml_with_tables(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert config.read_config(str(file)) == {"lr": 1e-4, "layout": "dp2", "eval_every": 7}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.toml", "steps: 3", "cannot be read as TOML"),
        ("run.yaml", "- 3", "is a list"),
        ("run.yaml", "a: [", "cannot be read as YAML"),
        ("run.toml", "[a.b]\nsteps = 3", "a table in a table"),
        ("run.toml", "steps = 3\n[a]\nsteps = 4", "gives steps twice"),
        ("none.toml", None, "there is no file"),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        config.read_config(str(file))
    assert caught.value.hint


def test_a_file_for_any_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "llama-3-8b"\ncluster = "8xH100"\nglobal_batch = 64\ntop = 2\n')
    written = ["llama-3-8b", "--cluster", "8xH100", "--global-batch", "64", "--top", "3"]
    same = run(capsys, "plan", *written)
    assert run(capsys, "plan", "--config", str(file), "--top", "3") == same
    assert run(capsys, "plan", "--config", str(file), "--set", "a.top=3") == same
    file.write_text("global_bach = 64\n")
    _, _, err = run(capsys, "plan", "m", "--config", str(file))
    assert "unknown option 'global_bach'" in err
    assert rf"hint: sed -i 's/\bglobal_bach\b/global_batch/' {file}" in err


def test_set_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "m", "--set", "top")
    assert code == 2
    assert "--set top has no value" in err


def test_an_interrupt_while_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hocket import __main__ as command

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    module = types.ModuleType("hocket.cli.main")
    module.__getattr__ = interrupted  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "hocket.cli.main", module)
    assert command.main() == 130
    assert capsys.readouterr().err == "hocket: interrupted\n"


def test_an_interrupt_inside_exec_is_an_exit_code_as_well() -> None:
    """CPython remembers one that passed an exec(), as a dataclass has, and would end by SIGINT."""
    code = (
        "from hocket.cli import main as m\n"
        "def verb(arguments): exec('raise KeyboardInterrupt')\n"
        "m._verb = verb\n"
        "raise SystemExit(m.main([]))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (130, "hocket: interrupted\n")


def test_a_warning_of_hocket_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    place = str(Path(entry.__file__).parents[1] / "jobs" / "generate.py")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *where: others.append(str(message))
        )
        entry._show_renamed()
        warnings.warn_explicit("no kernels in C", UserWarning, place, 70)
        warnings.warn_explicit("of another package", UserWarning, "/elsewhere.py", 1)
    assert capsys.readouterr().err == "hocket: warning: no kernels in C\n"
    assert others == ["of another package"]
