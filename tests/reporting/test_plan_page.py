"""The page of a plan in a browser: sorted by a click, at 1280 and at 400 pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.reporting.plan_page import PlanPage, PlanRow, plan_html
from tests.reporting.chromium import chromium  # noqa: F401  a fixture

HOSTILE = "<script>window.owned=1</script><img src=x onerror='window.owned=1'>"
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def column(view: Any, number: int) -> list[str]:
    return list(
        view.eval_on_selector_all(
            f"#layouts tbody td:nth-child({number})",
            "(all) => all.map((cell) => cell.dataset.value)",
        )
    )


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.timeout(60)
def test_a_plan_as_a_page(chromium: Any, tmp_path: Path, width: int) -> None:  # noqa: F811
    file = tmp_path / "plan.html"
    flags = ["plan", "llama-3-70b", "--cluster", "4x8xH100", "--seq-len", "4096"]
    flags += ["--global-batch", "64", "--pin", "pp=4", "--top", "4"]  # a pipeline is drawn
    assert main([*flags, "--html", str(file)]) == 0
    view = chromium.new_page(viewport={"width": width, "height": 900})
    errors: list[str] = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.on("console", lambda message: errors.append(message.text))
    view.on("request", lambda found: found.url.startswith("file:") or errors.append(found.url))
    view.goto(file.as_uri())
    assert view.title() == "Plan: llama-3-70b on 4x8xH100-SXM-80"
    assert not view.evaluate(WIDER)
    before = column(view, 5)
    assert len(before) >= 4
    for name, down in (("ascending", False), ("descending", True)):
        view.click("#layouts th:nth-child(5) button")
        assert view.get_attribute("#layouts th:nth-child(5)", "aria-sort") == name
        assert column(view, 5) == sorted(before, key=float, reverse=down)
    bars = view.locator("#memory svg")
    assert bars.count() == len(before)
    assert bars.first.locator("rect").count() >= 4
    assert view.locator("#pipeline svg rect.aF").count() >= 8
    assert view.locator("#layouts td .range").first.is_visible() == (width > 700)
    assert "exposed: fraction" in view.inner_text("#layouts")
    assert "NVLink" in view.inner_text("#change")
    assert view.inner_text("#run pre").startswith("hocket train llama-3-70b --data DATA --layout")
    assert not errors
    view.close()


def test_names_of_strangers_are_text(chromium: Any, tmp_path: Path) -> None:  # noqa: F811
    found = PlanPage(
        title=HOSTILE, asked=HOSTILE, headings=(HOSTILE,), command=HOSTILE, notes=(HOSTILE,),
        rows=(PlanRow(name=HOSTILE, cells=((HOSTILE, None),), memory={HOSTILE: 5}, high=6),),
        capacity=None, changes=(HOSTILE,), footer=HOSTILE,
    )  # fmt: skip
    (tmp_path / "page.html").write_text(plan_html(found))
    view = chromium.new_page()
    view.goto((tmp_path / "page.html").as_uri())
    view.click("#layouts th button")
    assert view.evaluate("window.owned") is None
    assert view.locator("img").count() == 0
    view.close()


def test_a_path_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "8", "--html"]
    assert main([*flags, str(tmp_path / "no" / "plan.html")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert "--global-batch 8 --html plan.html\n" in said
