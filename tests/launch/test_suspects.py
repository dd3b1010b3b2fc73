"""A rank that is stuck is named, and none that waits for it, whatever was seen of each first."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

import hocket
from hocket.launch import failure
from hocket.launch.heartbeat import Beat, Heart, Hearts
from hocket.launch.rank import describe

SOURCES = Path(hocket.__file__).parent
OUTER = '  File "<frozen runpy>", line 198 in _run_module_as_main\n'
ANSWERS = (
    "Thread 0x00007f01 (most recent call first):\n"
    '  File "/lib/python/threading.py", line 1045 in _bootstrap_inner\n\n'
    "Current thread 0x00007f00 (most recent call first):\n"
)
STUCK = 7


def frame(place: str, code: str, function: str = "run") -> str:
    """A frame at the line of a source file that contains `code`."""
    path = SOURCES / place
    number = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if code in line)
    return f'  File "{path}", line {number} in {function}\n'


IN_TP = frame("runtime/collectives.py", "work.wait()", "all_reduce")
IN_PP = frame("runtime/pipeline/executor.py", "        work.wait()", "_take")
IN_DP = frame("runtime/data_parallel/buckets.py", "bucket.work.wait()", "wait")
REPLICAS = frame("training/replicas.py", "store.get(", "_shared")
IN_SLEEP = frame("training/faults.py", "PyDLL(None).sleep", "at")
CALLERS = frame("runtime/pipeline/executor.py", "def _take") + frame(
    "runtime/parallel.py", "def forward_backward"
)

# dp2.pp2.tp2: rank = tp + 2 dp + 4 pp. Rank 7 is stuck in the backward of the second replica: 6
# waits for it in tp, 2 and 3 for gradients of stage 1, the first replica for sums over dp.
WAITS = {
    0: IN_DP, 1: IN_DP, 2: IN_PP, 3: IN_PP, 4: IN_DP, 5: IN_DP, 6: IN_TP, STUCK: IN_SLEEP,
}  # fmt: skip
TP, DP = (20, 20, 18, 18, 20, 20, 17, 16), (4, 4, 3, 3, 4, 4, 3, 3)


def position(rank: int) -> dict[str, tuple[list[int], int]]:
    tp, dp = sorted((rank, rank ^ 1)), sorted((rank, rank ^ 2))
    return {"tp": (tp, TP[rank]), "dp": (dp, DP[rank])}


def dump(rank: int) -> str:
    return ANSWERS + WAITS[rank] + CALLERS + OUTER


def beats() -> dict[int, Beat]:
    """Records as the ranks write them and the parent reads them."""
    hearts = Hearts(8)
    try:
        for rank in range(8):
            heart = Heart(hearts.fd, rank)
            heart.begin_step(34)
            for _ in range(TP[rank]):
                heart.collective("all-reduce", "tp")
        return dict(enumerate(hearts.read()))
    finally:
        hearts.close()


def named(stacks: dict[int, str], positions: failure.Positions) -> object:
    error = failure.silence(5.0, stacks, True, positions, beats=beats())
    assert f"rank {error.rank} may hold up the others" in error.message  # type: ignore[attr-defined]
    return error.rank  # type: ignore[attr-defined]


def test_each_order_of_answers_names_the_stuck_rank() -> None:
    """The stuck rank never answers, and any of its victims may answer too late."""
    stacks = {rank: failure.trim(dump(rank)) for rank in range(8)}
    for count in range(8):
        for late in itertools.combinations([r for r in range(8) if r != STUCK], count):
            missing = {*late, STUCK}
            positions = {r: None if r in missing else position(r) for r in range(8)}
            assert named(stacks, positions) == STUCK, late


def test_a_stack_that_is_cut_names_no_victim() -> None:
    """A loaded machine reads a rank's stack while it is written, at any line."""
    whole = {rank: failure.trim(dump(rank)) for rank in range(8)}
    positions = {r: None if r == STUCK else position(r) for r in range(8)}
    for rank in range(8):
        lines = dump(rank).splitlines(keepends=True)
        for end in range(len(lines)):
            part = "".join(lines[:end])
            assert not failure.is_whole(part)
            assert not failure.is_whole(part + lines[end][:-1])
            for given in (positions, positions | {rank: None}):
                cut = whole | {rank: f"{failure.NO_STACK}:\n{failure.trim(part)}"}
                assert named(cut, given) == STUCK, (rank, end)
        assert failure.is_whole("".join(lines))


def test_an_order_of_progress_names_the_stuck_rank() -> None:
    """Where the stuck rank answers, since its call lets the interpreter go."""
    stacks = {rank: failure.trim(dump(rank)) for rank in range(8)}
    assert named(stacks, {rank: position(rank) for rank in range(8)}) == STUCK


def test_a_rank_without_a_stack_is_named_where_all_others_wait() -> None:
    stacks = {rank: failure.trim(dump(rank)) for rank in range(8)}
    stacks[5] = f"{failure.NO_STACK} (process 12 is waiting for a device)"
    del stacks[STUCK]
    assert named(stacks, {r: position(r) for r in stacks}) == 5


@pytest.mark.parametrize("stack", [IN_TP, IN_PP, IN_DP, REPLICAS])
def test_waits_in_c_are_known_by_their_line(stack: str) -> None:
    assert failure.waits(ANSWERS + stack + CALLERS)


def test_a_collective_in_a_compiled_graph_waits(tmp_path: Path) -> None:
    """Torch's call of an operator is innermost; the file that Inductor wrote names it."""
    file = tmp_path / "cmv7.py"
    file.write_text(
        "        cpp_fused_mul_0(arg0_1, buf0)\n"
        "        torch.ops._c10d_functional.wait_tensor.default(buf0)\n"
    )
    operator = '  File "/lib/python/site-packages/torch/_ops.py", line 871 in __call__\n'
    for line, waiting in ((1, False), (2, True)):
        graph = f'  File "{file}", line {line} in call\n'
        assert failure.waits(ANSWERS + operator + graph + CALLERS) is waiting
        assert not failure.waits(ANSWERS + IN_SLEEP + operator + graph)


def test_other_code_does_not_wait() -> None:
    other = frame("training/inputs.py", "def step")
    assert not failure.waits(ANSWERS + other + CALLERS)
    assert not failure.waits(ANSWERS + IN_SLEEP + CALLERS)
    assert not failure.waits(ANSWERS + '  File "/gone.py", line 3 in run\n' + CALLERS)


@pytest.mark.parametrize("package", ["runtime", "training"])
def test_each_wait_for_other_ranks_is_known_by_its_line(package: str) -> None:
    """A call of `wait` of a work and of `get` of a store: on one line, and of a known name."""
    unknown = []
    for path in sorted((SOURCES / package).rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of = ast.unparse(node.func.value)
            waits = node.func.attr == "wait" or (
                node.func.attr == "get" and re.search(r"\bstore\b|_store\b|store\(\)$", of)
            )
            line = f'  File "{path}", line {node.lineno} in run\n'
            if waits and not failure.waits(ANSWERS + line + CALLERS):
                unknown.append(
                    f"{path.relative_to(SOURCES)}:{node.lineno} {lines[node.lineno - 1]}"
                )
    assert not unknown


def test_failures_are_in_order_though_a_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = describe(ValueError("first"))
    monkeypatch.setattr("time.time", lambda: 0.0)
    later = describe(ValueError("later"))
    both = [
        failure.Failure(rank, None, report["time"], report)
        for rank, report in ((1, later), (0, cause))
    ]
    assert failure.first(both).rank == 0
