"""CONTRIBUTING's answers to a newcomer's questions name at most two modules, which exist."""

from __future__ import annotations

import ast
import re

from tests.house import figures

LINE = re.compile(r"^\| (.+?) \| (.*`.*) \|$")


def answers() -> dict[str, list[str]]:
    """Question to the dotted names in its answer."""
    text = (figures.ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Where is ...?")[1].split("\n## ")[0]
    rows = (LINE.match(line) for line in table.splitlines())
    return {row[1]: re.findall(r"`([\w.]+)`", row[2]) for row in rows if row}


def exists(name: str) -> bool:
    """Whether a dotted name below `hocket` is a module, or a definition in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        file = figures.SOURCE.joinpath(*parts[:count]).with_suffix(".py")
        if file.is_file():
            body: list[ast.stmt] = ast.parse(file.read_text()).body
            for part in parts[count:]:
                found = [n for n in body if isinstance(n, figures.Definition) and n.name == part]
                if not found:
                    return False
                body = found[0].body
            return True
    return False


def test_every_name_exists() -> None:
    found = answers()
    assert len(found) >= 10
    assert not [name for names in found.values() for name in names if not exists(name)]
    assert not exists("cost.step.no_such_function")


def test_an_answer_is_in_at_most_two_modules() -> None:
    assert all(1 <= len(names) <= 2 for names in answers().values())


def test_tests_that_the_page_of_accuracy_names_exist() -> None:
    page = (figures.ROOT / "docs/reference/accuracy.md").read_text()
    table = page.partition("## What tests hold")[2].partition("\n## ")[0]
    sources = [
        figures.ROOT / "tests" / name for name in re.findall(r"`([a-z_]+/test_\w+\.py)", table)
    ]
    text = "".join(source.read_text() for source in sources)
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", table))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in text} == set()


def test_the_modules_that_the_architecture_names_exist() -> None:
    """A module that is renamed is renamed there as well."""
    text = (figures.ROOT / "docs/architecture.md").read_text()
    serving = figures.SOURCE / "serving"
    missing = []
    for name in set(re.findall(r"`([a-z_0-9]+(?:\.[A-Za-z_0-9]+)+)`", text)):
        first = name.partition(".")[0]
        name = f"serving.{name}" if (serving / first).is_dir() else name
        folder = figures.SOURCE.joinpath(*name.split("."))
        if (figures.SOURCE / name.partition(".")[0]).is_dir() and not folder.is_dir():
            missing += [name] * (not exists(name))
    assert not missing
