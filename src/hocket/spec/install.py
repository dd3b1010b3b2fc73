"""The command that installs what an extra of hocket needs, from where this hocket was installed.

hocket is on no package index, on which another project may have its name, so the line names the
clone, the wheel or the repository that pip noted at the installation (`direct_url.json`, PEP 610).
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_line(extra: str) -> str:
    """The command that installs the extra into this environment, by the tool that made it."""
    package = _package(extra)
    for receipt, tool in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (Path(sys.prefix) / receipt).exists():
            return f"{tool} install --force {package}"
    return f"pip install {package}"


def _package(extra: str) -> str:
    """hocket with an extra, as an argument of pip in a shell."""
    url, options, commit = _noted()
    if url.startswith("file:"):
        return options + shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
    if url:
        return shlex.quote(f"hocket[{extra}] @ {url}{commit}")
    return f"'hocket[{extra}]'"


@functools.cache
def _noted() -> tuple[str, str, str]:
    """Where this hocket was installed from, options for pip, and what follows a repository's
    address; empty: from an index."""
    import importlib.metadata  # not where hocket is imported: it takes as long as all of spec

    root = Path(__file__).resolve().parents[3]
    try:
        text = importlib.metadata.distribution("hocket").read_text("direct_url.json")
        noted = json.loads(text or "{}")
        url = noted.get("url", "")
        if "vcs_info" in noted:
            return f"{noted['vcs_info']['vcs']}+{url}", "", f"@{noted['vcs_info']['commit_id']}"
        return url, "-e " if noted.get("dir_info", {}).get("editable") else "", ""
    except importlib.metadata.PackageNotFoundError:  # it runs from a clone
        return (root.as_uri(), "-e ", "") if (root / "pyproject.toml").exists() else ("", "", "")
    except (ValueError, AttributeError, KeyError, TypeError):  # not as pip writes it
        return "", "", ""
