"""Workflow files pass their linters: GitHub's schema, zizmor's audits, shellcheck of scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BROKEN = """
on: push
jobs:
  build:
    runs-on: ubuntu-latest
    steps:
      - uses: someone/action@main
      - run: echo ${{ github.head_ref }}
"""


def lint(name: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = BIN / name
    if not program.exists():
        pytest.skip(f"{name} is not installed (pip install 'hocket[dev]')")
    return subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
OTHERS = [
    *(
        (file, "github-issue-forms")
        for file in sorted(FORMS.glob("*.yml"))
        if file.stem != "config"
    ),
    (FORMS / "config.yml", "github-issue-config"),
    (ROOT / "CITATION.cff", "citation-file-format"),
]
"""Other files that a host of repositories reads, and their schemas."""


def of_schema(file: Path, schema: str = "github-workflows") -> subprocess.CompletedProcess[str]:
    return lint("check-jsonschema", "--builtin-schema", f"vendor.{schema}", str(file))


def audited(file: Path) -> subprocess.CompletedProcess[str]:
    config = ROOT / ".github" / "zizmor.yml"
    return lint("zizmor", "--offline", "--no-progress", "--config", str(config), str(file))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_passes_its_linters(file: Path) -> None:
    for found in (of_schema(file), audited(file)):
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(("file", "schema"), OTHERS, ids=[file.name for file, _ in OTHERS])
def test_a_file_of_the_repository_host_passes_its_schema(file: Path, schema: str) -> None:
    found = of_schema(file, schema)
    assert found.returncode == 0, found.stdout


def scripts() -> list[Any]:
    return [
        pytest.param(step["run"], id=f"{file.stem}-{job}-{number}")
        for file in WORKFLOWS
        for job, what in yaml.safe_load(file.read_text("utf-8"))["jobs"].items()
        for number, step in enumerate(what["steps"])
        if "run" in step
    ]


@pytest.mark.parametrize("script", scripts())
def test_a_script_of_a_workflow_passes_shellcheck(script: str) -> None:
    found = lint("shellcheck", "--shell", "bash", "-", stdin=script)
    assert found.returncode == 0, found.stdout


def test_the_linters_find_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "broken.yml"
    file.write_text(BROKEN.replace("ubuntu-latest", "ubuntu-latest\n    needs: 7"))
    found = of_schema(file)
    assert found.returncode != 0
    assert "$.jobs.build.needs: 7" in found.stdout
    file.write_text(BROKEN)
    found = audited(file)
    assert found.returncode != 0
    assert "unpinned-uses" in found.stdout
    assert "template-injection" in found.stdout
