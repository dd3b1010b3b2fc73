"""Writes docs/reference/licences.md from the metadata of the installed packages.

    .venv/bin/python docs/reference/write_licences.py

A test compares the page with what this would write. Versions are left out: the page changes when a
dependency or its licence does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PAGE = Path(__file__).with_name("licences.md")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("train", "serve", "lora", "gpu", "trackers", "report")
"""Extras that install something; `fp8` is part of `gpu`, `all` is all of them."""

CUDA = re.compile(r"(nvidia|cuda)-(?!ml-py)")
"""Packages that only torch's CUDA builds need: they have one row together."""

ABSENT = {"torchao": "BSD-3-Clause", "tzdata": "Apache-2.0"}
"""Packages without requirements that `make setup` does not install; by their own licence files."""

NEWER = {"python-dateutil": ["tzdata"]}
"""What releases newer than those of `make setup` need, as a fresh installation has them."""

HEAD = """\
# Licences of the dependencies

Written by `docs/reference/write_licences.py` from the installed packages' metadata; do not edit.

hocket is Apache-2.0 and contains no code of these packages. The last column names what installs a
package: the base install, or the extras (`pip install 'hocket[train]'`). Packages that others need
are listed too.

| package | licence | installed by |
|---|---|---|
"""

FOOT = """\

torch's CUDA builds also install `nvidia-*` and `cuda-*` packages (CUDA, cuDNN, NCCL), under
NVIDIA's own licence (LicenseRef-NVIDIA-Proprietary); its CPU builds do not.
"""


def name_of(text: str) -> str:
    """The normal form of a distribution's name."""
    return re.sub(r"[-_.]+", "-", text).lower()


def licence(name: str) -> str:
    """What a package's metadata states: its SPDX expression, its classifiers, or its text."""
    if name in ABSENT:
        return ABSENT[name]
    data = metadata.metadata(name)
    if data.get("License-Expression"):
        return data["License-Expression"]
    classifiers = [c for c in data.get_all("Classifier") or () if c.startswith("License ::")]
    names = [c.rpartition(" :: ")[2] for c in classifiers if c != "License :: OSI Approved"]
    if names:
        return ", ".join(names)
    text = (data.get("License") or "").strip()
    return text.splitlines()[0] if text else "not stated"


def needed(requirements: list[str]) -> Iterator[str]:
    """The packages of requirements, and those that they need, each with its extras; on this
    machine's platform."""
    waiting = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = name_of(wanted.name)
        if name == "hocket" or CUDA.match(name):
            continue
        for extra in ("", *sorted(wanted.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            yield name
            needs = [] if name in ABSENT else metadata.requires(name) or []
            for text in (*needs, *NEWER.get(name, ())):
                other = Requirement(text)
                if other.marker is None or other.marker.evaluate({"extra": extra}):
                    waiting.append(other)


def rows() -> dict[str, list[str]]:
    """What installs each package, by its name."""
    import tomllib

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    found = {name: ["base"] for name in needed(project["dependencies"])}
    for extra in EXTRAS:
        for name in sorted(set(needed(project["optional-dependencies"][extra]))):
            by = found.setdefault(name, [])
            if "base" not in by:
                by.append(extra)
    return found


def page() -> str:
    """The whole page."""
    lines = [
        f"| {name} | {licence(name)} | {', '.join(by)} |\n" for name, by in sorted(rows().items())
    ]
    return HEAD + "".join(lines) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
