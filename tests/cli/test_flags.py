"""Flags that take several values, at any position, and the form of their help."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from hocket.cli.compare import Compare
from hocket.cli.examples import EXAMPLES, lines
from hocket.cli.flags import _lists, parse_flags
from hocket.cli.help import attributes, flag
from hocket.cli.main import VERBS, main
from hocket.cli.plan import PlanFlags
from hocket.cli.train import Train
from hocket.jobs.request import ATTENTION, BACKENDS, DATA_FORMATS, DEVICES, PACKINGS
from hocket.spec.capabilities import GRADIENTS, TRAINED
from hocket.spec.run import TrainOptions, Workload


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--pin", "tp=2", "pp=2"],
        ["m", "--pin", "tp=2", "--pin", "pp=2"],
        ["m", "--pin=tp=2", "--pin=pp=2"],
        ["m", "--pin", "tp=2", "--seq-len", "64", "--pin", "pp=2"],
        ["m", "--pin", "tp=2", "--seq-len=64", "--pin=pp=2", "--top", "3"],
    ],
)
def test_a_list_given_twice_is_taken_together(arguments: list[str]) -> None:
    found = parse_flags(PlanFlags, "plan", arguments, PlanFlags())
    assert found.pin == ("tp=2", "pp=2")
    assert found.model == "m"


def test_groups_in_a_group_are_looked_through() -> None:
    assert "--data" in _lists(Train)
    assert "--layout" not in _lists(Train)
    assert _lists(Compare)
    found = parse_flags(
        Train, "train", ["m", "--data", "a", "--layout", "dp2", "--data", "b"], Train()
    )
    assert "('a', 'b')" in repr(found)


def test_of_one_value_the_last_counts() -> None:
    assert parse_flags(PlanFlags, "plan", ["m", "--top", "3", "--top", "4"], PlanFlags()).top == 4


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every verb, as docs/reference/cli.md has it; tests/house holds that page."""
    text = (Path(__file__).resolve().parents[2] / "docs/reference/cli.md").read_text("utf-8")
    return dict(re.findall(r"^## hocket (\w+)\n\n```\n(.*?)```", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("verb", VERBS)
def test_help_states_each_default_once(verb: str, helps: dict[str, str]) -> None:
    text = re.sub(r"\s+", " ", helps[verb])
    for wrong in ("default: None", "default: False", "default: )", "default: '')", "{None}"):
        assert wrong not in text
    assert not re.search(r"\bNone:", text)
    assert not re.search(r"\(default: [^)]*\)\.? \(default:", text)
    assert "One of" not in text


def test_choices_in_help_are_those_that_are_accepted() -> None:
    known = {
        "device": DEVICES,
        "backend": BACKENDS,
        "attention": ATTENTION,
        "data_format": DATA_FORMATS,
        "packing": PACKINGS,
        "grad_dtype": GRADIENTS,
    }
    texts = attributes(TrainOptions)
    for name, choices in known.items():
        assert set(flag(texts[name], None)[1]) == set(choices), name
    assert set(flag(attributes(Workload)["dtype"], None)[1]) == {"auto", *TRAINED}


def test_the_help_of_a_flag() -> None:
    assert flag("sampling seed.", 0) == ("Sampling seed (default: 0)", ())
    assert flag("stages (default: 1).", None) == ("Stages (default: 1)", ())
    assert flag("stages (default: 1).", 2) == ("Stages (default: 2)", ())
    assert flag("tp2 for latency.", None) == ("tp2 for latency", ())
    assert flag("device. One of: cpu, cuda.", "cpu") == ("Device (default: cpu)", ("cpu", "cuda"))
    assert flag("print JSON.", False) == ("Print JSON", ())


def test_an_axis_of_a_verb_that_takes_a_layout_names_the_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "m", "--tensor-parallel-size", "4"]) == 2
    assert "--layout tp4" in capsys.readouterr().err


def test_numbers_of_yaml_in_tables_too(tmp_path: Path) -> None:
    from hocket.cli import config

    file = tmp_path / "run.yaml"
    file.write_text("training:\n  lr: 1e-4\nmin_lr: 1e-5\n")
    assert config.read_config(str(file)) == {"lr": 1e-4, "min_lr": 1e-5}


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_commands_that_the_verb_reads(verb: str, helps: dict[str, str]) -> None:
    from hocket.cli import spelling

    assert helps[verb].rstrip().endswith(lines(verb).rstrip())
    assert 1 <= len(EXAMPLES[verb]) <= 2
    if verb in ("config", "completion"):  # their arguments are words, and a verb's own
        return
    module = importlib.import_module(f"hocket.cli.{verb}")
    known, kind = spelling.flags_of(module), spelling.flags_class(module)
    for words in EXAMPLES[verb]:
        given = shlex.split(words)
        read = spelling.checked_arguments(verb, spelling.current(verb, given, known), known)
        assert read == given, "by present names"
        parse_flags(kind, verb, read, kind())


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("gpus", "hocket models --gpus"),
        ("train tiny-lama --steps 3", "hint: hocket train tiny-llama --steps 3"),
        ("plan m --objective tme", "hocket plan m --objective time"),
        (
            "schedule --layout pp4 --schedule interleaved",
            "hint: hocket schedule --layout pp4 --schedule interleaved --virtual-stages 2\n",
        ),
        ("probe --out no/such/x.toml", "hint: mkdir -p no/such\n"),
        ("plan llama-3-8b --cluster H100x8", "hint: hocket plan llama-3-8b --cluster 8xH100\n"),
        ("rehearse tiny-llama --gpu H1000", "hint: hocket rehearse tiny-llama --gpu H100"),
        ("template kubernet m", "hint: hocket template kubernetes m"),
        ("train m --lr abc", "hint: hocket train --help lr"),
        ("chat m", "hocket generate MODEL --chat"),
        ("trian m --steps 3", "hocket train m --steps 3"),
        ("config train m --lr 1e-4", "hocket config show train m --lr 1e-4"),
        ("train m --recompute", "hocket train m --recompute full"),
        ("plan m --config a/run.yaml", "> a/run.toml\n        then --config a/run.toml"),
        ("serve m --enable-prefix-caching", "the prefix cache is on"),
        (
            "train tiny-llama --data pyproject.toml --run no/such --resume",
            "hint: hocket train tiny-llama --data pyproject.toml --run no/such\n",
        ),
    ],
)
def test_what_other_tools_call_it_leads_to_the_command_here(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert hint in capsys.readouterr().err
