"""The import wall: each room imports what the drawing lets it, and nothing upward."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import figures

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hocket"

MAY_IMPORT: dict[str, set[str]] = {
    "spec": set(),
    "catalogue": {"spec"},
    "schedules": {"spec"},
    "cost": {"spec"},
    "simulation": {"spec"},
    "reporting": {"spec"},
    "planning": {"spec", "catalogue", "schedules", "cost", "simulation"},
    "models": {"spec", "catalogue"},
    "runtime": {"spec"},
    "launch": {"spec"},
    "probing": {"spec", "runtime"},
    "training": {"spec", "models", "runtime"},
    "serving": {"spec", "models", "runtime"},
    "rehearsal": {
        "spec", "simulation", "schedules", "models", "runtime", "training", "serving",
    },
    "ranks": {
        "spec", "schedules", "cost", "models", "runtime", "launch", "training", "serving",
    },
    "jobs": {
        "spec", "catalogue", "schedules", "cost", "simulation", "reporting", "planning",
        "models", "runtime", "launch", "probing", "training", "serving", "rehearsal", "ranks",
    },
    "doctor": {
        "spec", "catalogue", "schedules", "cost", "reporting", "planning", "models", "runtime",
        "launch", "probing", "training", "serving", "jobs", "simulation", "rehearsal",
        "ranks",
    },
    "cli": {"spec", "jobs", "doctor"},
}  # fmt: skip
"""Rooms of ours that each room may import. `models` reads the catalogue's configurations."""

OUTSIDE: dict[str, set[str]] = {
    "spec": set(),
    "catalogue": set(),
    "schedules": set(),
    "cost": {"numpy"},
    "simulation": {"numpy"},
    "reporting": {"numpy", "rich", "matplotlib"},
    "planning": {"numpy", "yaml"},
    "models": {
        "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "jinja2", "peft",
        "tqdm",  # whose bars huggingface_hub asks for
    },
    "runtime": {"torch", "numpy", "torchao", "triton", "fsspec", "bitsandbytes"},
    "launch": {"torch"},
    "probing": {"torch", "numpy", "pynvml"},
    "training": {
        "torch", "numpy", "tokenizers", "transformers", "datasets", "pyarrow", "tensorboard",
        "wandb", "mlflow", "bitsandbytes",
    },
    "serving": {
        "torch", "numpy", "transformers", "tokenizers",
        "starlette", "uvicorn", "httptools", "pydantic", "pydantic_core", "prometheus_client",
    },
    "rehearsal": {"torch", "transformers", "triton"},
    "ranks": {"torch"},
    "jobs": set(),
    "doctor": {"torch", "numpy", "pynvml"},
    "cli": {"tyro", "rich", "yaml"},
}  # fmt: skip
"""Packages from outside that a room may import, anywhere."""


def rooms() -> list[str]:
    return sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__")


def files(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


@functools.cache
def imports(file: Path, text: str | None = None) -> tuple[tuple[str, bool, int], ...]:
    """(module, whether it is imported when the file is, line) of every import at run time."""
    tree = figures.parsed(file) if text is None else ast.parse(text)
    package = ["hocket", *file.relative_to(SOURCE).parent.parts]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_import, node.lineno
        elif isinstance(node, ast.ImportFrom):
            stem = node.module or ""
            if node.level:
                base = package[: len(package) - node.level + 1]
                stem = ".".join([*base, *([stem] if stem else [])])
            yield stem, at_import, node.lineno
            if stem in ("hocket", *(f"hocket.{r}" for r in MAY_IMPORT)):
                for alias in node.names:
                    yield f"{stem}.{alias.name}", at_import, node.lineno
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from walk(child, at_import)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_import and not inside)

    return tuple(walk(tree, True))


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "hocket" and len(parts) > 1 else None


def test_the_drawing_names_every_room() -> None:
    assert set(rooms()) == set(MAY_IMPORT)


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    wrong = []
    for file in files(room):
        for module, _, line in imports(file):
            other = room_of(module)
            if other in MAY_IMPORT and other != room and other not in MAY_IMPORT[room]:
                wrong.append(f"{file.relative_to(SOURCE)}:{line} imports {module}")
    assert not wrong, wrong


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_its_outside_packages(room: str) -> None:
    wrong = []
    for file in files(room):
        for module, _, line in imports(file):
            top = module.split(".")[0]
            if top == "hocket" or top in sys.stdlib_module_names:
                continue
            if top not in OUTSIDE[room]:
                wrong.append(f"{file.relative_to(SOURCE)}:{line} imports {module}")
    assert not wrong, wrong


def test_jobs_import_other_rooms_only_inside_functions() -> None:
    """They are the parent, which never imports torch: what a rank does is in `ranks`."""
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file in files("jobs")
        for module, at_import, line in imports(file)
        if at_import and room_of(module) not in (None, "spec", "jobs")
    ]
    assert not wrong, wrong


def test_checks_import_torch_and_what_needs_it_only_inside_functions() -> None:
    """The table of checks is read, and a machine without torch is reported on, without torch."""
    without = (None, "spec", "doctor", "launch", "probing")
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file in files("doctor")
        if file.name != "paged.py"  # the serving engine's own words, imported by its checks
        for module, at_import, line in imports(file)
        if at_import and (room_of(module) not in without or module.split(".")[0] == "torch")
    ]
    assert not wrong, wrong


def test_launch_imports_torch_only_inside_functions() -> None:
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file in files("launch")
        for module, at_import, line in imports(file)
        if at_import and module.split(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, wrong


def test_the_verbs_import_jobs_only_when_called() -> None:
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file in files("cli")
        for module, at_import, line in imports(file)
        if at_import and (room_of(module) not in (None, "spec", "cli") or module == "rich")
    ]
    assert not wrong, wrong


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        f"{file.relative_to(SOURCE)}:{line}"
        for room in rooms()
        if room != "cli"
        for file in files(room)
        for module, _, line in imports(file)
        if room_of(module) == "cli"
    ]
    assert not wrong, wrong


def test_no_circle_among_modules_at_import() -> None:
    graph: dict[str, set[str]] = {}
    names = {
        "hocket." + ".".join(f.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for room in rooms()
        for f in files(room)
    }
    for room in rooms():
        for file in files(room):
            parts = file.relative_to(SOURCE).with_suffix("").parts
            name = "hocket." + ".".join(parts).removesuffix(".__init__")
            # A module's own packages are loaded before it, whatever it imports.
            graph[name] = {
                m
                for m, top, _ in imports(file)
                if top and m in names and not f"{name}.".startswith(f"{m}.")
            }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for other in graph.get(name, ()):
            visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) >= len(graph) > 20


def test_no_circle_among_rooms() -> None:
    for one, other in itertools.combinations(MAY_IMPORT, 2):
        assert not (other in MAY_IMPORT[one] and one in MAY_IMPORT[other])


def test_the_walk_sees_an_import_inside_a_function() -> None:
    """The proof that the tests above can fail."""
    file = SOURCE / "spec" / "imagined.py"
    tree = "import os\ndef f():\n    from hocket.cli import main\n    import torch.nn\n"
    seen = [(module, at_import) for module, at_import, _ in imports(file, tree)]
    assert seen == [
        ("os", True),
        ("hocket.cli", False),
        ("hocket.cli.main", False),
        ("torch.nn", False),
    ]


def test_scheduling_imports_no_package_and_only_words() -> None:
    words = ("hocket.serving.request", "hocket.serving.scheduling", "hocket.spec")
    files_of_it = [SOURCE / "serving" / "request.py", *files("serving/scheduling")]
    wrong = [
        f"{file.relative_to(SOURCE)}:{line} imports {module}"
        for file in files_of_it
        for module, _, line in imports(file)
        if module.partition(".")[0] not in sys.stdlib_module_names and not module.startswith(words)
    ]
    assert len(files_of_it) > 8
    assert not wrong, wrong
