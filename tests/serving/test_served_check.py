"""`hocket check --serve`: answers equal those of plain transformers, and the check can fail."""

from __future__ import annotations

import copy
import json
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cli import check as cli
from hocket.jobs.proxy import require_equal
from hocket.jobs.serving import check, server
from hocket.jobs.serving.check_matrix import served_matrix
from hocket.jobs.serving.llm import Lent
from hocket.models import registry
from hocket.models.samples import sample_config, switches
from hocket.models.source import resolve_model
from hocket.spec.errors import HocketError, ModelError, OptionError, RankMemoryError
from hocket.spec.layout import Layout
from hocket.spec.matrix import SWITCHED
from hocket.spec.served_check import ServedCheck, ServedComparison, equal_limit
from tests.ranks import RankPool
from tests.rotation import part

pytestmark = [pytest.mark.ranks, pytest.mark.train, pytest.mark.timeout(200)]

PER_RUN = 2
"""Rows of the serving matrix that one run of the tests takes."""

ROWS = [
    name
    for kind in sorted(registry.causal_classes())
    for name in (kind, kind + SWITCHED)
    if name == kind or switches(kind)
]
_, *_TABLE = map(
    json.loads,
    (Path(__file__).parents[2] / "docs/reference/served-families.jsonl").read_text().splitlines(),
)
WORKED = {
    row["kind"]
    for row in _TABLE
    if any(mark == "=" and "b" in columns for mark, _, columns, *_ in row["cells"])
}
"""Rows that the table of docs/reference has as equal at tp2."""
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def lent(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The session's launcher, in place of one of the check's own."""

    class Kept(Lent):
        def __enter__(self) -> Kept:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    found = Kept(ranks.launcher, [check.REFERENCE, "hocket.ranks.serving"])
    monkeypatch.setattr(check, "launcher_of", lambda *_: found)
    return found


@pytest.mark.usefixtures("lent")
def test_a_part_of_the_matrix_is_equal_or_rejected() -> None:
    names = part(ROWS, len(ROWS) // PER_RUN)[:PER_RUN]
    found = served_matrix(names, ["tp2"])
    assert [row.kind for row in found.rows] == names
    for row in found.rows:
        (cell,) = row.cells
        assert cell.outcome in ("equal", "rejected"), (row.kind, row.note, cell)
        assert (cell.outcome == "rejected") == bool(cell.reason)
        if row.kind in WORKED:
            assert cell.outcome == "equal", (row.kind, cell.reason)


@pytest.mark.usefixtures("lent")
def test_a_loss_that_is_not_computed_is_nothing_to_a_server() -> None:
    """Bamba's second configuration has one."""
    (row,) = served_matrix(["bamba+"], ["cp2"]).rows
    assert row.cells[0].outcome == "equal", row.cells[0].reason


@pytest.mark.usefixtures("lent")
def test_a_server_is_compared_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "olmo2.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "olmo2"}))
    assert cli.main([str(file), "--serve", "--layout", "tp2", "--json"]) == 0
    *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (last.pop("event"), last.pop("schema")) == ("result", 1)
    report = ServedCheck.from_json(json.dumps(last))
    assert report.ok
    assert report.scale > 1  # random weights whose logits differ by whole units
    assert {one.name: (one.positions > 0, one.tokens > 0) for one in report.comparisons} == {
        "prefill": (True, True), "chunked prefill": (True, True), "decode": (True, True),
        "batching": (True, True), "prefix reuse": (True, True), "preemption": (True, True),
        "restart": (True, True), "generate": (False, True),
    }  # fmt: skip
    assert "largest difference (limit)" in "\n".join(cli.served_lines(report))


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("layout", ["dp2.ep2", "tp2.ep2.etp1"])
def test_experts_over_ranks_answer_as_plain_transformers(
    lent: Any, tmp_path: Path, layout: str, copies: int
) -> None:
    """With one request at a time a data rank is idle, and a step has fewer tokens than ranks."""
    file, folder = tmp_path / "mixtral.json", tmp_path / "model"
    file.write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 4,
                                "num_experts_per_tok": 2}))  # fmt: skip
    check.prepare_checked_model(lent, resolve_model(file), folder, proxy=False, seed=0)
    answers = check.answers_of(
        lent, folder, layout, check.CheckedSizes(),
        redundant_experts=copies, rebalance_steps=check.REBALANCE,
    )  # fmt: skip
    (report,) = check.layout_reports(lent, folder, {layout: answers}, tmp_path).values()
    assert report.ok, report.failures
    assert {one.name for one in report.comparisons} >= {"batching", "prefix reuse", "preemption"}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_ranks_of_a_server_leave_by_themselves(lent: Any, tmp_path: Path, kind: str) -> None:
    """Not killed, and their launcher with them, because rank 0 waits for a channel that a frame
    holds, which a model keeps alive."""
    file, folder = tmp_path / "model.json", tmp_path / "model"
    file.write_text(json.dumps(sample_config(kind)))
    check.prepare_checked_model(lent, resolve_model(file), folder, proxy=True, seed=0)
    check.answers_of(lent, folder, "dp2.ep2", check.CheckedSizes())
    assert lent.alive


def test_a_faulty_split_is_rejected_before_ranks_start_and_remembered(
    lent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    monkeypatch.setattr(server, "ENTRY", "tests.serving.faulty_server:main")
    for launcher in (lent, None):  # the second time the verdict is read: nothing could be started
        with pytest.raises(ModelError, match="does not answer as plain transformers") as caught:
            require_equal(launcher, resolve_model(file), Layout(tp=2), pages=True)
        assert "prefill: prompt of" in caught.value.message
        assert caught.value.hint == "--layout dp1"
    # What nothing is split of is not served for it.
    assert require_equal(None, resolve_model(file), Layout(dp=2), pages=True).pages == ""


def test_every_kind_of_wrong_answer_is_found(lent: Any, tmp_path: Path) -> None:
    """True answers of a server, each time with one thing changed."""
    file, folder = tmp_path / "llama.json", tmp_path / "model"
    file.write_text(json.dumps(LLAMA))
    check.prepare_checked_model(lent, resolve_model(file), folder, proxy=True, seed=0)
    true = check.answers_of(lent, folder, "dp1", check.CheckedSizes())
    assert {answer["phase"] for answer in true} == {
        "alone", "batching", "prefix reuse", "preemption",
    }  # fmt: skip
    named = {}
    for name, (which, change, *_) in CHANGES.items():
        answers = copy.deepcopy(true)
        change(next(answer for answer in answers if which(answer)))
        named[name] = answers
    reports = check.layout_reports(lent, folder, {"true": true, **named}, tmp_path)
    assert reports["true"].ok
    for name, (_, _, comparison, text) in CHANGES.items():
        (failure,) = reports[name].failures
        assert failure.startswith(f"{comparison}: "), (name, failure)
        assert text in failure, (name, failure)


def _more(entry: list[Any]) -> None:
    entry[1] += 0.01


def _another_token(answer: dict[str, Any]) -> None:
    answer["tokens"][-1] = answer["logprobs"][-1][2][5][0]
    answer["logprobs"][-1][:2] = answer["logprobs"][-1][2][5]


def _a_likely_one_missing(answer: dict[str, Any]) -> None:
    del answer["logprobs"][2][2][1]


def _long(answer: dict[str, Any]) -> bool:
    return answer["phase"] == "alone" and answer["chunked"]


def _short(answer: dict[str, Any]) -> bool:
    return answer["phase"] == "alone" and len(answer["prompt"]) == 7


CHANGES: dict[str, Any] = {
    "prompt": (
        _short, lambda a: _more(a["prompt_logprobs"][3]), "prefill",
        "prompt of 7 tokens, prompt position 4",
    ),
    "chunks": (
        _long, lambda a: _more(a["prompt_logprobs"][-1][2][7]), "chunked prefill",
        "prompt position",
    ),
    "decode": (
        _short, lambda a: _more(a["logprobs"][1]), "decode",
        "prompt of 7 tokens, generated token 2: the log-probability of token",
    ),
    "not a number": (
        _short, lambda a: a["logprobs"][1].__setitem__(1, float("nan")), "decode", "is nan",
    ),
    "another token": (
        lambda a: a["phase"] == "preemption", _another_token, "preemption", "transformers takes",
    ),
    "a token too few": (
        lambda a: a["phase"] == "batching", lambda a: a["tokens"].pop(), "batching",
        "were asked for",
    ),
    "a prompt position too few": (
        _short, lambda a: a["prompt_logprobs"].pop(), "prefill", "6 prompt tokens",
    ),
    "an alternative left out": (
        lambda a: a["phase"] == "prefix reuse", _a_likely_one_missing, "prefix reuse",
        "number 2 by likelihood",
    ),
}  # fmt: skip
"""What is changed: (of which answer, how, the comparison that shows it, what its failure names)."""


def test_limits_and_reports_have_exact_text_forms() -> None:
    report = ServedCheck(
        layout="tp2", scale=10.0, rounding=1e-3,
        comparisons=(
            ServedComparison(name="decode", positions=3, tokens=3, difference=1e-3),
            ServedComparison(name="restart", difference=float("inf"), failure="prompt of 1 tokens"),
        ),
    )  # fmt: skip
    assert ServedCheck.from_json(report.to_json()) == report
    assert not report.ok
    assert report.ratio is None
    assert report.limit == equal_limit(10.0, 1e-3) == 2e-3  # fp32's own distance from fp64, twice
    assert equal_limit(10.0) == pytest.approx(2e-4)
    assert equal_limit(10.0, 1.0) == equal_limit(10.0)  # no rounding is that large


@pytest.mark.parametrize("rounding", [0.0, 1.0])
def test_a_difference_is_looked_at_with_other_weights_where_they_amplify_rounding(
    monkeypatch: pytest.MonkeyPatch, rounding: float
) -> None:
    """Kimi Linear's own forward in fp32 is further from fp64 than is taken for rounding, for some
    draws of its weights; a server that computes something else differs with all of them."""
    drawn: list[int] = []

    def prepare(*_: Any, seed: int, **__: Any) -> dict[str, Any]:
        drawn.append(seed)
        return {"config": sample_config("llama"), "longest": None, "parameters": 1, "switches": {}}

    def reports(*_: Any, **__: Any) -> dict[str, ServedCheck]:
        wrong = "" if drawn[-1] == 1 else "prompt of 3 tokens"
        row = ServedComparison(name="prefill", positions=3, difference=0.1, failure=wrong)
        one = ServedCheck(layout="tp2", scale=10.0, rounding=rounding, comparisons=(row,))
        return {"tp2": one}

    launcher: Any = types.SimpleNamespace(device_kind="cpu")
    source: Any = types.SimpleNamespace(trust_remote_code=False)
    monkeypatch.setattr(check, "prepare_checked_model", prepare)
    monkeypatch.setattr(check, "answers_of", lambda *_, **__: [])
    monkeypatch.setattr(check, "layout_reports", reports)
    found = check.proxy_check(launcher, source, Layout(tp=2))
    assert (found, drawn) == (("", [0, 1]) if rounding else ("prefill: prompt of 3 tokens", [0]))


@pytest.mark.parametrize(
    ("device", "cp", "block"), [("cpu", 1, 4), ("cpu", 3, 12), ("cuda", 1, 16), ("cuda", 2, 32)]
)
def test_blocks_of_a_checked_server_divide_over_its_context_ranks(
    device: str, cp: int, block: int
) -> None:
    """On CUDA the kernel reads a multiple of 16 tokens of each rank."""
    source: Any = types.SimpleNamespace(dimensions=types.SimpleNamespace(max_positions=None))
    assert check.checked_sizes(source, cp, 128, device).block_size == block


@pytest.mark.parametrize("error", [RankMemoryError("no memory"), HocketError("no port is free")])
def test_a_server_that_could_not_start_is_no_verdict_on_the_model(
    monkeypatch: pytest.MonkeyPatch, error: HocketError
) -> None:
    def fails(*_: Any, **__: Any) -> ServedCheck:
        raise error

    monkeypatch.setattr(check, "_proxy_report", fails)
    launcher: Any = types.SimpleNamespace(device_kind="cpu")
    source: Any = types.SimpleNamespace(trust_remote_code=False)
    with pytest.raises(HocketError) as raised:
        check.proxy_check(launcher, source, Layout(tp=2))
    assert raised.value is error


@pytest.mark.parametrize("proxy_check", [True, False])
def test_missing_kernels_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, proxy_check: bool
) -> None:
    """The LLM of a proxy model leaves the warning to the one that it is checked for."""
    from hocket.jobs.serving import start
    from hocket.jobs.serving.llm import LLM

    monkeypatch.setattr(start, "kernels_remark", lambda _: "no kernels in C")
    server: Any = types.SimpleNamespace(request=types.SimpleNamespace(auto=None), stop=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(AttributeError):  # of the server, which is nothing but a request
            LLM.of(server, proxy_check=proxy_check)
    assert [str(one.message) for one in caught] == ["no kernels in C"] * proxy_check


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tiny-llama", "--serve", "--steps", "2"], "--steps is an option of training steps"),
        (["--serve", "--matrix", "--quick"], "--quick chooses layouts of the training matrix"),
        (["--serve", "--matrix", "--types", "lama"], "unknown model type 'lama'"),
    ],
)
def test_flags_that_say_nothing_of_a_server_are_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cli.main(flags)


def test_the_distance_from_fp64_counts_scans_that_a_family_computes_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left in fp32 on both sides, a scan's own rounding would be no part of it."""
    import torch

    from hocket.models.plain import PlainModel, save_plain
    from hocket.models.proxy import proxy_of, spread_weights
    from hocket.models.samples import sample_config
    from hocket.models.skeleton import config_of
    from hocket.ranks.serving_check import _Reference
    from hocket.training.in_fp64 import stay_in_fp64

    model = proxy_of(config_of(sample_config("qwen3_5_text"), dropout=0.0)).build()
    spread_weights(model, 0)
    save_plain(model, tmp_path)
    tokens = tuple(range(3, 51))
    reference = _Reference(str(tmp_path), False)
    known = reference.logprobs(tokens)

    half_way, whole = (PlainModel(tmp_path, trust_remote_code=False) for _ in range(2))
    half_way.to_fp64()
    stay_in_fp64(whole.to_fp64())

    def distance(other: PlainModel) -> float:
        found = other.logits(tokens).double().log_softmax(-1)
        return float((found - known).abs().max())

    longer = tuple(range(3, 90))  # of another layout's check
    reference.logprobs(longer)
    largest = reference.rounding()
    assert reference.apart[tokens] == distance(whole) != distance(half_way)
    assert largest == max(reference.apart.values())
    answer = {"prompt": list(tokens), "tokens": [], "phase": "alone"}
    monkeypatch.setattr(
        reference, "_report", lambda *given: types.SimpleNamespace(ok=len(given) > 3, given=given)
    )
    (one,) = reference.reports({"tp2": [answer]}, generate=False)
    assert one.given[3] == distance(whole)
    assert torch.isfinite(known).all()
