"""The wheel: what it contains, what its index page shows, and that it works where torch is not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_string
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

import hocket
from tests.house.test_import_wall import OUTSIDE

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].replace("_", "-").lower()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(r for e in extras if e != "dev" for r in extras[e])]
    return {name_of(requirement) for requirement in listed}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build takes what it finds in build/, stale files too."""
    pytest.importorskip("setuptools", "77")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "packaging", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, copy / name, ignore=ignored)
        else:
            shutil.copy(here, copy)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, timeout=90
    )
    (found,) = (copy / "dist").iterdir()
    return found


@pytest.fixture(scope="session")
def page(wheel: Path) -> Message:
    """The metadata, as an index shows it."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [n for n in opened.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_string(opened.read(name).decode())


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    wanted = {name.removeprefix("src/") for name in listed if name and (ROOT / name).exists()}
    if not wanted:
        pytest.skip("not a git checkout")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert not wanted - names
    assert "hocket/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert wheel.name == f"hocket-{hocket.__version__}-py3-none-any.whl"


def test_the_metadata_is_complete(page: Message) -> None:
    assert page["Version"] == hocket.__version__
    assert page["License-Expression"] == "Apache-2.0"
    assert page["Author"]
    assert page["Keywords"]
    assert page["Requires-Python"] == ">=3.11"
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(
        page.get_all("Classifier") or ()
    )
    extras = {"train", "serve", "lora", "fp8", "gpu", "trackers", "report", "all"}
    assert extras <= set(page.get_all("Provides-Extra") or ())


def test_the_description_survives_on_an_index_page(page: Message) -> None:
    text = page.get_payload()
    assert isinstance(text, str)
    assert page["Description-Content-Type"] == "text/markdown"
    assert "pip install" in text
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    assert not [link for link in links if not link.startswith("https://")]


def test_every_package_that_is_imported_is_declared() -> None:
    modules = set().union(*OUTSIDE.values())
    distributions = metadata.packages_distributions()
    same = {"pydantic_core": "pydantic"}  # which pins its version of it
    unknown = {
        module
        for module in modules
        if not {n.lower().replace("_", "-") for n in distributions.get(module, [module])}
        & declared()
        and same.get(module) not in declared()
        and {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}.get(module) not in declared()
    }
    assert not unknown


def test_the_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    written = [
        name
        for name in ("CITATION.cff", "packaging/description.md", "SECURITY.md")
        if hocket.__version__ in (ROOT / name).read_text()
    ]
    assert not written


@pytest.mark.train
def test_the_page_of_licences_is_that_of_the_installed_packages() -> None:
    for name in ("peft", "tensorboard", "matplotlib", "starlette", "packaging"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if metadata.version("torch").partition("+")[0] != pinned()["torch"].partition("+")[0]:
        pytest.skip("packages have other versions than those of constraints.txt")
    folder = ROOT / "docs" / "reference"
    done = subprocess.run(
        [sys.executable, "-c", "import write_licences; print(write_licences.page(), end='')"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    wanted = (folder / "licences.md").read_text()
    assert done.stdout == wanted, "run: .venv/bin/python docs/reference/write_licences.py"
    rows = {line.split("|")[1].strip() for line in wanted.splitlines() if line.startswith("|")}
    assert declared() - {"hocket"} <= rows
    assert "not stated" not in wanted


def test_every_package_on_the_page_of_licences_is_pinned() -> None:
    """A version that nothing pins changes the page on another day."""
    page = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert rows - {"package"} <= set(pinned())


def pinned() -> dict[str, str]:
    """Versions of constraints.txt by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    rows = (line.partition(";")[0].partition("==") for line in lines if "==" in line)
    return {name_of(name): version.strip() for name, _, version in rows}


def environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of an empty environment with the wheel and the base install's packages, as
    they are installed here."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    waiting = [name_of(requirement) for requirement in PROJECT["dependencies"]]
    seen = set(waiting)
    while waiting:
        found = metadata.distribution(waiting.pop())
        for file in {f.parts[0] for f in found.files or () if f.parts[0] not in ("..", "bin")}:
            target, link = Path(str(found.locate_file(file))), packages / file
            if target.exists() and not link.exists():
                link.symlink_to(target)
        for requirement in found.requires or ():
            name = name_of(requirement)
            if "extra" not in requirement and name not in seen:
                seen.add(name)
                if any(d.lower() == name for d in _installed()):
                    waiting.append(name)
    return folder / "bin" / "python"


def _installed() -> set[str]:
    return {str(found.name).replace("_", "-") for found in metadata.distributions()}


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Without torch: `plan` runs, `train` names the extra. `packaging/try_wheel` does it by pip."""
    python = environment(tmp_path / "empty", wheel)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-I", "-m", "hocket", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert run("--version").stdout == f"hocket {hocket.__version__}\n"
    done = run("plan", "llama-3-8b", "--cluster", "8xH100-SXM", "--global-batch", "8")
    assert done.returncode == 0, done.stderr
    assert "tp" in done.stdout
    done = run("train", "tiny-llama", "--data", "x.txt")
    assert done.returncode == 2
    assert "hint: pip install 'hocket[train]'" in done.stderr


def test_the_wheel_is_typed_and_its_trial_is_a_script() -> None:
    assert (ROOT / "src" / "hocket" / "py.typed").exists()
    script = ROOT / "packaging" / "try_wheel"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
