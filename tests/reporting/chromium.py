"""A headless Chromium for tests, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def executable() -> str | None:
    """Its path: HOCKET_CHROMIUM, else the first of the usual names."""
    asked = os.environ.get("HOCKET_CHROMIUM")
    return asked or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser of playwright. Skips where there is none."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with api.sync_playwright() as playwright:
        # Without a sandbox: containers seldom allow one, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
