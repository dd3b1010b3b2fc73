"""Tests of the HTTP side are left out where its packages are not installed."""

from __future__ import annotations

import importlib.util

NEEDED = ("uvicorn", "starlette", "pydantic", "jinja2", "prometheus_client", "tokenizers")

if not all(map(importlib.util.find_spec, NEEDED)):
    collect_ignore_glob = ["test_http_*.py", "http_*.py"]
