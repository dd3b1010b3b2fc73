"""Page: one or two runs as one HTML file that needs no network and runs no code but its own.

The data stand in the page as JSON that no browser executes, and the script writes them with
`textContent` alone. A content security policy names the script by its hash: whatever a name may
hold, nothing else runs and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

SCRIPTS = ("elements.js", "charts.js", "timeline.js", "mesh.js", "sections.js")


def run_html(runs: Sequence[dict[str, Any]], *, version: str, made: str, text: str) -> str:
    """The whole page.

    Args:
        runs: one or two, as `payload` makes them.
        version: of hocket.
        made: when, as a person writes it.
        text: the same in words, shown where scripts do not run.
    """
    assets = resources.files("hocket.reporting") / "assets"
    script = '"use strict";\n(() => {\n'
    script += "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script += "\n})();\n"
    style = (assets / "page.css").read_text(encoding="utf-8")
    data = json.dumps({"version": version, "made": made, "runs": list(runs)}, allow_nan=False)
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(" and ".join(run["name"] for run in runs)),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_inert(data),
        text=html.escape(text),
    )


def _inert(data: str) -> str:
    """JSON that no parser of HTML takes for a tag."""
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return data


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
