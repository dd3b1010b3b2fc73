"""What is kept for later runs is forgotten when what computed it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import hocket
from hocket.models.shape_cache import shape_file
from hocket.spec import user_cache
from hocket.spec.layout import Layout
from hocket.spec.proxy_verdict import verdict_file
from hocket.spec.run import RunSpec, TrainOptions, Workload


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.cache_folder("shapes") == tmp_path / "hocket" / "shapes"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache.cache_folder("shapes") == tmp_path / ".cache" / "hocket" / "shapes"


def test_a_change_of_the_code_forgets_what_it_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the packages that compute it; of others it stays."""
    spec = RunSpec(
        model="tiny", config={"model_type": "llama"}, layout=Layout(), workload=Workload(),
        options=TrainOptions(),
    )  # fmt: skip
    code = {package: tmp_path / package / "inner" / "code.py" for package in ("models", "runtime")}
    for file in code.values():
        file.parent.mkdir(parents=True)
        file.write_text("a = 1\n")
    monkeypatch.setattr(hocket, "__file__", str(tmp_path / "__init__.py"))

    def files() -> tuple[Path, Path]:
        user_cache.code_crc32.cache_clear()
        return shape_file(spec), verdict_file(spec.config, "sdpa")

    try:
        first = files()
        assert files() == first
        code["runtime"].write_text("a = 2\n")
        second = files()
        assert second[0] == first[0]
        assert second[1] != first[1]
        code["models"].write_text("a = 2\n")
        third = files()
        assert third[0] != second[0]
        assert third[1] != second[1]
    finally:
        user_cache.code_crc32.cache_clear()
