"""HtmlPage: the frame of every page: one file that needs no network and runs no code but its own.

A content security policy names the page's style and script by their hashes: whatever a name in it
may hold, nothing else runs and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources


def asset(*names: str) -> str:
    """The text of files of `assets`, one after the other."""
    folder = resources.files("hocket.reporting") / "assets"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def html_page(title: str, body: str, *, style: str, script: str = "") -> str:
    """The whole page. `title` and `body` are HTML, in which names are escaped."""
    allowed = f"style-src 'sha256-{_hash(style)}'; base-uri 'none'; form-action 'none'"
    if script:
        allowed = f"script-src 'sha256-{_hash(script)}'; {allowed}"
        script = f"<script>{script}</script>\n"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; {allowed}\">\n"
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{body.rstrip()}\n{script}</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
