"""What works on this machine by verb, and what the rest needs: the head of `hocket doctor`."""

from __future__ import annotations

import importlib.util
import os
import shutil

from hocket.cli.installed import EXTRAS, NEEDS
from hocket.cli.main import VERBS
from hocket.spec.install import install_line


def capability_lines() -> list[str]:
    """One line of verbs that work here, and one for each thing that others need."""
    missing = {
        extra: [name for name in names if importlib.util.find_spec(name) is None]
        for extra, names in EXTRAS.items()
    }
    compilers = [os.environ.get("CXX", "").partition(" ")[0], "c++", "g++", "clang++"]
    rehearses = any(map(shutil.which, filter(None, compilers)))
    works = [
        verb
        for verb in VERBS
        if not missing.get(NEEDS.get(verb, ""), []) and (rehearses or verb != "rehearse")
    ]
    found = [f"works here: {', '.join(works)}"]
    for extra, names in missing.items():
        verbs = [verb for verb in VERBS if NEEDS.get(verb) == extra]
        if names:
            found.append(f"needs {install_line(extra)}: {', '.join(verbs)}")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        found.append("needs a C compiler (apt install gcc): fast serving on CPU")
    if not rehearses:
        found.append("needs a C++ compiler (apt install g++): rehearse, --dry-run, --compile")
    for module, extra, what in OPTIONAL:
        if importlib.util.find_spec(module) is None:
            found.append(f"needs {install_line(extra)}: {what}")
    if not _has_gpus():
        found.append("needs a CUDA GPU: bf16 and fp8 at speed, NCCL, hocket doctor --gpu")
    return found


OPTIONAL = (
    ("matplotlib", "report", "hocket report --format png"),
    ("peft", "lora", "--lora-rank"),
)
"""Module, extra, and what needs them, of parts of a verb."""


def _has_gpus() -> bool:
    """Whether the driver shows a device."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")
