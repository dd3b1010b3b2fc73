"""Commands that a verb prints after its result: of the very job that it was asked for."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from hocket.cli.main import VERBS, main
from hocket.cli.next import MOST, option_words

OPTIONS = ["--seq-len", "64", "--grad-dtype", "bf16", "--lora-rank", "4"]


def test_options_as_they_are_typed() -> None:
    options = {
        "lora_rank": 4,
        "optimizer": "adamw_8bit",
        "trust_remote_code": True,
        "attention": None,
    }
    words = ["--lora-rank", "4", "--optimizer", "adamw_8bit", "--trust-remote-code"]
    assert option_words({**options, "json": False}) == words


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_workers")
def test_a_rehearsal_offers_to_train_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "tiny-llama", "--layout", "dp2", *OPTIONS]) == 0
    words = capfd.readouterr().out.splitlines()[-1].split()
    assert words[0] == "next:"
    assert words[2:] == ["train", "tiny-llama", "--data", "DATA", "--layout", "dp2", *OPTIONS]


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
def test_a_check_offers_to_train_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--lora-rank", "4", "--optimizer", "adamw_8bit"]
    assert main(["check", "tiny-llama", "--layout", "dp2", *asked, "--steps", "1"]) == 0
    words = capfd.readouterr().out.splitlines()[-1].split()
    assert words[2:6] == ["train", "tiny-llama", "--data", "DATA"]
    assert words[8:] == asked


def most_commands(source: str) -> int:
    """Commands after a verb: the most that one path through its module's `main` prints, counted
    where they are given to `next.show`; `summary` shows its two itself."""
    tree = ast.parse(source)
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

    def of_expression(node: ast.AST, above: tuple[str, ...]) -> int:
        total = 0
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in ("next_steps", "print_summary"):
                total += MOST
            elif name == "show" and any(isinstance(a, ast.List) for a in call.args):
                total += len(call.args)
            elif name in functions and name not in above:
                total += of_block(functions[name].body, (*above, name))
        return total

    def of_block(block: list[ast.stmt], above: tuple[str, ...]) -> int:
        total, ended = 0, 0
        for statement in block:
            match statement:
                case ast.If():
                    total += of_expression(statement.test, above)
                    ways = [total + of_block(b, above) for b in (statement.body, statement.orelse)]
                    ends = isinstance(statement.body[-1], ast.Return | ast.Raise)
                    ended = max(ended, ways[0] if ends else 0)
                    total = ways[1] if ends else max(ways)
                case ast.With() | ast.For() | ast.While() | ast.Try():
                    total += of_block(statement.body, above)
                case ast.FunctionDef():
                    pass
                case _:
                    total += of_expression(statement, above)
        return max(total, ended)

    return of_block(functions["main"].body, ("main",))


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_prints_more_than_two_commands(verb: str) -> None:
    module = importlib.import_module(f"hocket.cli.{verb}")
    assert module.__file__ is not None
    assert most_commands(Path(module.__file__).read_text("utf-8")) <= MOST


def test_commands_are_counted_on_each_path() -> None:
    source = (
        "def main():\n"
        "    if early:\n        show(['a'])\n        return 0\n"
        "    if one:\n        show(['b'])\n    else:\n        show(['c'], ['d'])\n"
        "    last()\n"
        "def last():\n    show(['e'])\n"
    )
    assert most_commands(source) == 3
    assert most_commands(source.replace("    last()\n", "")) == 2


def test_commands_are_printed_by_one_function() -> None:
    """So that --quiet leaves them out, and the count above sees all."""
    for verb in VERBS:
        module = importlib.import_module(f"hocket.cli.{verb}")
        assert module.__file__ is not None
        text = Path(module.__file__).read_text("utf-8")
        assert "next: " not in text, verb
        assert ": hocket report" not in text, verb
