"""Every verb: exit codes, --json, --quiet and Ctrl-C, from one table that a new verb must be in.

The errors follow from the verbs' own flags: a flag of a new verb is tried without being named here.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket import __main__ as command
from hocket.cli import spelling
from hocket.cli.main import EXIT_CODES, VERBS, main
from tests.rotation import part
from tests.support.runs import Whole, text_in

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Success:
    """A command that ends with 0.

    Attributes:
        words: without `hocket VERB`; RUN is a run folder, TEXT a file, NEW a folder to be made.
        ranks: starts processes, or reads a run. json: takes --json as well.
    """

    words: str
    ranks: bool = False
    json: bool = True


SMALL = "--seq-len 16 --global-batch 4"
SUCCESS = {
    "train": Success(
        f"tiny-llama --data TEXT {SMALL} --steps 2 --device cpu --cluster none --run NEW",
        ranks=True,
    ),
    "serve": Success("RUN --dry-run --device cpu --port 0 --metrics-port 0", ranks=True),
    "generate": Success("RUN --prompt a --max-new-tokens 2 --device cpu", ranks=True),
    "export": Success("RUN --to NEW", ranks=True),
    "template": Success("slurm tiny-llama --layout dp2 --data TEXT"),
    "plan": Success("llama-3-8b --cluster 8xH100 --global-batch 64 --top 1"),
    "rehearse": Success("tiny-llama --layout dp2 --seq-len 32", ranks=True),
    "schedule": Success("--layout pp2"),
    "models": Success("check tiny-llama"),
    "check": Success("tiny-llama --layout dp2 --seq-len 16 --steps 1 --device cpu", ranks=True),
    "chaos": Success("tiny-llama --faults 1 --kinds exception", ranks=True),
    "compare": Success("tiny-llama --strategies data --seq-len 16", ranks=True),
    "validate": Success(str(ROOT / "tests/planning/published_extract.csv")),
    "doctor": Success("--only env-limits"),
    "report": Success("RUN --format text", ranks=True, json=False),  # --json is of --history
    "probe": Success("--quick --device cpu", ranks=True),
    "config": Success("show train tiny-llama"),
    "completion": Success("bash"),
    "demo": Success("--steps 2 --run NEW --device cpu", ranks=True),
    "tour": Success("--stops threads", ranks=True),
}
EVENTS_OF_WORK = {"phase", "progress", "note"}


def test_every_verb_is_in_the_table() -> None:
    assert set(SUCCESS) == set(VERBS)


def flags_of(verb: str) -> dict[str, spelling.Flag]:
    known = spelling.flags_of(importlib.import_module(f"hocket.cli.{verb}"))
    return {flag.name: flag for flag in known.values()}


def dashed(flag: spelling.Flag) -> str:
    return spelling.spelled(flag.name)


JSON = [verb for verb in VERBS if "json" in flags_of(verb)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder, and keep nothing of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOCKET_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", start)


Captured = pytest.CaptureFixture[str]


def objects(out: str) -> list[dict[str, Any]]:
    """The documents on stdout: one, or one a line. Anything else fails."""
    try:
        found = [json.loads(out)]
    except json.JSONDecodeError:
        found = [json.loads(line) for line in out.splitlines()]
    assert all(isinstance(one, dict) for one in found)
    return found


def rejected(capsys: Captured, verb: str, *words: str, code: int = 2) -> str:
    """Run a command that must fail with `code` and one error in the form of all; its error."""
    capsys.readouterr()
    found = main([verb, *words])
    out, err = capsys.readouterr()
    typed = shlex.join([verb, *words])
    assert found == code, f"{typed}: {out}{err}"
    assert code in EXIT_CODES
    assert err.startswith("hocket: "), f"{typed}: {err}"
    assert "Traceback" not in err
    if "--json" in words:
        (one,) = objects(out)
        assert one["event"] == "error"
        assert one["error"]["exit_code"] == code
        assert one["error"]["message"] in err
    else:
        assert out == "", typed
    return err


# --- success --------------------------------------------------------------------------------------


def succeeds(capfd: pytest.CaptureFixture[str], verb: str, words: list[str]) -> None:
    as_json = verb in JSON and SUCCESS[verb].json
    capfd.readouterr()
    code = main([verb, *words, "--quiet", *(["--json"] if as_json else [])])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    warnings = "hocket: warning: "
    assert all(line.startswith(warnings) for line in err.splitlines()), "--quiet leaves warnings"
    assert out
    if as_json:
        assert not EVENTS_OF_WORK & {one.get("event") for one in objects(out)}


@pytest.mark.parametrize("verb", [verb for verb, one in SUCCESS.items() if not one.ranks])
def test_success(verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = SUCCESS[verb].words.replace("TEXT", str(text_in(tmp_path)))
    succeeds(capfd, verb, shlex.split(words))


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("verb", part([verb for verb, one in SUCCESS.items() if one.ranks], 4))
def test_success_with_ranks(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], whole: Whole,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if verb == "probe":  # it keeps what it finds
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole(tmp_path, "whole", "dp1")
    text = str(text_in(tmp_path))
    words = SUCCESS[verb].words.replace("TEXT", text).replace("NEW", "new")
    succeeds(capfd, verb, shlex.split(words.replace("RUN", "whole")))


# --- errors ---------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each verb as a person types it, and with --json where it has that."""
    for verb in VERBS:
        yield verb, []
        if verb in JSON:
            yield verb, ["--json"]


WITH_JSON = pytest.mark.parametrize(("verb", "as_json"), list(commands()))


@WITH_JSON
@pytest.mark.usefixtures("no_processes")
def test_wrong_input(verb: str, as_json: list[str], capsys: Captured) -> None:
    """Every flag without a value or with a wrong one, and words that no flag takes."""
    if verb == "config":  # its words are another verb's
        assert "hint: " in rejected(capsys, verb, "show", "nothing")
        return
    tried = [["--no-such-flag"], ["--no-such-flag", "--nor-this=3", "--nor-that"], list("abcdefg")]
    if verb in ("report", "models"):
        tried[-1] = ["nowhere/none", *tried[-1]]
    for flag in flags_of(verb).values():
        if flag.positional or flag.switch:
            continue
        tried.append([dashed(flag)])
        if flag.number is not None and not flag.many:
            tried.append([dashed(flag), "many"])
        if flag.choices:
            tried.append([dashed(flag), "zzzz"])
    for words in tried:
        assert "hint: " in rejected(capsys, verb, *as_json, *words), words


@WITH_JSON
@pytest.mark.usefixtures("no_processes")
def test_missing_files(verb: str, as_json: list[str], capsys: Captured, tmp_path: Path) -> None:
    """The file of options, the model or run, and every flag that names a file or folder."""
    if verb == "config":
        return
    rejected(capsys, verb, *as_json, "--config", "nowhere.toml")
    known = flags_of(verb)
    if {"model", "run", "runs", "table"} & {n for n, flag in known.items() if flag.positional}:
        given = [] if verb == "template" else [*as_json, "nowhere/none/at/all"]
        if given:
            rejected(capsys, verb, *given, *needed(verb, known, tmp_path))
    paths = ("FILE", "DIR", "PATH...")
    for flag in known.values():
        if flag.metavar in paths and not flag.positional and flag.name != "config":
            words = shlex.split(SUCCESS[verb].words.replace("TEXT", str(text_in(tmp_path))))
            if "RUN" in words or verb == "template":  # it names what another machine has
                continue
            rejected(capsys, verb, *as_json, *words, dashed(flag), "/dev/null/none")


def needed(verb: str, known: dict[str, spelling.Flag], folder: Path) -> list[str]:
    """The flags of the command that succeeds, without its first word."""
    words = SUCCESS[verb].words.replace("TEXT", str(text_in(folder))).replace("NEW", "new")
    return shlex.split(words)[1:]


@WITH_JSON
def test_an_interrupt(
    verb: str, as_json: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(verb, monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    assert rejected(capsys, verb, *as_json, *first(verb), code=130) == "hocket: interrupted\n"


@WITH_JSON
def test_an_error_of_hockets_own(
    verb: str, as_json: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; the traceback is in the file that it names."""

    def broken() -> None:
        raise KeyError("a key")

    stopped(verb, monkeypatch, broken)
    words = [verb, *as_json, *first(verb)]
    monkeypatch.setattr(sys, "argv", ["hocket", *words])
    code = command.main()
    out, err = capsys.readouterr()
    assert code == 70
    assert "Traceback" not in err
    assert "KeyError: 'a key'" in err.splitlines()[0]
    text = Path(err.rpartition(" report it with ")[2].strip()).read_text()
    assert "Traceback" in text
    assert shlex.join(words) in text
    if as_json:
        (one,) = objects(out)
        assert one["error"]["exit_code"] == 70


def first(verb: str) -> list[str]:
    """Words without which a verb reads no flags."""
    return ["x"] if verb == "config" else []


def stopped(verb: str, monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """Within the test, the verb reads its flags and then calls `what`."""
    module = importlib.import_module(f"hocket.cli.{verb}")
    monkeypatch.setattr(module, "parse_flags", lambda *_: what())


@pytest.mark.parametrize("verb", ["plan", "models"])
def test_a_reader_that_has_gone(verb: str) -> None:
    """Also where it is an error that is printed."""
    for words in (SUCCESS[verb].words, "--no-such-flag"):
        program = shlex.join([sys.executable, "-m", "hocket", verb, *shlex.split(words), "--json"])
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {program} | true"],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode in (0, 2, 141)
        assert "Traceback" not in done.stderr
