"""Tests of the HTTP side are left out where its packages are not installed; kernels are tested as
this processor runs them, and as lesser ones do."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("uvicorn", "starlette", "pydantic", "jinja2", "prometheus_client", "tokenizers")

if not all(map(importlib.util.find_spec, NEEDED)):
    collect_ignore_glob = ["test_http_*.py", "http_*.py"]

FORMS = ("native", "avx2", "portable")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """A processor that kernels can be compiled for and that this one can stand for."""
    from hocket.runtime.native.library import library

    if library() is None:
        pytest.skip("no C compiler here")
    known = Path("/proc/cpuinfo")
    if request.param == "avx2" and not (known.exists() and " avx2 " in known.read_text()):
        pytest.skip("no AVX2 here")
    return str(request.param)


@pytest.fixture
def kernels(form: str) -> Any:
    """The kernels for such a processor."""
    from hocket.runtime.native.kernels import CpuKernels
    from hocket.runtime.native.library import library

    found = library(form)
    assert found is not None, form
    return CpuKernels(found)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does every matmul that it can, whatever a trial would find: what a trial finds
    faster depends on the machine's load, and the two round differently."""
    from hocket.serving.engine import runner
    from hocket.serving.engine.gemm_select import choose_products

    monkeypatch.setattr(runner, "choose_products", functools.partial(choose_products, tried=False))


@pytest.fixture
def called(kernels: Any, untimed: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each layer that was computed whole."""
    from hocket.runtime.native.kernels import CpuKernels

    monkeypatch.setattr(CpuKernels, "load", staticmethod(lambda: kernels))
    rows: list[int] = []
    original = CpuKernels.layer

    def layer(self: CpuKernels, at: int, step: Any, *rest: Any) -> int:
        rows.append(step.rows)
        return original(self, at, step, *rest)

    monkeypatch.setattr(CpuKernels, "layer", layer)
    return rows
