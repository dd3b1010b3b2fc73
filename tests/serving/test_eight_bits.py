"""`hocket check --serve --quantization`: equal to transformers that rounds, and the check can fail;
what cannot be stored so is rejected before ranks start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import check as cli
from hocket.jobs.serving import check
from hocket.jobs.serving import request as serve_request
from hocket.jobs.serving.eight_bits import require_eight_bits
from hocket.jobs.serving.start import require_split
from hocket.models.samples import sample_config
from hocket.models.source import resolve_model
from hocket.spec.errors import ModelError, OptionError
from hocket.spec.layout import Layout
from hocket.spec.served_check import ServedCheck
from tests.serving.test_served_check import LLAMA, lent

pytestmark = [pytest.mark.ranks, pytest.mark.train, pytest.mark.timeout(200)]

__all__ = ["lent"]

MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.usefixtures("lent")
def test_a_server_in_8_bits_is_compared_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    flags = [str(file), "--serve", "--quantization", "fp8", "--layout", "tp2", "--json"]
    assert cli.main(flags) == 0
    *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    del last["event"], last["schema"]
    report = ServedCheck.from_json(json.dumps(last))
    assert report.ok
    assert {one.name for one in report.comparisons} >= {"chunked prefill", "preemption", "restart"}
    # Beyond the sums of fp32 nothing differs at most positions, and 8 bits are seen.
    assert report.median <= 2e-5 * report.scale < 0.01 * report.eight_bits
    assert "in 8 bits: median difference" in "\n".join(cli.served_lines(report))


@pytest.mark.parametrize("layout", ["tp2", "dp2.ep2"])
def test_experts_in_8_bits_answer_as_rounding_transformers(
    lent: Any, tmp_path: Path, layout: str
) -> None:
    file, folder = tmp_path / "mixtral.json", tmp_path / "model"
    file.write_text(json.dumps(MIXTRAL))
    source = resolve_model(file)
    check.prepare_checked_model(lent, source, folder, proxy=False, seed=0)
    columns = require_eight_bits(lent, source, Layout.parse(layout))
    assert sum(".experts." in name for name in columns) == 2 * LLAMA["num_hidden_layers"]
    split = {name.split(".")[-2] for name, each in columns.items() if each}
    assert split == ({"o_proj", "experts"} if layout == "tp2" else set())
    few: dict[str, Any] = {"quantization": "fp8", "device": "cpu"}
    size = check.CheckedSizes()
    answers = check.answers_of(lent, folder, layout, size, emulated=True, **few)

    def reported(columns: dict[str, Any] | None) -> ServedCheck:
        given = {layout: answers}
        (report,) = check.layout_reports(lent, folder, given, tmp_path, columns=columns).values()
        return report

    assert reported(columns).ok, reported(columns).failures
    assert not reported(None).ok  # of a model that rounds nothing
    router, *_ = (name for name in columns if "q_proj" in name)
    fewer = {name: each for name, each in columns.items() if name != router}
    assert "all positions: the median" in reported(fewer).failures[-1]  # of one layer that is exact
    if layout == "tp2":  # of one scale a row, where each rank has its own
        assert not reported({name: [] for name in columns}).ok


def served(
    kind: dict[str, Any], folder: Path, lent: Any, *, proxy: bool = False
) -> Callable[[str], None]:
    """Checks, before ranks start, that a model of random weights can be served in 8 bits."""
    file = folder / "config.json"
    file.write_text(json.dumps(kind))
    check.prepare_checked_model(lent, resolve_model(file), folder / "model", proxy=proxy, seed=0)

    def require(layout: str) -> None:
        values = {
            "model": str(folder / "model"), "layout": layout, "tokenizer": "bytes",
            "quantization": "fp8", "device": "cpu",
        }  # fmt: skip
        require_split(lent, serve_request.server(values, emulated=True))

    return require


def test_experts_of_a_family_with_code_of_its_own_are_rejected(lent: Any, tmp_path: Path) -> None:
    config = {**sample_config("llama4_text"), "model_type": "llama4_text"}
    with pytest.raises(ModelError, match="multiplies its experts in the model's own code") as error:
        served(config, tmp_path, lent, proxy=True)("dp1")
    assert error.value.hint == "leave --quantization out"


def test_shards_of_odd_sizes_are_rejected_with_the_nearest_layout(
    lent: Any, tmp_path: Path
) -> None:
    small = {**LLAMA, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 4}
    require = served(small, tmp_path, lent)
    require("tp2")
    with pytest.raises(ModelError, match="no linear layer whose sides are multiples of 16") as odd:
        require("tp4")
    assert odd.value.hint == "--layout tp2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layout", "tp2"], "--quantization is an option of servers"),
        (["--serve", "--device", "cuda"], "checked in fp32"),
        (["--serve", "--layout", "tp3"], "4 attention heads do not divide over tp 3"),
    ],
)
def test_what_is_not_checked_is_rejected(flags: list[str], message: str) -> None:
    from hocket.spec.errors import LayoutError

    with pytest.raises((OptionError, LayoutError), match=message):
        cli.main(["tiny-llama", "--quantization", "fp8", *flags])
