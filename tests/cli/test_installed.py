"""A verb whose extra is not installed names the line that installs it, before anything is done."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hocket.cli.installed import EXTRAS, NEEDS, TRANSFORMERS
from hocket.cli.main import VERBS, main
from hocket.spec.install import install_line

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """\
import sys

class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES: return None
        return self.finder.find_spec(name, path, target)

NAMES = set(sys.argv[1].split(","))
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from hocket.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""
"""Runs a verb as where the named packages are not installed: their specifications are not found."""


def run_without(names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, names, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("verb", sorted(NEEDS))
def test_the_missing_extra_is_named(verb: str) -> None:
    done = run_without("torch,transformers", verb)
    assert done.returncode == 2, done.stderr
    wanted = f"hint: {install_line(NEEDS[verb])}"
    assert wanted in done.stderr
    assert "torch, transformers" in done.stderr


def test_a_server_needs_more_than_training() -> None:
    done = run_without("uvicorn", "serve", "tiny-llama")
    assert f"hint: {install_line('serve')}" in done.stderr


def test_help_is_printed_all_the_same() -> None:
    assert "--global-batch" in run_without("torch,transformers", "train", "--help").stdout


@pytest.mark.parametrize("version", ["5.22.4", "5.24.0", "6.1.dev0"])
def test_a_transformers_that_is_not_supported_is_rejected(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert main(["rehearse", "tiny-llama"]) == 2
    error = capsys.readouterr().err
    assert f"transformers {version} is installed" in error
    assert "hint: pip install 'transformers>=5.23,<5.24'" in error


def test_the_range_of_transformers_is_that_of_the_package_and_holds_the_tested_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, beyond = TRANSFORMERS
    for extra in ("train", "serve"):
        assert f"transformers>={oldest},<{beyond}" in project["optional-dependencies"][extra]
    tested = (ROOT / "constraints.txt").read_text().partition("transformers==")[2].split()[0]
    assert tested.startswith(f"{oldest}.")


def test_the_table_names_verbs_and_what_their_extras_install() -> None:
    assert set(NEEDS) < set(VERBS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRAS.items():
        text = " ".join(project["optional-dependencies"][extra])
        assert all(module.replace("_", "-") in text for module in modules), extra
