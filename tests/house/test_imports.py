"""What importing hocket loads, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hocket"
HEAVY = {"torch", "transformers", "numpy", "datasets", "tokenizers", "pyarrow", "safetensors"}


def loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import hocket",
        "from hocket import Layout, Schedule, Timeline, ParallelPlan, HocketError",
        "import hocket.jobs.api",
        "from hocket import train, check, generate, export, plan",
        "import hocket.launch",
        pytest.param(
            "from hocket.models import source; source.resolve_model('tiny-llama')",
            marks=pytest.mark.train,
        ),
        "import hocket.schedules.registry",
        "import hocket.serving.scheduling.scheduler",
    ],
)
def test_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def test_a_heavy_import_would_be_seen() -> None:
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["tarin"]])
def test_the_door_alone_loads_no_parser(arguments: list[str]) -> None:
    code = f"from hocket.cli.main import main\nmain({arguments!r})"
    assert not loaded_by(code) & {*HEAVY, "tyro", "rich", "argparse"}


@pytest.mark.parametrize(
    "verb", ["train", "demo", "check", "generate", "export", "plan", "schedule"]
)
def test_help_of_a_verb_loads_nothing_heavy(verb: str) -> None:
    code = (
        "from hocket.cli.main import main\n"
        f"try: main([{verb!r}, '--help'])\nexcept SystemExit as end: assert end.code == 0"
    )
    assert not loaded_by(code) & HEAVY


WITHOUT_TORCH = """\
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "tokenizers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
"""Code after which importing torch and its like fails as where it is not installed."""


def test_the_block_blocks() -> None:
    code = WITHOUT_TORCH + "try: import torch\nexcept ModuleNotFoundError: pass\nelse: 1 / 0"
    assert "torch" not in loaded_by(code)


def numpy_wing() -> list[str]:
    rooms = ("spec", "catalogue", "schedules", "cost", "simulation", "reporting", "planning")
    return [
        "hocket." + ".".join(f.relative_to(SOURCE).with_suffix("").parts)
        for room in rooms
        for f in sorted((SOURCE / room).rglob("*.py"))
    ]


def test_the_numpy_wing_imports_where_torch_is_not_installed() -> None:
    modules = numpy_wing()
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    found = loaded_by(WITHOUT_TORCH + code)
    assert len(modules) > 15
    assert "hocket" in found


def test_the_base_commands_work_where_torch_is_not_installed() -> None:
    code = (
        f"{WITHOUT_TORCH}\n"
        "from hocket.cli.main import main\n"
        "assert main(['schedule', '--layout', 'pp4', '--microbatches', '8']) == 0\n"
        "assert main(['models']) == 0\n"
        "assert main(['plan', 'llama-3-8b', '--cluster', '2x8xH100-SXM', '--global-batch', '64',"
        " '--explain']) == 0"
    )
    assert "hocket" in loaded_by(code)


POSIX = ("fcntl", "resource", "pwd", "grp", "termios", "pty")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "llama-3-8b", "--cluster", "2x8xH100-SXM", "--global-batch", "64", "--top", "1"],
        ["plan", "llama-3-8b", "--serve", "--cluster", "H100"],
        [
            "plan",
            "--links",
            "llama-3-8b",
            "--cluster",
            "8xH100",
            "--layout",
            "tp8",
            "--global-batch",
            "8",
        ],
        ["models", "--gpus"],
        ["template", "docker"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_a_plan_needs_no_posix(arguments: list[str]) -> None:
    """As on Windows, where `pip install hocket` plans and prints job files."""
    code = (
        "import os, signal, sys\n"
        f"sys.modules.update(dict.fromkeys({POSIX!r}))\n"
        "del os.sched_getaffinity, os.memfd_create, os.fork, os.getuid, os.EX_TEMPFAIL\n"
        "del signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL\n"
        "from hocket.cli.main import main\n"
        f"assert main({arguments!r}) == 0"
    )
    assert "hocket" in loaded_by(code)


def test_import_hocket_loads_little() -> None:
    """Below 0.1 s whatever the machine: by what is loaded, not by the clock. Of hocket that is its
    face alone; of the standard library what a bare interpreter has, and a few modules more."""

    def count(code: str) -> set[str]:
        script = f"{code}\nimport sys\nprint(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n"
             + script],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return set(done.stdout.split())

    added = count("import hocket") - count("pass")
    assert {name for name in added if name.startswith("hocket")} == {"hocket"}
    assert len(added) < 40, sorted(added)
