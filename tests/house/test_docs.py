"""Docs cannot rot: every command in them is run, every page they link to is there."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import VERBS, main
from hocket.jobs.tour_stops import STOPS, TIMED
from hocket.schedules.registry import build_schedule
from hocket.spec import matrix, renamed
from hocket.spec.layout import Layout
from tests.hub_server import TOKEN, Repo, folder
from tests.rotation import part

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHANGES = ROOT / "CHANGELOG.md"
GENERATED = ROOT / "docs" / "reference" / "cli.md"
OF_THE_HUB = (ROOT / "docs" / "how-to" / "hub.md", ROOT / "README.md")
"""Their commands are run in their order, with a Hub on loopback."""
SIZING = ROOT / "docs" / "how-to" / "serve-plan.md"
"""Its trace of requests is a file of its command."""
FEW = {"--steps": "2", "--max-new-tokens": "4", "--port": "0"}
"""What the test makes smaller; everything else runs as it is written."""


def split(page: Path) -> tuple[dict[str, list[str]], str]:
    """Fenced blocks by language, and the page without them."""
    fenced: dict[str, list[str]] = {}
    rest: list[str] = []
    inside: list[str] | None = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if inside is None:
                inside = []
                language = line[3:].strip()
            else:
                fenced.setdefault(language, []).append("\n".join(inside) + "\n")
                inside = None
        else:
            (rest if inside is None else inside).append(line)
    assert inside is None, f"{page}: a block is not closed"
    return fenced, "\n".join(rest)


def blocks(page: Path, language: str) -> list[str]:
    return split(page)[0].get(language, [])


def commands(page: Path) -> list[list[str]]:
    """The `hocket ...` lines of a page, in their order, without `> FILE`; a line with `...` is
    no command, nor is one that continues another program's (torchrun, srun)."""
    if page == GENERATED:
        return []
    lines = page.read_text().splitlines()
    found = []
    fenced = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("```"):
            fenced = not fenced
        text = line.strip().removeprefix(".venv/bin/")
        continued = before.endswith("\\")
        if (
            (fenced or line.startswith("    "))
            and not continued
            and re.match(r"hocket [a-z]", text)
        ):
            found.append(shlex.split(text.partition(" > ")[0])[1:])
    return [words for words in found if "..." not in words]


FREE = ("--port", "--data", "--run")
"""Flags whose values are the user's."""


def shape(words: list[str]) -> list[str]:
    """A command without the values that a user would change, and without the shell's part."""
    ends = [at for at, word in enumerate(words) if word in (">", "&")]
    own = words[: ends[0]] if ends else words
    return [word for before, word in zip(["", *own], own, strict=False) if before not in FREE]


@functools.cache
def run_by_paths() -> list[list[str]]:
    """The shapes of all commands of the scripts in tests/paths."""
    scripts = sorted((ROOT / "tests" / "paths").glob("*.sh"))
    lines = [line for script in scripts for line in script.read_text("utf-8").splitlines()]
    return [shape(shlex.split(line)[1:]) for line in lines if line.startswith("hocket ")]


def fewer(words: list[str]) -> list[str]:
    if "--resume" in words:  # which says how many more
        return words
    if words == ["tour"]:  # the stops that judge times are run by tests/jobs/test_tour.py
        return [*words, "--stops", *(key for key in STOPS if key not in TIMED)]
    return [
        FEW.get(words[at - 1], word) if at and words[at - 1] in FEW else word
        for at, word in enumerate(words)
    ]


PRINTED: dict[str, list[str]] = {}
"""The plans that a page shows with what they print, by the command."""
for _page in PAGES:
    for _command, _text in re.findall(
        r"^(?:    )?hocket (plan [^\n]+)\n(?:```\n)?\n*```text\n(.*?)```",
        _page.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    ):
        PRINTED.setdefault(shlex.join(shlex.split(_command)), []).append(_text)


def quick(words: list[str]) -> bool:
    return words[0] in ("schedule", "models", "plan", "validate")


def test_the_pages_hold_commands() -> None:
    verbs = {words[0] for page in PAGES for words in commands(page)}
    assert verbs >= set(VERBS) - {"demo"}


@pytest.mark.parametrize(
    "words",
    [w for page in PAGES if page not in OF_THE_HUB for w in commands(page) if quick(w)],
    ids=shlex.join,
)
def test_quick_commands_run(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if {"--trace", "--html"} & set(words):
        monkeypatch.chdir(tmp_path)
    if "--trace" in words:
        (shown,) = [b for b in blocks(SIZING, "") if '"arrival"' in b]
        Path(words[words.index("--trace") + 1]).write_text(shown)
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out
    for line in "".join(PRINTED.get(shlex.join(words), [])).splitlines():
        assert " ".join(line.split()) in out, "the page shows what is not printed any more"


def served(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve until one request has been answered, and end as an operator would."""
    from hocket.cli import serve

    codes: list[int] = []

    def visit(address: str) -> None:
        try:
            body = json.dumps({"prompt": "hocket", "max_tokens": 4}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                codes.append(answer.status)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            threading.Thread(target=visit, args=(event["address"],)).start()

    with monkeypatch.context() as patch:
        patch.setattr(serve, "Lines", lambda: hear)
        assert main(words) == 0, shlex.join(words)
    assert codes == [200]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def repos_of_the_page(tmp_path: Path) -> list[Repo]:
    """What the page of the Hub names, tiny: a Qwen3 with weights and tokenizer, and stories."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hocket.training.tokenizer import resolve_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    resolve_tokenizer("bytes", model_dir=None).save(tmp_path / "qwen")
    story = "Once upon a time there was a layout of many ranks. "
    rows = "".join(json.dumps({"text": f"{i}. {story * 20}"}) + "\n" for i in range(40)).encode()
    data = {"data/train.jsonl": rows, "data/validation.jsonl": rows}
    return [
        Repo("Qwen/Qwen3-0.6B", folder(tmp_path / "qwen")),
        Repo("roneneldan/TinyStories", data, kind="dataset"),
    ]


def elsewhere(page: Path) -> bool:
    """Whether a script of tests/paths runs every slow command of a page, in processes of their own;
    the tour has a test of its own, tests/jobs/test_tour.py."""
    slow = [words for words in commands(page) if not quick(words) and words != ["tour"]]
    return all(shape(words) in run_by_paths() for words in slow)


@pytest.mark.timeout(400)  # a page holds up to a dozen commands
@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "page",
    [PAGES[0], *part([p for p in PAGES[1:] if not elsewhere(p)], 5)],
    ids=lambda page: page.name,
)
def test_commands_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page in OF_THE_HUB:
        hub = request.getfixturevalue("loopback")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        request.getfixturevalue("stack").enter_context(hub(*repos_of_the_page(tmp_path)))
    if any(words[0] == "rehearse" or "--dry-run" in words for words in commands(page)):
        request.getfixturevalue("warm_workers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))  # what a conversation reads
    for name in ("CHANGELOG.md", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for number, code in enumerate(blocks(page, "toml")):
        (tmp_path / f"{'run' if number == 0 else number}.toml").write_text(code)
    for code in blocks(page, "jinja"):
        (tmp_path / "template.jinja").write_text(code)
    for code, name in zip(blocks(page, "jsonl"), ("chats", "pairs"), strict=False):
        (tmp_path / f"{name}.jsonl").write_text(code)
    for words in commands(page):
        if words[0] == "serve":
            served(fewer(words), monkeypatch)
        elif (page in OF_THE_HUB or not quick(words)) and words[0] != "demo":
            assert main(fewer(words)) == 0, shlex.join(words)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{page.name}-{number}")
        for page in PAGES
        for number, code in enumerate(blocks(page, "python"))
    ],
)
def test_python_blocks_run(
    page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("page", "number", "code"),
    part(
        [
            pytest.param(page, number, code, id=f"{page.name}-{number}")
            for page in PAGES
            for number, code in enumerate(blocks(page, "python torchrun"))
        ],
        2,
    ),
)
def test_torchrun_blocks_run_and_print_what_the_page_says(
    page: Path, number: int, code: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(code)
    shown = [b for b in blocks(page, "") if b.startswith("torchrun") and "train.py" in b]
    assert len(shown) == len(blocks(page, "python torchrun"))
    said = shown[number]
    command, _, output = said.partition("\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


@pytest.mark.parametrize(
    "target",
    [
        "setup",
        "demo",
        "test",
        "test-all",
        "test-base",
        "test-newest",
        "docs",
        "check",
        "bench",
        "help",
    ],
)
def test_make_knows_its_targets(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"make {target}" in (ROOT / "CONTRIBUTING.md").read_text()


README = (ROOT / "README.md").read_text("utf-8")
MEASURED = [
    line
    for line in README.partition("## Measured")[2].partition("\n## ")[0].splitlines()
    if "](" in line
]
"""The rows of the README's measured figures."""


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_figure_of_the_readme_is_on_the_page_it_links_to(row: str) -> None:
    _, _, figures, link, _ = row.split("|")
    page = (ROOT / link.partition("](")[2].rpartition(")")[0]).read_text("utf-8")
    numbers = re.findall(r"\d[\d.]*", figures)
    assert numbers
    assert not [
        number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", page)
    ]


def test_the_readme_is_one_screen_and_begins_with_the_two_commands() -> None:
    code = blocks(ROOT / "README.md", "")
    assert code[0].split("\n")[:2] == ["pip install '.[train,serve]'", "hocket demo"]
    assert len(README.splitlines()) < 120


LAYOUTS = {
    text: page.name
    for page in PAGES
    if page != GENERATED
    for text in re.findall(r"--layout ([a-z]+\d[^\s`'\"|)]*)", page.read_text("utf-8"))
}
"""Every layout that a page gives to a command, with one of its pages."""


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_of_the_pages_has_a_schedule(text: str) -> None:
    """Commands for GPUs are not run here, and their layouts have to be right as well."""
    layout = Layout.parse(text)
    build_schedule(layout, layout.microbatches or 4 * layout.pp)


@pytest.mark.parametrize("page", [*PAGES, CHANGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_changes_name_flags_that_exist_and_every_deprecated_spelling() -> None:
    text, _, deprecated = CHANGES.read_text("utf-8").partition("### Deprecated spellings\n")
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GENERATED.read_text("utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags
    names = {f"--{name.replace('_', '-')}" for name in (*renamed.OPTIONS, *renamed.SWITCHES)}
    names |= {f"hocket {verb}" for verb in renamed.VERBS}
    names |= {f"hocket.{name}" for name in renamed.EXPORTS}
    names |= {*renamed.JSON_KEYS, *renamed.COMPLETION, *renamed.PARALLEL}
    assert not [name for name in names if f"`{name}`" not in deprecated]
    assert len(text + deprecated) >= 20_000, "commands of the pages train on it"


def test_the_default_layouts_of_the_matrices_are_on_their_page() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "check.md").read_text().split())
    *others, last = (f"`{layout}`" for layout in matrix.SERVED_LAYOUTS)
    assert f"{', '.join(others)} and {last}" in page
    assert f"The default `--layouts` are {len(matrix.LAYOUTS)}: " in page


def test_every_folder_of_the_cache_is_on_the_page_of_the_installation() -> None:
    code = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    kinds = set(re.findall(r"(?:cache_folder|computed_file)\(\s*\"([^\"]+)", code))
    text = (ROOT / "docs/how-to/install.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", text.partition("## What hocket keeps")[2], re.MULTILINE)
    assert kinds == set(re.findall(r"`([^`]+)`", " ".join(rows)))


def test_the_reference_is_what_the_commands_say() -> None:
    sys.path.insert(0, str(GENERATED.parent))
    try:
        from write_cli import glossary, json_page, page
    finally:
        sys.path.pop(0)
    assert GENERATED.read_text() == page(), "run: .venv/bin/python docs/reference/write_cli.py"
    assert GENERATED.with_name("json.md").read_text() == json_page()
    assert GENERATED.with_name("glossary.md").read_text() == glossary()


def test_torchrun_of_several_hosts_meets() -> None:
    """Without a node rank and an address torchrun's own default waits for ever."""
    shown = [
        (page.name, words)
        for page in PAGES
        for words in re.findall(r"torchrun (--nnodes (?:\\\n|[^\n`])*)", page.read_text("utf-8"))
        if "-m --" in words
    ]
    assert {"several-hosts.md", "serve.md", "fine-tune-70b.md"} <= {name for name, _ in shown}
    for name, words in shown:
        fixed = ("--node-rank", "--master-addr", "--master-port")
        changing = ("--rdzv-backend", "--rdzv-endpoint")
        for flag in changing if "--nnodes 1:" in words else fixed:
            assert flag in words, f"{name}: torchrun {words}"
