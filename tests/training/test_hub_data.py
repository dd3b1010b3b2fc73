"""Data sets of the Hub by id, against a small Hub on loopback."""

from __future__ import annotations

import io
import json

import pytest

from hocket.spec.errors import DataError
from hocket.training import conversation, data, data_paths, data_sources, hub_data
from hocket.training.tokenizer import resolve_tokenizer
from tests.hub_server import Repo, offline

pytestmark = [pytest.mark.train, pytest.mark.timeout(60)]

TEXTS = [f"document {i} of the set" for i in range(30)]


def parquet(texts, rows=4) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    made = io.BytesIO()
    tables.write_table(pyarrow.table({"text": texts}), made, row_group_size=rows)
    return made.getvalue()


def records(*rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def dataset(**more) -> Repo:
    files = {
        "README.md": b"# a set\n", "data/train-00000-of-00002.parquet": parquet(TEXTS[:12]),
        "data/train-00001-of-00002.parquet": parquet(TEXTS[12:20]),
        "data/test-00000-of-00001.parquet": parquet(TEXTS[20:]),
    }  # fmt: skip
    return Repo("org/set", files, kind="dataset", **more)


def read(text, **more) -> list[str]:
    return list(data_sources.source_documents(data_paths.find_sources([text], **more).sources))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/set", "org/set:train"),
        ("org/set:test", "org/set:test"),
        ("org/set[:10]", "org/set:train[:10]"),
        ("org/set:test[:10]@v1", "org/set:test[:10]@v1"),
        ("org/set@v1:test", "org/set:test@v1"),
        ("org/set/en", "org/set/en:train"),
        ("org/set/en:test[:2]@v1", "org/set/en:test[:2]@v1"),
        ("https://huggingface.co/datasets/org/set", "org/set:train"),
        ("hf://datasets/org/set@v1", "org/set:train@v1"),
        ("https://huggingface.co/org/model", None),
        ("folder", None),
        ("a/b/c/d", None),
        ("./a/b", None),
    ],
)
def test_what_names_a_data_set(text, found) -> None:
    one = hub_data.parse_data(text)
    assert (one and str(one)) == found
    assert one is None or hub_data.parse_data(str(one)) == one


def test_a_split_and_a_number_of_records(loopback) -> None:
    with loopback(dataset()) as server:
        (notice,) = data_paths.find_sources(["org/set"]).notices
        assert "data/test-00000-of-00001.parquet" in notice.partition("left out: ")[2]
        assert not server.fetched(".parquet")  # nothing is read yet
        assert read("org/set[:3]") == TEXTS[:3]
        assert len(server.fetched(".parquet")) == 1  # the second file is not needed
        assert read("org/set") == TEXTS[:20]
        assert read("org/set:train[:15]") == TEXTS[:15]
        assert read("org/set:test") == TEXTS[20:]
        assert read("org/set:test[:99]") == TEXTS[20:]
        assert len(server.fetched(".parquet")) == 3
        with pytest.raises(DataError, match="no split 'tset'; its splits: train, test") as caught:
            read("org/set:tset")
        assert caught.value.hint == "--data 'org/set:test'"
        with pytest.raises(DataError, match="leaves no records"):
            read("org/set[:0]")


def test_streaming_stores_nothing(loopback, tmp_path, monkeypatch) -> None:
    with loopback(dataset()) as server:
        assert read("org/set", streaming=True) == TEXTS[:20]
        assert all(ranged is not None for ranged in server.fetched(".parquet"))
        assert not list((tmp_path / "hf").rglob("*.parquet"))
        # A set that is larger than the disk has room for is streamed unasked.
        monkeypatch.setattr(data_paths, "_room", lambda: 100.0)
        (source,) = data_paths.find_sources(["org/set"]).sources
        assert all(part.streaming for part in source.parts)
        assert not data_paths.find_sources(["org/set[:2]"]).sources[0].parts[0].streaming


def test_subsets_of_the_card(loopback) -> None:
    configs = "".join(f"- config_name: {c}\n  data_files: {c}/*.jsonl\n" for c in ("en", "de"))
    files = {
        "README.md": f"---\nconfigs:\n{configs}---\n".encode(),
        "en/a.jsonl": records({"text": "hello"}), "de/a.jsonl": records({"text": "hallo"}),
    }  # fmt: skip
    with loopback(Repo("org/two", files, kind="dataset")):
        assert read("org/two/de") == ["hallo"]
        with pytest.raises(DataError, match="needs one of its subsets: en, de") as caught:
            read("org/two")
        assert caught.value.hint == "--data org/two/en"
        with pytest.raises(DataError, match="no subset 'dee'") as caught:
            read("org/two/dee")
        assert caught.value.hint == "--data org/two/de"


def test_what_cannot_be_read_is_said(loopback, tmp_path) -> None:
    images = Repo("org/images", {"a.png": b"1"}, kind="dataset")
    closed = dataset(gated="token")
    closed.id = "org/closed"
    with loopback(dataset(), images, closed):
        for text, message, hint in (
            ("org/sett", "has no data set org/sett", "did you mean org/set?"),
            ("org/set@v2", "no revision 'v2'", "commits"),
            ("org/images", "holds no files that are read", "org/images/tree/main"),
            ("org/closed", "is gated", "hf auth login"),
            ("org/set.jsonl", "no such file or directory", ""),
        ):
            with pytest.raises(DataError, match=message) as caught:
                read(text)
            assert hint in str(caught.value.hint or "")


def test_offline_the_cache_answers(loopback, monkeypatch) -> None:
    with loopback(dataset()):
        read("org/set")
    offline(monkeypatch, True)
    assert read("org/set") == TEXTS[:20]
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        read("org/set:test")
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set") as caught:
        read("org/other")
    assert "--repo-type dataset" in str(caught.value.hint)


def test_tokens_belong_to_a_commit_and_a_split(loopback, tmp_path, monkeypatch) -> None:
    words = resolve_tokenizer("bytes", model_dir=None)

    def tokens(text):
        return data.prepare_data(
            tmp_path / "run", words, [text], seq_len=8, global_batch=2, eval_fraction=0.0
        )

    with loopback(dataset()) as server:
        first = tokens("org/set[:8]")
        (commit,) = {r.commit for r in server.repos.values()}
        assert first.sources[0][0] == f"org/set:train[:8]@{commit}"
        made = (tmp_path / "run" / "tokens.bin").stat().st_mtime_ns
        assert tokens(f"org/set:train[:8]@{commit}").key == first.key
        assert (tmp_path / "run" / "tokens.bin").stat().st_mtime_ns == made
        assert tokens("org/set[:9]").key != first.key
        assert tokens("org/set:test[:8]").key != first.key
        server.repos["dataset", "org/set"].files["README.md"] += b"more"
        assert tokens("org/set[:8]").key != first.key
        assert data_paths.pinned_path("org/set") != data_paths.pinned_path(f"org/set@{commit}")
    assert data_paths.pinned_path(tmp_path / "run") == str(tmp_path / "run")


def test_alpaca_is_a_prompt_and_its_completion(loopback, tmp_path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and {instruction}", "output": "2"},
        {"instruction": "Greet.", "input": "", "output": "Hello."},
    ]
    with loopback(Repo("org/alpaca", {"train.jsonl": records(*rows)}, kind="dataset")):
        (source,) = data_paths.find_sources(["org/alpaca"]).sources
        kind = conversation.format_of(data_sources.fields(source))
        assert kind == conversation.COMPLETION
        one, two = (
            conversation.read_conversation(r, kind, w)
            for r, w in data_sources.source_records(source)
        )
    # As https://github.com/tatsu-lab/stanford_alpaca has it in train.py.
    assert one == conversation.PromptAnswer(
        prompt="Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 and {instruction}\n\n### Response:",
        completion="2",
    )
    assert two.prompt.endswith("request.\n\n### Instruction:\nGreet.\n\n### Response:")
    file = tmp_path / "preferences.jsonl"
    file.write_bytes(records({"prompt": "a", "chosen": "b", "rejected": "c"}))
    with pytest.raises(DataError, match=r"preferences .* not supported"):
        read(file)


def test_splits_and_numbers_of_directories_here(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    for name, content in dataset().files.items():
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_bytes(content)
    assert read(f"{tmp_path}/repo:test") == TEXTS[20:]
    assert read(f"{tmp_path}/repo[:14]") == TEXTS[:14]
    made = {"train": datasets.Dataset.from_dict({"text": TEXTS[:5]}),
            "test": datasets.Dataset.from_dict({"text": TEXTS[5:9]})}  # fmt: skip
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    assert read(f"{tmp_path}/saved") == TEXTS[:5]
    assert read(f"{tmp_path}/saved:test[:2]") == TEXTS[5:7]
    with pytest.raises(DataError, match="no split 'dev'; its splits: train, test"):
        read(f"{tmp_path}/saved:dev")
    (tmp_path / "a.txt").write_text("text")
    assert read(f"{tmp_path}/a.txt[:1]") == ["text"]
    with pytest.raises(DataError, match="a file has no splits"):
        read(f"{tmp_path}/a.txt:train")
