"""The report card: its JSON form, its text, its page, and the verb that writes it."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.launch.gpus import cuda_shows
from hocket.reporting import card as words
from hocket.reporting.card_page import card_html
from hocket.spec.doctor import CANNOT, FAIL, PASS, CardLine, ReportCard
from hocket.spec.errors import DataError


def line(name: str, group: str, status: str, **more: object) -> CardLine:
    return CardLine(
        id=name, group=group, what=f"do {name}", criterion="1e-4 or less", status=status,
        command=f"hocket doctor --gpu --only {name}", **more,
    )  # fmt: skip


CARD = ReportCard(
    date="2026-01-02T03:04:05Z",
    lines=(
        line("env-driver", "environment", PASS, values={"driver": "580.65"}),
        line("kernel-a", "kernels", FAIL, reason="output differs by <0.5>", seconds=1.0),
        line("kernel-b", "kernels", CANNOT, reason="needs a GPU; rehearsed: ok",
             rehearsals={"cpu": "ok"}),
        line("train-1b", "speed", PASS, values={
            "step_seconds": 0.25, "tokens_per_second": 65536.0, "bus_bytes_per_second": 4.5e11,
        }, predicted={"step_seconds": 0.3}),
    ),
    machine={"gpus": 2, "gpu_0": "NVIDIA <H100>", "gpu_1": "NVIDIA <H100>", "memory_bytes": 9},
    versions={"hocket": "1.0", "torch": "2.13.0"},
    executed_on_gpu=True,
    seconds=12.0,
)  # fmt: skip


def test_json_has_an_inverse_and_other_files_are_rejected() -> None:
    assert ReportCard.from_json(CARD.to_json()) == CARD
    newer = {**json.loads(CARD.to_json()), "version": 99}
    with pytest.raises(DataError, match="version 99, this hocket reads 1"):
        ReportCard.from_json(json.dumps(newer))
    for text in ("", "[]", "{}", '{"version": 1, "lines": [{}]}'):
        with pytest.raises(DataError, match="not a report card"):
            ReportCard.from_json(text)


def test_counts_and_verdict() -> None:
    assert CARD.counts == {"pass": 2, "fail": 1, "cannot": 1}
    assert CARD.rehearsed == 1
    assert not CARD.ok
    assert dataclasses.replace(CARD, lines=CARD.lines[2:]).ok


def test_the_text_holds_each_line_its_reason_and_its_command() -> None:
    width = max(len(line.id) for line in CARD.lines)
    text = "\n".join(part for line in CARD.lines for part in words.line_text(line, width))
    text += "\n" + words.card_counts(CARD)
    for each in CARD.lines:
        assert f"{each.status:<6}  {each.id}" in text
        assert each.command in text
        assert each.reason in text
    assert "step 250 ms (predicted 300 ms)" in text
    assert "65,536 tokens/s" in text
    assert "bus 450 GB/s" in text
    assert "4 checks: 2 pass, 1 fail, 1 cannot; 12 s" in text


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_needs_no_network() -> None:
    text = card_html(CARD)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "img", "link", "iframe"} & set(tags.seen)
    assert "<H100>" not in text
    assert "2 x NVIDIA &lt;H100&gt;" in text
    assert "differs by &lt;0.5&gt;" in text
    assert not re.search(r"(src|href)=.?https?:", text)
    assert "No GPU executed these checks" not in text
    rehearsed = card_html(
        dataclasses.replace(CARD, executed_on_gpu=False, machine={"cpu": "A CPU"})
    )
    assert "No GPU executed these checks" in rehearsed
    assert "A CPU, no GPU" in rehearsed


def test_the_verb_reports_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    out = capsys.readouterr().out
    assert out.startswith("works here: train, ")
    assert "\nenvironment" in out
    assert "env-shared-memory" in out
    assert "hocket doctor --gpu --only env-limits" in out
    lines = [line for line in out.splitlines() if "env-driver" in line]
    if not cuda_shows():  # what waits for a GPU is one paragraph
        assert len(lines) == 1
        assert "need GPUs that are not here: " in out
        assert "\n  cannot  env-" not in out


def test_the_verb_lists_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "--list"]) == 0
    out = capsys.readouterr().out
    assert "train-1b" in out
    assert re.search(r"\d+ checks, about \d+m\d+s on GPUs", out)


def test_the_verb_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "card"
    main(["doctor", "--only", "env-limits", "env-toolchain", "--json", "--out", str(folder)])
    printed = ReportCard.from_json(capsys.readouterr().out)
    assert [each.id for each in printed.lines] == ["env-toolchain", "env-limits"]
    written = ReportCard.from_json((folder / "report-card.json").read_text())
    assert written == printed
    assert "env-limits" in (folder / "report-card.html").read_text()
    assert sorted(p.name for p in folder.iterdir()) == ["report-card.html", "report-card.json"]


def test_a_mistake_is_answered_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "env-limts"]) == 2
    assert "hint: hocket doctor --only env-limits" in capsys.readouterr().err


@pytest.mark.torch
def test_the_verb_rehearses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "--only", "kernel-matmul-fp32"]) == 0
    out = capsys.readouterr().out
    assert "kernel-matmul-fp32" in out
    assert "rehearsed: ok" in out or "pass" in out
