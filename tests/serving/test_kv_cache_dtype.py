"""A cache in 8-bit floats: answers equal those of transformers with such a cache, in half the
bytes; what cannot have one is rejected before ranks start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import check as cli
from hocket.jobs.serving import check
from hocket.models.source import resolve_model
from hocket.spec.capabilities import refused_cache
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.served_check import ServedCheck
from tests.families import EXPERTS
from tests.serving.test_served_check import LLAMA, lent

pytestmark = [pytest.mark.ranks, pytest.mark.train, pytest.mark.timeout(200)]

__all__ = ["lent"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "model_type": "llama"},
    "gpt_oss": {**EXPERTS["gpt_oss"], "max_position_embeddings": 64, "vocab_size": 96},
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "tp2"), ("llama", "cp2"), ("gpt_oss", "dp1")],
)
def test_answers_are_those_of_transformers_with_such_a_cache(
    lent: Any, tmp_path: Path, family: str, layout: str
) -> None:
    """Windows, sinks, context ranks' parts of blocks; chunks, prefix reuse and preemption."""
    file, folder = tmp_path / "config.json", tmp_path / "model"
    file.write_text(json.dumps(FAMILIES[family]))
    check.prepare_checked_model(lent, resolve_model(file), folder, proxy=False, seed=0)
    found = {
        kind: check.answers_of(
            lent, folder, layout, check.CheckedSizes(), kv_cache_dtype=kind, device="cpu"
        )
        for kind in ("fp8", "auto")
    }

    def reported(kind: str, *, cache: bool) -> ServedCheck:
        given = {layout: found[kind]}
        (report,) = check.layout_reports(lent, folder, given, tmp_path, cache=cache).values()
        return report

    report = reported("fp8", cache=True)
    assert report.ok, report.failures
    assert {one.name for one in report.comparisons} >= {"batching", "prefix reuse", "preemption"}
    assert report.median <= 2e-5 * report.scale < 0.01 * report.eight_bits
    assert reported("auto", cache=False).ok
    assert not reported("fp8", cache=False).ok
    assert not reported("auto", cache=True).ok


@pytest.mark.usefixtures("lent")
def test_the_command_compares_both_kinds_of_8_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    flags = ["--serve", "--kv-cache-dtype", "fp8", "--quantization", "fp8", "--layout", "pp2"]
    assert cli.main([str(file), *flags]) == 0
    assert "that quantizes to 8 bits" in capsys.readouterr().out


def test_pools_hold_a_byte_an_entry_and_saturate() -> None:
    torch = pytest.importorskip("torch")
    from hocket.models.rounded import e4m3
    from hocket.serving.engine.cache import LayerShape, PagedCache, bytes_per_block, read, write
    from hocket.serving.engine.cache import as_cached as stored

    shape = LayerShape(4, 2, 16, 8, torch.bfloat16)
    few = dataclasses.replace(shape, stored=torch.float8_e4m3fn)
    assert 2 * bytes_per_block([few], 4) == bytes_per_block([shape], 4) == 2 * 4 * 2 * (16 + 8)
    cache = PagedCache([few], 3, 4, torch.device("cpu"), heads_first=False)
    assert cache.keys[0].nbytes + cache.values[0].nbytes == 3 * bytes_per_block([few], 4)
    torch.manual_seed(0)
    rows = torch.randn(5, 32, dtype=torch.bfloat16) * torch.logspace(-4, 4, 5)[:, None].bfloat16()
    rows[0, 0], rows[1, 1] = 1e6, -torch.inf
    pool, places = cache.keys[0], torch.tensor([1, 2, 3, 7, 11])
    write(pool, places, stored(pool, rows))
    held = read(pool, torch.arange(3), torch.float32).view(12, 32)
    assert torch.equal(held[places].double(), e4m3(rows))
    assert held[1, 0] == 448
    assert not held[0].any()


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"cuda": True, "dtype": "bf16", "capability": (8, 0)}, "compute capability 8.0"),
        ({"cuda": True, "dtype": "bf16", "capability": (8, 9)}, None),
        ({"cuda": True, "dtype": "fp32"}, "dtype is fp32"),
        ({"cuda": False, "dtype": "fp32"}, None),
        ({"cuda": False, "dtype": "fp32", "latent": True}, "latent vectors"),
    ],
)
def test_devices_and_models_that_have_such_a_cache(
    asked: dict[str, Any], match: str | None
) -> None:
    why = refused_cache("fp8", **asked)
    assert (why is None) if match is None else (match in (why or ""))
    assert refused_cache("auto", **asked) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tiny-llama", "--kv-cache-dtype", "fp8", "--layout", "tp2"], "an option of servers"),
        (["tiny-llama", "--serve", "--kv-cache-dtype", "bf16"], "precision that attention"),
        (["deepseek-v3", "--serve", "--kv-cache-dtype", "fp8"], "cache latent vectors"),
    ],
)
def test_what_has_no_such_cache_is_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cli.main(flags)


def test_an_unknown_precision_names_those_there_are() -> None:
    from hocket.jobs.serving.eight_bits import require_cached

    with pytest.raises(HocketError, match="unknown kv_cache_dtype 'int8'; known: auto, bf16, fp8"):
        require_cached("int8", "bf16", {}, cuda=False)
