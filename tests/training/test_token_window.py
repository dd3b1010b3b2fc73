"""Windows of a stream: its tokens, each sample once, in any order of asking, on a bounded disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.jobs.record import JobRecorder
from hocket.jobs.request import JobRequest, request
from hocket.spec.errors import DataError, OptionError
from hocket.spec.files import json_crc32
from hocket.spec.run import CHECKSUM, RunFolder
from hocket.training.data import prepare_data
from hocket.training.dataset import BatchOrder, WindowDataset, open_dataset
from hocket.training.token_manifest import TRAIN, VALID, Tokens, verify_tokens
from hocket.training.token_window import MARKS, PARTS, window_file
from hocket.training.tokenizer import byte_tokenizer
from hocket.training.windowed import window_maker, windows_made

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

SEQ_LEN, BATCH, STEPS, SIZE = 16, 4, 100, 8_000
DOCUMENTS = [f"{number:05d} " * (number % 7 + 1) for number in range(900)]
SAMPLES = (SIZE // PARTS // 2 - 1) // SEQ_LEN
"""Of each window: two bytes a token."""


def write(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


@pytest.fixture
def job(tmp_path: Path) -> JobRequest:
    write(tmp_path / "a.jsonl", DOCUMENTS)
    return request(
        {
            "model": "tiny-llama", "data": str(tmp_path / "a.jsonl"), "run": str(tmp_path / "run"),
            "seq_len": SEQ_LEN, "global_batch": BATCH, "steps": STEPS, "tokenizer": "bytes",
            "streaming": True, "token_window": f"{SIZE}B",
        }
    )  # fmt: skip


def prepared(job: JobRequest, **options: Any) -> RunFolder:
    assert job.run is not None
    folder = RunFolder(job.run)
    prepare_data(
        folder.data, byte_tokenizer(), job.data, eval_paths=job.eval_data, seq_len=SEQ_LEN,
        global_batch=BATCH, streaming=True, samples=STEPS * BATCH, token_window=SIZE, **options,
    )  # fmt: skip
    return folder


def stream(folder: RunFolder, windows: int) -> list[int]:
    """The tokens that some windows have together, found without windows."""
    held = Tokens.load(folder.data).valid_documents
    once = [id for text in DOCUMENTS[held:] for id in (*text.encode(), 256)]
    return (once * (2 + windows * SAMPLES * SEQ_LEN // len(once)))[
        : windows * SAMPLES * SEQ_LEN + 1
    ]


def tokens_of(folder: RunFolder, window: int) -> list[int]:
    found: list[int] = np.fromfile(window_file(folder.data, window), np.uint16).tolist()
    return found


def expected(folder: RunFolder, window: int) -> list[int]:
    first = window * SAMPLES * SEQ_LEN
    return stream(folder, window + 1)[first : first + SAMPLES * SEQ_LEN + 1]


def on_disk(folder: RunFolder) -> int:
    found = 0
    for path in folder.data.glob("*window-*"):
        with contextlib.suppress(FileNotFoundError):  # deleted or renamed meanwhile
            found += path.stat().st_size
    return found


def test_windows_are_the_stream_in_any_order_and_after_any_start(job: JobRequest) -> None:
    folder = prepared(job)
    orders = [list(range(20)), [7, 3, 19, 0, 1, 2, 12]]
    rng = random.Random(1)
    for order in orders:
        (folder.data / MARKS).unlink(missing_ok=True)
        maker = window_maker(folder, job)
        assert maker is not None
        for window in order:
            if rng.random() < 0.3:  # another process continues
                maker = window_maker(folder, job)
                assert maker is not None
                maker.clean()
            maker._current = window
            maker.make(window)
            assert tokens_of(folder, window) == expected(folder, window), (order, window)
            assert on_disk(folder) <= SIZE
    assert len(DOCUMENTS) < 20 * SAMPLES  # the last windows repeat the stream


def test_each_sample_is_taken_once_by_any_data_ranks(job: JobRequest) -> None:
    """Threads as data ranks; the disk is measured while they take their samples."""
    folder, taken, largest = prepared(job), {}, [0]
    over = threading.Event()

    def measure() -> None:
        while not over.is_set():
            largest[0] = max(largest[0], on_disk(folder))

    watch = threading.Thread(target=measure)
    with windows_made(folder, job):
        tokens = Tokens.load(folder.data)
        watch.start()
        for data_ranks, steps in ((1, range(30)), (2, range(30, 70)), (4, range(70, STEPS))):
            data = [open_dataset(folder.data, TRAIN, tokens, SEQ_LEN, 5) for _ in range(data_ranks)]
            for step in steps:
                for rank, one in enumerate(data):
                    assert isinstance(one, WindowDataset)
                    indices = BatchOrder(BATCH, data_ranks).rank_indices(step, rank)
                    batch = one.batch(indices)
                    places = indices // SAMPLES * SAMPLES * SEQ_LEN + one.starts(indices)
                    for index, place, ids, labels in zip(
                        indices.tolist(), places.tolist(), batch.ids, batch.labels, strict=True
                    ):
                        assert index not in taken
                        taken[index] = place
                        row = (*ids.tolist(), int(labels[-1]))
                        assert row == tuple(stream_of(folder)[place : place + SEQ_LEN + 1])
        over.set()
        watch.join()
    assert sorted(taken) == list(range(STEPS * BATCH))
    assert len(set(taken.values())) == STEPS * BATCH
    whole = STEPS * BATCH // SAMPLES * SAMPLES  # of all windows but the last: every sample
    assert sorted(taken[i] for i in range(whole)) == [i * SEQ_LEN for i in range(whole)]
    assert [taken[i] for i in range(whole)] != sorted(taken[i] for i in range(whole))
    assert 0 < largest[0] <= SIZE
    assert STEPS * BATCH * SEQ_LEN * 2 > 1.5 * SIZE


_STREAMS: dict[Path, list[int]] = {}


def stream_of(folder: RunFolder) -> list[int]:
    if folder.path not in _STREAMS:
        _STREAMS[folder.path] = stream(folder, STEPS * BATCH // SAMPLES + 2)
    return _STREAMS[folder.path]


def test_a_start_makes_the_window_in_which_it_continues(job: JobRequest) -> None:
    """And deletes none of those around it before a rank asks."""
    folder = prepared(job)
    maker = window_maker(folder, job)
    assert maker is not None
    for window in (2, 3, 4):
        maker._current = 3
        maker.make(window)
    step = 3 * SAMPLES // BATCH + 1
    newest = folder.checkpoints / f"step-{step:06d}"
    newest.mkdir(parents=True)
    (newest / "manifest.json").write_text("{}")
    again = window_maker(folder, job)
    assert again is not None
    again.clean()
    window_file(folder.data, 4).unlink()
    assert again.serve()
    assert not again.serve()
    assert sorted(again._there()) == [2, 3, 4]
    (folder.data / ".wanted-5").touch()
    assert again.serve()
    assert again.serve()
    assert not again.serve()
    assert sorted(again._there()) == [4, 5, 6]
    assert (STEPS * BATCH - 1) // SAMPLES == 6  # none is made behind the last step's


def test_held_out_are_the_first_documents(job: JobRequest) -> None:
    folder = prepared(job, eval_fraction=0.2)
    tokens = Tokens.load(folder.data)
    held = np.fromfile(folder.data / VALID, np.uint16).tolist()
    first = DOCUMENTS[: tokens.valid_documents]
    assert held == [id for text in first for id in (*text.encode(), 256)]
    assert 0.2 * SAMPLES * SEQ_LEN <= len(held) == tokens.valid_tokens
    assert len(held) - len(first[-1]) <= 0.2 * SAMPLES * SEQ_LEN
    assert verify_tokens(folder.data, SEQ_LEN) is None


def test_a_damaged_window_is_made_again(job: JobRequest) -> None:
    folder = prepared(job)
    maker = window_maker(folder, job)
    assert maker is not None
    maker.make(0)
    maker.make(1)
    file = window_file(folder.data, 1)
    good = file.read_bytes()
    for bad in (good[:-2], good[:40] + bytes([good[40] ^ 4]) + good[41:]):
        file.write_bytes(bad)
        again = window_maker(folder, job)
        assert again is not None
        again.clean()
        assert not file.exists()
        assert window_file(folder.data, 0).exists()
        again.make(1)
        assert file.read_bytes() == good


def test_data_that_changed_ends_the_run(job: JobRequest, tmp_path: Path) -> None:
    folder = prepared(job)
    maker = window_maker(folder, job)
    assert maker is not None
    maker.make(0)
    window_file(folder.data, 0).unlink()
    other = [text.replace("1", "2") for text in DOCUMENTS]
    write(tmp_path / "a.jsonl", other)  # of the same size
    again = window_maker(folder, job)
    assert again is not None
    with pytest.raises(DataError, match="window 0 of the streamed tokens is not what it was"):
        again.make(0)
    write(tmp_path / "a.jsonl", other[:-1])
    with pytest.raises(DataError, match="has changed since the run began"):
        window_maker(folder, job)


def test_an_error_of_the_stream_is_raised_where_a_rank_waits(
    job: JobRequest, tmp_path: Path
) -> None:
    folder = prepared(job)
    text = (tmp_path / "a.jsonl").read_text()
    cut = text.rindex("{")
    (tmp_path / "a.jsonl").write_text(text[:cut] + "(" + text[cut + 1 :])
    with windows_made(folder, job):
        data = open_dataset(folder.data, TRAIN, Tokens.load(folder.data), SEQ_LEN, 5)
        every = (data.batch([index]) for index in range(STEPS * BATCH))
        with pytest.raises(DataError, match="is not JSON"):
            list(every)


def test_a_manifest_cannot_have_a_rank_wait_for_windows_that_nobody_makes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a word. " * 400)
    tokens = prepare_data(
        tmp_path / "data", byte_tokenizer(), [str(tmp_path / "a.txt")], seq_len=SEQ_LEN,
        global_batch=BATCH,
    )  # fmt: skip
    dataclasses.replace(tokens, window=2).save(tmp_path / "data")
    with pytest.raises(DataError, match="is not a manifest of token files: window is 2 with"):
        Tokens.load(tmp_path / "data")
    tokens = dataclasses.replace(tokens, window=2, train_documents=0).save(tmp_path / "data")
    for reads in (
        lambda: verify_tokens(tmp_path / "data", SEQ_LEN),
        lambda: open_dataset(tmp_path / "data", TRAIN, tokens, SEQ_LEN),
    ):
        with pytest.raises(DataError, match=r"windows of a stream, and tokens\.bin is there"):
            reads()


def test_a_manifest_cannot_have_larger_windows_made(job: JobRequest) -> None:
    folder = prepared(job)
    dataclasses.replace(Tokens.load(folder.data), window=1 << 50).save(folder.data)
    with pytest.raises(DataError, match=f"8000B, makes windows of {SAMPLES}"):
        window_maker(folder, job)
    options = dataclasses.replace(job.options, token_window=None)
    with pytest.raises(DataError, match="none, makes windows of 0"):
        window_maker(folder, dataclasses.replace(job, options=options))


def test_a_start_reads_nothing_before_its_window(job: JobRequest, tmp_path: Path) -> None:
    """The lines before it are spoiled, of the same size: reading one would be an error. Of
    several files, too."""
    texts = (tmp_path / "a.jsonl").read_bytes()
    half = texts.index(b"\n", len(texts) // 2) + 1
    folders = [tmp_path / "two"]
    folders[0].mkdir()
    (folders[0] / "train-1.jsonl").write_bytes(texts[:half])
    (folders[0] / "train-2.jsonl").write_bytes(texts[half:])
    for data in (tmp_path / "a.jsonl", *folders):
        asked = dataclasses.replace(job, data=(str(data),), run=tmp_path / f"run-{data.name}")
        folder = prepared(asked)
        maker = window_maker(folder, asked)
        assert maker is not None
        for window in range(8):
            maker._current = window
            maker.make(window)
        files = [data] if data.is_file() else sorted(data.iterdir())
        mark = maker.marks[7]
        source, line, byte = mark.place
        assert files[source].read_bytes()[:byte].count(b"\n") == line - 1
        spoiled = files[source].read_bytes()
        files[source].write_bytes(b"(" * byte + spoiled[byte:])
        for file in files[:source]:
            file.write_bytes(b"(" * file.stat().st_size)
        window_file(folder.data, 7).unlink()
        again = window_maker(folder, asked)
        assert again is not None
        again._current = 7
        again.make(7)
        assert tokens_of(folder, 7) == expected(folder, 7)


def test_corrupt_records_in_windows_are_noted_once(job: JobRequest, tmp_path: Path) -> None:
    """With file and line, although the stream is read twice; those that the preparation has noted
    are not noted again."""
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    for number in (1, 700):
        lines[number] = "(\n"
    (tmp_path / "a.jsonl").write_text("".join(lines))
    asked = dataclasses.replace(
        job, options=dataclasses.replace(job.options, max_corrupt_records=2)
    )
    folder = prepared(asked, max_corrupt_records=2)
    early = Tokens.load(folder.data)
    record = JobRecorder()
    events: list[dict[str, Any]] = []
    record.listener = events.append
    with windows_made(folder, asked, record):
        data = open_dataset(folder.data, TRAIN, Tokens.load(folder.data), SEQ_LEN, 5)
        for index in range(0, STEPS * BATCH, BATCH):
            data.batch([index])
    assert not record.watchers
    noted = [*early.corrupt, *(event["text"] for event in events if event["event"] == "note")]
    assert len(noted) == 2
    for text, line in zip(noted, (2, 701), strict=True):
        assert f"a.jsonl, line {line} is not JSON" in text


def test_marks_that_cannot_be_read_are_made_again(job: JobRequest) -> None:
    folder = prepared(job)
    maker = window_maker(folder, job)
    assert maker is not None
    maker.make(0)
    maker._current = 5
    maker.make(5)
    marks = maker.marks
    held = Tokens.load(folder.data).valid_documents
    assert (marks[0].document, marks[0].offset) == (held, 0)
    (folder.data / MARKS).write_text("{}")
    again = window_maker(folder, job)
    assert again is not None
    again._current = 5
    again.clean()
    again.make(5)
    assert {n: m for n, m in marks.items() if n < 6} == {
        n: m for n, m in again.marks.items() if n < 6
    }
    assert tokens_of(folder, 5) == expected(folder, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": 3},
        {"place": [0, 0]},
        {"near": 10**6},
        {"offset": -1},
        {"crc32": "x"},
        {"document": 1.5},
    ],
)
def test_marks_of_no_place_are_made_again(job: JobRequest, wrong: dict[str, Any]) -> None:
    folder = prepared(job)
    maker = window_maker(folder, job)
    assert maker is not None
    maker.make(0)
    body = json.loads((folder.data / MARKS).read_text())
    del body[CHECKSUM]
    body["1"] |= wrong
    (folder.data / MARKS).write_text(json.dumps({**body, CHECKSUM: json_crc32(body)}))
    again = window_maker(folder, job)
    assert again is not None
    assert set(again.marks) == {0}
    again.make(1)
    assert tokens_of(folder, 1) == expected(folder, 1)


def test_what_is_no_stream_is_rejected(job: JobRequest, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is 4 windows of 3 sequences") as caught:
        prepare_data(
            tmp_path / "data", byte_tokenizer(), job.data, seq_len=SEQ_LEN, global_batch=BATCH,
            streaming=True, samples=STEPS * BATCH, token_window=460,
        )  # fmt: skip
    assert caught.value.hint == "--token-window 520B"
    chats = tmp_path / "chat.jsonl"
    chats.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(DataError, match="--token-window is for text whose documents follow"):
        prepare_data(
            tmp_path / "data", byte_tokenizer(), [chats], seq_len=SEQ_LEN, global_batch=BATCH,
            streaming=True, samples=STEPS * BATCH, token_window=SIZE,
        )  # fmt: skip
    write(tmp_path / "short.jsonl", DOCUMENTS[:2])
    for fraction, why in ((0.02, "no text behind what is held out"), (0.9, "fewer tokens than")):
        with pytest.raises(DataError, match=why):
            prepare_data(
                tmp_path / "data", byte_tokenizer(), [tmp_path / "short.jsonl"], seq_len=SEQ_LEN,
                global_batch=BATCH, streaming=True, samples=STEPS * BATCH, token_window=SIZE,
                eval_fraction=fraction,
            )  # fmt: skip
    for values, why in (
        ({"streaming": False}, "--streaming is not given"),
        ({"epochs": 1.0}, "does not read the data before the run"),
        ({"upload": "/tmp/x"}, "--upload copies all"),
        ({"token_window": "8 apples"}, "is not a size in bytes"),
    ):
        given = {"model": "tiny-llama", "streaming": True, "token_window": "1GB"}
        with pytest.raises(OptionError, match=why):
            request({**given, **values})


def test_data_that_changes_while_windows_are_made_is_rejected(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from hocket.spec.run import RunFolder, TrainOptions, Workload
    from hocket.training import data
    from hocket.training.tokenizer import byte_tokenizer
    from hocket.training.windowed import window_maker

    path, folder = tmp_path / "some.jsonl", RunFolder(tmp_path / "run")
    path.write_text("".join(f'{{"text": "{"abc " * 50}{i}"}}\n' for i in range(200)))
    sizes = {"seq_len": 16, "global_batch": 4}
    data.prepare_data(
        folder.data,
        byte_tokenizer(),
        [path],
        streaming=True,
        samples=80,
        token_window=4000,
        **sizes,
    )
    options = TrainOptions(steps=20, streaming=True, token_window="4000B")
    job = SimpleNamespace(
        data=(str(path),), eval_data=(), options=options, workload=Workload(**sizes)
    )
    maker = window_maker(folder, job)
    assert maker is not None
    maker.make(0)
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(DataError, match=r"some.jsonl had [\d,]+ bytes and has"):
        maker.make(1)
