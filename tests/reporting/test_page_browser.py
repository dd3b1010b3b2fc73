"""The page in a browser: what a person sees and does, at 1280 and at 400 pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.jobs.report import report_records, write_report
from hocket.spec.timeline import Event, Timeline
from tests.reporting.chromium import chromium  # noqa: F401  a fixture
from tests.reporting.run_folders import gpus, make

HOSTILE = "<script>window.owned=1</script><img src=x onerror='window.owned=1'>"

OVERLAPS = """() => {
  const wrong = [];
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const among = (nodes) => {
    const seen = nodes.map((node) => [node, node.getBoundingClientRect()])
      .filter(([, box]) => box.width && box.height);
    seen.forEach(([one, a], at) => seen.slice(at + 1).forEach(([other, b]) => {
      const words = [one, other].map((node) => node.textContent.slice(0, 40));
      if (meet(a, b)) wrong.push(words.join(" | "));
    }));
  };
  among([...document.querySelectorAll("section, header, footer")]);
  document.querySelectorAll("svg").forEach((svg) => among([...svg.querySelectorAll("text")]));
  among([...document.querySelectorAll("h1, h2, h3, p, td, th, li, dt, dd, .figure div, button")]
    .filter((node) => !node.querySelector("p, td, li, div")));
  return wrong;
}"""

OUTSIDE = """() => [...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  return box.width && box.height && !node.closest(".tip, .unseen")
    && (box.right > innerWidth + 1 || box.left < -1);
}).map((node) => `${node.tagName} ${node.textContent.slice(0, 40)}`)"""

KINDS = [
    "forward", "backward", "weight", "optimizer", "send", "receive", "collective", "idle",
]  # fmt: skip

Open = Callable[..., Any]


@pytest.fixture
def opened(chromium: Any) -> Iterator[Open]:  # noqa: F811
    """Open a page offline; in the end nothing must have been logged, raised or asked for."""
    contexts, heard = [], []

    def open_(path: Path, width: int = 1280, **options: Any) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on(
            "request",
            lambda request: heard.append(request.url) if request.url[:5] != "file:" else None,
        )
        page.goto(path.as_uri())
        # A selector, not a function: the page's own policy forbids what would evaluate one.
        page.wait_for_selector("body:not(:has(.board)), .board[data-to]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not heard


def report(*runs: Path) -> Path:
    return write_report(report_records(runs), out=str(runs[0] / "report.html"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(make(tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", ["whole", "two", "died", "hostile", "wide"])
def test_right_at_every_width(opened: Open, tmp_path: Path, width: int, kind: str) -> None:
    run = tmp_path / "run"
    if kind == "whole":
        path = report(make(run))
    elif kind == "two":
        path = report(
            make(run),
            make(tmp_path / "a-run-with-quite-a-long-name-of-its-own", layout="dp4:microbatches=2"),
        )
    elif kind == "died":
        make(run, done=3, predicted=False)
        for name in ("timeline.json", "communication.json", "memory.json", "schedule.txt"):
            (run / name).unlink()
        path = report(run)
    elif kind == "hostile":
        path = report(make(run, model="m" * 300, data="/d" * 200, reason="because " * 40))
    else:
        path = report(make(run, layout="dp4.pp4.tp2:microbatches=4"))
    page = opened(path, width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_timeout(60)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(OVERLAPS) == []
    words = page.inner_text("main")
    assert (
        "not finished: 3 of 20 steps" in words if kind == "died" else "One training step" in words
    )


def test_the_page_says_which_step_was_recorded(opened: Open, whole: Path) -> None:
    assert "Measured is step 7." in opened(whole).inner_text("main")


def test_no_name_runs(opened: Open, tmp_path: Path) -> None:
    run = make(
        tmp_path / "<img src=x onerror=owned=1>", model=HOSTILE, data=HOSTILE, reason=HOSTILE
    )
    page = opened(report(run))
    assert page.evaluate("window.owned") is None
    assert page.inner_text("h1") == "<img src=x onerror=owned=1>"
    assert HOSTILE in page.inner_text("header")
    assert page.query_selector("main img, main script") is None


def window(page: Any) -> tuple[float, float]:
    page.wait_for_timeout(50)
    board = page.query_selector(".board")
    return float(board.get_attribute("data-from")), float(board.get_attribute("data-to"))


def centre(page: Any) -> tuple[float, float]:
    box = page.query_selector_all(".board canvas")[-1].bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_wheel_drag_and_keys_zoom_and_move(opened: Open, whole: Path) -> None:
    page = opened(whole)
    first, last = window(page)
    page.query_selector(".board").scroll_into_view_if_needed()
    x, y = centre(page)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -100)
    assert window(page) == (first, last), "a wheel that nobody aimed here scrolls the page"
    page.query_selector(".board").scroll_into_view_if_needed()
    x, y = centre(page)
    page.mouse.click(x, y)
    page.mouse.wheel(0, -300)
    near = window(page)
    assert near[1] - near[0] < 0.7 * (last - first)
    assert first < near[0] < near[1] < last
    page.mouse.down()
    page.mouse.move(x + 120, y, steps=3)
    page.mouse.up()
    moved = window(page)
    assert moved[0] < near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0], abs=1)
    page.keyboard.press("ArrowRight")
    assert window(page)[0] > moved[0]
    page.keyboard.press("+")
    assert window(page)[1] - window(page)[0] < 0.7 * (moved[1] - moved[0])
    page.keyboard.press("0")
    assert window(page) == (first, last)
    for _ in range(40):
        page.keyboard.press("+")
    near = window(page)
    assert near[1] - near[0] == pytest.approx((last - first) / 5000, rel=0.05, abs=0.2)
    page.get_by_role("button", name="Show the whole step").click()
    assert window(page) == (first, last)


def test_fingers_pinch_and_move(opened: Open, whole: Path) -> None:
    page = opened(whole, 400, has_touch=True, is_mobile=True)
    first, last = window(page)
    page.query_selector(".board").scroll_into_view_if_needed()
    x, y = centre(page)
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": place, "y": y, "id": at} for at, place in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", x - 30, x + 30)
    for by in (40, 60, 90):
        fingers("touchMove", x - by, x + by)
    fingers("touchEnd")
    near = window(page)
    assert near[1] - near[0] < 0.6 * (last - first)
    fingers("touchStart", x)
    for by in (20, 40, 60):
        fingers("touchMove", x + by)
    fingers("touchEnd")
    assert window(page)[0] < near[0]


def test_what_is_under_the_pointer_is_reported_with_its_units(opened: Open, whole: Path) -> None:
    page = opened(whole)
    page.query_selector(".board").scroll_into_view_if_needed()
    box = page.query_selector_all(".board canvas")[-1].bounding_box()
    page.mouse.move(box["x"] + 68 + 12, box["y"] + 24 + 8)
    tip = page.inner_text(".tip")
    assert "Forward: microbatch 0, stage 0" in tip
    assert "measured: 10 ms" in tip
    assert "predicted: 9 ms" in tip
    page.mouse.move(box["x"] + 68 + 12, 5)
    assert page.query_selector(".tip").is_hidden()


def test_the_keyboard_goes_from_event_to_event_and_says_each(opened: Open, whole: Path) -> None:
    page = opened(whole)
    page.focus(".board")
    page.keyboard.press("n")
    assert "Forward: microbatch 0" in page.inner_text("[aria-live]")
    first = page.inner_text("[aria-live]")
    page.keyboard.press("n")
    assert page.inner_text("[aria-live]") != first
    page.keyboard.press("p")
    assert page.inner_text("[aria-live]") == first
    page.keyboard.press("Escape")
    assert page.query_selector(".tip").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_kind_is_drawn_in_its_colour(opened: Open, tmp_path: Path, scheme: str) -> None:
    run = make(tmp_path / "run", layout="pp2.tp2:schedule=zero-bubble,microbatches=4")
    page = opened(report(run), color_scheme=scheme)
    seen = page.evaluate(
        """(names) => {
          const canvas = [...document.querySelectorAll(".board canvas")].at(-1);
          const pen = canvas.getContext("2d");
          const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          const found = new Set();
          for (let i = 0; i < pixels.length; i += 4) found.add(pixels.slice(i, i + 3).join());
          const style = getComputedStyle(document.documentElement);
          return names.filter((name) => {
            const hex = style.getPropertyValue(`--${name}`).trim();
            return found.has([1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join());
          });
        }""",
        KINDS,
    )
    assert seen == KINDS


def test_ten_thousand_events_cost_no_more_than_the_width_there_is(
    opened: Open, tmp_path: Path
) -> None:
    run = make(tmp_path / "run", predicted=False)
    events = [
        Event(
            rank=n % 8, lane=("compute", "communication")[n // 8 % 2],
            kind=("F", "all-reduce")[n // 8 % 2], name="x", start=n * 1e-5, end=n * 1e-5 + 0.9e-5,
            stage=0, microbatch=n,
        )
        for n in range(15_000)
    ]  # fmt: skip
    (run / "timeline.json").write_text(Timeline.of("measured", 8, events).to_json())
    page = opened(report(run))
    drawn = """() => new Promise((done) => {
      const pen = CanvasRenderingContext2D.prototype, fill = pen.fillRect;
      let count = 0;
      pen.fillRect = function (...box) { count += 1; fill.apply(this, box); };
      document.querySelector("[aria-label='Zoom out']").click();
      const after = () => { pen.fillRect = fill; done(count); };
      requestAnimationFrame(() => requestAnimationFrame(after));
    })"""
    assert 500 < page.evaluate(drawn) < 16 * 1280
    board = page.query_selector(".board")
    assert float(board.get_attribute("data-draw-milliseconds")) > 0


def test_without_scripts_the_page_still_tells(opened: Open, whole: Path, chromium: Any) -> None:  # noqa: F811
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(whole.as_uri())
    assert "part of the step" in page.inner_text("noscript, pre")
    context.close()


def test_the_legend_picks_a_kind_out(opened: Open, whole: Path) -> None:
    page = opened(whole)
    button = page.get_by_role("button", name="backward", exact=True)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("width", [1280, 400])
def test_links_of_the_machine_are_drawn_and_listed(
    tmp_path: Path, opened: Open, width: int
) -> None:
    path = make(tmp_path / "run", layout="dp2.tp2", machine=gpus(HOSTILE))
    page = opened(report(path), width)
    cells = page.locator("table.links td")
    assert cells.count() == 16
    assert "NV4 50 GB/s" in cells.nth(1).inner_text()
    assert "SYS (31.5 GB/s)" in cells.nth(2).inner_text()
    assert page.locator("table.links th").nth(1).inner_text() == "GPU0 (rank 0)"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.owned") is None
    line = page.locator("svg[aria-label^='Ranks by'] g > line").first
    line.hover(force=True)
    tip = page.locator(".tip")
    assert "ranks 0 and" in tip.inner_text()
    assert "NV4" in tip.inner_text() or "SYS" in tip.inner_text()


def test_a_machine_that_was_not_probed_is_not_drawn(tmp_path: Path, opened: Open) -> None:
    page = opened(report(make(tmp_path / "run")))
    assert page.locator("table.links").count() == 0
    assert "it was not probed" in page.locator("main").inner_text()


def test_what_two_runs_sent_is_on_one_scale(tmp_path: Path, opened: Open) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    file = two / "communication.json"
    said = json.loads(file.read_text())
    for row in said["total"]:
        row["bytes"] //= 4
    file.write_text(json.dumps(said))
    page = opened(report(one, two))
    section = page.locator("section", has_text="Communication between ranks")
    widths = section.evaluate(
        """(node) => [...node.querySelectorAll(".pair > div")].map((half) => Math.max(
          ...[...half.querySelectorAll("svg rect")].map((bar) => bar.getBBox().width)))"""
    )
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.05)
