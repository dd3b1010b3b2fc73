"""The terms that users read are those of the field: PyTorch, Megatron-LM, transformers, vLLM."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TABLES = {"families.md", "served-families.md"}
"""Tables of measurements, written by their own commands."""
MERGING = {"accuracy.md", "accuracy-cpu.md", "accuracy-serving.md", "rehearsals.md"}
"""Pages that quote the output of programs as they were when it was measured."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "src" / "hocket" / "jobs" / "templates").iterdir()),
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name not in TABLES | MERGING and not page.name.endswith(".ko.md")
    ),
]

BANNED = {
    r"foretell\w*|foretold|foresight": "predict, prediction",
    r"told|tells?": "reports, specified, is given",
    r"beside": "compared with, alongside, next to, in addition to",
    r"(?:un)?priced|prices (?:a|an|it|its|GPUs|each|every|what)": "estimated, predicted",
    r"fullest": "peak rank, peak memory per rank",
    r"whoever|nobody|somebody|anybody|everybody": "the actor's name",
    r"anew": "again",
    r"alike": "identical, both",
    r"felt|to feel|feels": "emulated",
    r"weigh(?:s|ed|ing)?": "evaluate, consider",
    r"play(?:s|ed|ing)?": "simulate",
    r"twins?": "proxy model",
    r"refus(?:e|es|ed|als?|ing)": "reject, is not supported",
    r"rooms?|wings?|slabs?|floors?": "package, layer, capacity",
    r"held(?![- ]out)|holds? whole": "stored, kept, replicated",
    r"lies|lie(?= (?:in|on|where|side|there|with))": "is, is stored",
    r"stands?(?! for)": "is, is stored",
    r"(?<!engine\.)products?": "matmul, GEMM",
    r"talks?|talking|talked|speaks?": "communicate",
    r"(?<!time )slices?": "shard, sequence shard",
    r"put off": "deferred",
    r"go(?:es)? on": "continue, resume",
    r"let go": "freed",
    r"(?<!there )(?<!there)(?:is|are) no (?!longer|further|more|less|\w+er\b)": "is not a",
    r"(?<!--)rounds?(?! to)": "decode step",
    r"says?|said": "reports, prints, specifies",
    r"pieces?": "shard, chunk",
    r"shares? of|in shares|shares": "fraction of, shard of",
    r"messages? (?:between|over|of ranks|is counted|are counted|passes|crosses?)|every message": (
        "collective, send/recv, communication"
    ),
    r"everyone|those of others": "the actor's name",
    r"on the wire|trips? over": "communication, copies over the link",
    r"of one's own": "custom, your own",
    r"wait(?:s|ing)? for ?ever": "deadlock",
    r"would do|will do": "is enough; the full command",
    r"probe does(?! not)": "hocket probe measures it",
    r"idle share": "idle fraction",
    r"who may come|bad news|sent away": "access control, errors, rejected",
    r"worlds? of (?:its|their) own": "independent replica, process group",
}
WORDS = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words}))\b" for number, words in enumerate(BANNED)),
    re.IGNORECASE,
)

ALLOWED: dict[tuple[str, str], str] = {
    ("src/hocket/launch/symptoms.py", "Connection refused"): "the system's own text",
    ("CHANGELOG.md", "`alike`"): "the old name of a key",
}
"""(file, a part of the text): why the word is the right one there."""


EVERYWHERE = re.compile(
    r"(?<![a-z])(?:un)?(?:told|beside|foretells?|foretold|foresight|priced|fullest|twins?|felt"
    r"|weighed|anew|alike|whoever|puts? off|lets? go)(?![a-z])"
    r"|(?:Told|Beside|Foretold|Foresight|Priced|Fullest|Twin|Weighed|Alike|Whoever)(?![a-z])"
    r"|(?:TOLD|BESIDE|PRICED|FULLEST|WEIGHED|ALIKE)(?![A-Z])"
)
"""Words with one meaning in these sources: banned in identifiers, comments and docstrings too."""
CEILING = 20
ALLOWED_LINES: dict[tuple[str, str], str] = {
    ("src/hocket/doctor/steps.py", '"default_beside_fastest"'): "a key of reports",
    ("src/hocket/jobs/report.py", "-beside-{found[1].name}"): "a file's name",
    ("src/hocket/spec/renamed.py", '"alike": "num_similar"'): "the old name of a key",
}
"""(file, a part of the line): why the word stays."""


def found(text: str) -> Iterator[tuple[str, str]]:
    """Each banned word of a text, and what replaces it."""
    replacements = list(BANNED.values())
    for match in WORDS.finditer(text):
        assert match.lastgroup is not None
        yield match[0], replacements[int(match.lastgroup[1:])]


def literals(source: Path) -> Iterator[tuple[int, str]]:
    """The texts of a module: every string with a blank in it that is not a docstring."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in alone and " " in text.strip():
            yield node.lineno, text


def headings(source: Path) -> Iterator[tuple[int, str]]:
    """The heads of a table: a sequence of texts one of which has a blank, down to single words."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Tuple | ast.List):
            texts = [n.value for n in node.elts if isinstance(n, ast.Constant)]
            words = [text for text in texts if isinstance(text, str)]
            if len(words) > 1 and any(" " in word for word in words):
                yield from ((node.lineno, word) for word in words)


def allowed(page: Path, text: str) -> bool:
    name = page.relative_to(ROOT).as_posix()
    return any(file == name and part in text for file, part in ALLOWED)


def complaints(page: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{page.relative_to(ROOT)}:{number}: {word!r}: {instead}"
        for number, text in lines
        if not allowed(page, text)
        for word, instead in found(text)
    ]


def test_messages_use_the_terms_of_the_field() -> None:
    assert not [c for source in SOURCES for c in complaints(source, literals(source))]


PRINTING = [s for s in SOURCES if {"cli", "jobs", "reporting", "doctor"} & set(s.parts)]


def test_heads_of_tables_use_the_terms_of_the_field() -> None:
    assert not [c for source in PRINTING for c in complaints(source, headings(source))]
    counted = [
        f"{source.name}:{line}: {text}: calls, collectives, send/recv"
        for source in PRINTING
        for line, text in headings(source)
        if re.search(r"\bmessages?\b", text)
    ]
    assert not counted, "ranks call collectives"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    assert not complaints(page, iter(enumerate(page.read_text("utf-8").splitlines(), 1)))


def test_sources_use_the_terms_of_the_field() -> None:
    counted: list[str] = []
    for source in SOURCES:
        name = source.relative_to(ROOT).as_posix()
        parts = [part for file, part in ALLOWED_LINES if file == name]
        for number, line in enumerate(source.read_text("utf-8").splitlines(), 1):
            if not any(part in line for part in parts):
                counted += [f"{name}:{number}: {m[0]}" for m in EVERYWHERE.finditer(line)]
    assert not counted
    for file, part in ALLOWED_LINES:
        assert part in (ROOT / file).read_text("utf-8"), f"{file}: no longer: {part}"
    assert len(ALLOWED_LINES) <= CEILING


def test_a_word_in_a_name_is_found() -> None:
    text = "_untold = told_by(Priced, best.beside); BESIDE  # all alike, put off, let go, whoever"
    assert len(EVERYWHERE.findall(text)) == 9
    assert not EVERYWHERE.search("besides, folded, TOLDEST, unlike, foretaste, a twinkle")


def test_reports_use_the_terms_of_the_field() -> None:
    reporting = ROOT / "src" / "hocket" / "reporting"
    found: list[str] = []
    for page in (*(reporting / "assets").glob("*.js"), reporting / "words" / "tour.en.toml"):
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            quoted = re.findall(r'"[^"]*"|`[^`]*`', line) if page.suffix == ".js" else [line]
            texts = [re.sub(r"\$?{[^}]*}", "", text) for text in quoted if " " in text]
            found += complaints(page, iter((number, text) for text in texts))
    assert not found


def test_the_unreleased_changes_use_the_terms_of_the_field() -> None:
    page = ROOT / "CHANGELOG.md"
    assert not complaints(page, iter(enumerate(page.read_text("utf-8").splitlines(), 1)))


def test_what_is_allowed_is_little_and_there() -> None:
    assert len(ALLOWED) <= 20
    for file, part in ALLOWED:
        assert part in (ROOT / file).read_text(encoding="utf-8"), f"{file}: no longer: {part}"


def test_a_banned_word_is_found() -> None:
    text = "the fullest rank held what was foretold"
    assert [word for word, _ in found(text)] == ["fullest", "held", "foretold"]
    assert not list(found("there is no file; held-out loss; FFT stands for a transform"))
