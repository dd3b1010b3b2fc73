"""Page: one or two runs as one HTML file that needs no network and runs no code but its own.

The data stand in the page as JSON that no browser executes, and the script writes them with
`textContent` alone.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from hocket.reporting.html_page import asset, html_page

SCRIPTS = ("elements.js", "charts.js", "timeline.js", "mesh.js", "sections.js")


def run_html(runs: Sequence[dict[str, Any]], *, version: str, made: str, text: str) -> str:
    """The whole page.

    Args:
        runs: one or two, as `payload` makes them.
        version: of hocket.
        made: when, as a person writes it.
        text: the same in words, shown where scripts do not run.
    """
    script = '"use strict";\n(() => {\n' + "\n".join(map(asset, SCRIPTS)) + "\n})();\n"
    data = json.dumps({"version": version, "made": made, "runs": list(runs)}, allow_nan=False)
    title = html.escape(" and ".join(run["name"] for run in runs))
    return html_page(
        f"{title}: hocket report",
        f'<main id="report"></main>\n<noscript><pre>{html.escape(text)}</pre></noscript>\n'
        f'<script type="application/json" id="data">{_inert(data)}</script>',
        style=asset("page.css"),
        script=script,
    )


def _inert(data: str) -> str:
    """JSON that no parser of HTML takes for a tag."""
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return data
