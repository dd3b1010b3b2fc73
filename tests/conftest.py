"""One fork server for the session, and the order of tests: those that need least come first, or of
several files at once those that need most."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.hub_server import loopback  # noqa: F401  a fixture
from tests.ranks import RankPool
from tests.rotation import has_turn, rotates, seed
from tests.support.rehearsal import warm_workers, workers  # noqa: F401  fixtures
from tests.support.runs import runs, whole  # noqa: F401  fixtures
from tests.support.warm import warm  # noqa: F401  a fixture

# No test asks the real Hub; those of the Hub have one on loopback (tests/hub_server.py).
os.environ["HF_HUB_OFFLINE"] = "1"

NEEDS = ("torch", "ranks", "gpu")

# Every process that a test starts reads the bytecode of our modules that the first one wrote,
# also where PYTHONDONTWRITEBYTECODE is set: to compile them takes as long as many a test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores Ctrl-C for what it starts with `&`, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that others use as well is slow now and then: that is no fault of what is tested.
settings.register_profile("hocket", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hocket")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    part = os.environ.get("HOCKET_TESTS") or seed()
    terminalreporter.line(f"part of the rotating cases: HOCKET_TESTS={part} replays it")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist takes files in our order: its own, by their number of tests, leaves files of few
    long tests to the end, where one worker waits for the other."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def need(item: pytest.Item) -> int:
        return max(
            (1 + NEEDS.index(m.name) for m in item.iter_markers() if m.name in NEEDS), default=0
        )

    if rotates(config.args) and not config.option.keyword:
        left_out = [item for item in items if not has_turn(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    items.sort(key=need)
    if hasattr(config, "workerinput"):  # of pytest-xdist, where long files come first instead
        seconds: Counter[Path] = Counter()
        for item in items:
            limit = item.get_closest_marker("timeout")
            most = limit.args[0] if limit else 120
            seconds[item.path] += most if need(item) > 1 else need(item)
        items.sort(key=lambda item: -seconds[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("train") and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the extra train")
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    elif item.get_closest_marker("torch"):
        # In-process torch beside waiting ranks: one thread, or the two cores are fought over.
        pytest.importorskip("torch").set_num_threads(1)
    elif item.get_closest_marker("ranks") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch in its ranks")


@pytest.fixture(scope="session", autouse=True)
def state_copies() -> Iterator[None]:
    """Copies of ranks' states lie in memory, in this session's own folder, which is empty at the
    end: a run removes what it made."""
    if not os.access("/dev/shm", os.W_OK):
        yield
        return
    root = Path("/dev/shm") / f"state-copies-of-tests-{os.getpid()}"
    root.mkdir(mode=0o700)
    os.environ["HOCKET_STATE_COPIES"] = str(root)
    yield
    del os.environ["HOCKET_STATE_COPIES"]
    left = list(root.rglob("*"))
    shutil.rmtree(root, ignore_errors=True)
    assert not left, left


@pytest.fixture(scope="session", autouse=True)
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the tests stay out of the user's ledger."""
    before = os.environ.get("HOCKET_LEDGER")
    os.environ["HOCKET_LEDGER"] = str(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    yield
    if before is None:
        del os.environ["HOCKET_LEDGER"]
    else:
        os.environ["HOCKET_LEDGER"] = before


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run("tests.room.cases:case", world_size=4, ...)`: see tests/ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()
