"""Hub data: a split of a data set of the Hugging Face Hub as the files that it is made of.

    org/name[/subset][:split][[:N]][@revision]  ->  DataId  ->  names of the split's files

The names come from the listing of the repository and its card alone: `datasets` resolves them on
a directory of empty files of the same names. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hocket.models import hub, repo_id
from hocket.spec.errors import DataError, HocketError, nearest
from hocket.spec.install import install_line

TRAIN = "train"
CARD = "README.md"
_SELECTED = re.compile(r"(?P<base>.+?)(?::(?P<split>\w[\w.-]*))?(?:\[:(?P<limit>\d{1,18})\])?")
_REVISION = re.compile(r"(.+?)@([^@:\[\]]+)(.*)")
_MOST_FILES = 100_000


@dataclasses.dataclass(frozen=True)
class DataId:
    """What is read of a data set.

    Attributes:
        repo: on the Hub. subset: configuration of its card; None: the only one, or the default.
        split: such as `train`. limit: records from its beginning; None: all.
    """

    repo: repo_id.RepoId
    subset: str | None = None
    split: str = TRAIN
    limit: int | None = None

    def __str__(self) -> str:
        name = self.repo.id + (f"/{self.subset}" if self.subset else "")
        limit = "" if self.limit is None else f"[:{self.limit}]"
        at = f"@{self.repo.revision}" if self.repo.revision else ""
        return f"{name}:{self.split}{limit}{at}"


def selected(text: str) -> tuple[str, str | None, int | None]:
    """`BASE[:split][[:N]]` as (base, split, N).

    Raises:
        DataError: N is 0.
    """
    match = _SELECTED.fullmatch(text)
    if match is None:
        return text, None, None
    limit = None if match["limit"] is None else int(match["limit"])
    if limit == 0:
        raise DataError(f"data {text}: [:0] leaves no records", hint=f"--data '{match['base']}'")
    return match["base"], match["split"], limit


def parse_data(text: str) -> DataId | None:
    """The part of a data set that a text names, None where it names none, as a path does not.

    Raises:
        DataError: as `selected`.
    """
    text = text.removeprefix("hf://datasets/")
    if "://" in text:
        repo = repo_id.parse_repo(text, repo_id.DATASET)
        return None if repo is None else DataId(repo)
    revision = None
    pinned_at = _REVISION.fullmatch(text)
    if pinned_at is not None:
        revision, text = pinned_at[2], pinned_at[1] + pinned_at[3]
    base, split, limit = selected(text)
    owner_name, subset = base, None
    if base.count("/") == 2:
        owner_name, _, subset = base.rpartition("/")
    repo = repo_id.parse_repo(
        owner_name if revision is None else f"{owner_name}@{revision}", repo_id.DATASET
    )
    if repo is None or subset == "":
        return None
    return DataId(repo, subset, split or TRAIN, limit)


def pinned_data(data: DataId) -> DataId:
    """The same at the commit that its revision is now. Raises DataError."""
    return data if data.repo.commit else dataclasses.replace(data, repo=_at_commit(data.repo)[0])


def files(data: DataId, suffixes: Sequence[str]) -> tuple[DataId, list[str], list[str]]:
    """(the data set at its commit, the names of the split's files, those of other splits).

    Args:
        suffixes: that files of data have.

    Raises:
        DataError: it is not there or gated, there is no such subset or split, or it holds no files
            of data.
    """
    repo, folder = _at_commit(data.repo)
    listed = [
        name
        for name in hub.listed(repo)
        if name.lower().endswith(tuple(suffixes)) or name.rpartition("/")[2] == CARD
    ]
    if not any(name.lower().endswith(tuple(suffixes)) for name in listed):
        raise DataError(
            f"data {data}: the data set holds no files that are read; the rule is text, or records "
            f"in {', '.join(suffixes)}",
            hint=f"look at {repo.page}/tree/main",
        )
    if len(listed) > _MOST_FILES:
        raise DataError(
            f"data {data}: the data set has {len(listed):,} files; at most {_MOST_FILES:,} are "
            "resolved",
            hint=f"hf download {repo.id} --repo-type dataset --local-dir DIR, and --data FILES",
        )
    with tempfile.TemporaryDirectory(prefix="hocket-data-") as made:
        root = Path(made) / repo.id.rpartition("/")[2]
        root.mkdir()
        for name in listed:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        if (folder / CARD).exists():
            shutil.copyfile(folder / CARD, root / CARD)
        splits = {
            name: [str(path.relative_to(root)) for path in paths]
            for name, paths in splits_of(root, data.subset, str(data)).items()
        }
    if data.split not in splits:
        near = nearest(data.split, splits) or next(iter(splits), None)
        better = dataclasses.replace(data, split=near or TRAIN)
        raise DataError(
            f"data {data} holds no split {data.split!r}; its splits: {', '.join(splits) or 'none'}",
            hint=f"--data '{better}'" if near else None,
        )
    rest = [file for name, found in splits.items() if name != data.split for file in found]
    return dataclasses.replace(data, repo=repo), splits[data.split], rest


def _at_commit(repo: repo_id.RepoId) -> tuple[repo_id.RepoId, Path]:
    folder = hub.snapshot(repo, [CARD])
    return repo.at(folder), folder


def splits_of(root: Path, subset: str | None, name: str) -> dict[str, list[Path]]:
    """The files of each split below a directory, as `datasets` resolves them by card and names.

    Raises:
        DataError: `datasets` is not installed, or does not understand the directory.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(
            f"data {name}: a directory of records needs datasets",
            hint=install_line("train"),
        ) from None
    datasets.disable_progress_bars()
    try:
        with (
            hub.without_warnings(),
            tempfile.TemporaryDirectory(prefix="hocket-data-") as cache,
        ):
            builder = datasets.load_dataset_builder(str(root), name=subset, cache_dir=cache)
            found = builder.config.data_files or {}
    except HocketError:
        raise
    except Exception as error:  # datasets raises many kinds, and documents none
        raise _not_understood(error, name, subset) from error
    return {
        str(split): [root / Path(file).relative_to(root.resolve()) for file in sorted(found[split])]
        for split in found
    }


def _not_understood(error: Exception, name: str, subset: str | None) -> DataError:
    text = str(error).strip()
    known = re.search(r"(?:available configs|Available|among)[^\[]*\[([^\]]*)\]", text)
    if known is not None:
        subsets = re.findall(r"['\"]([^'\"]+)['\"]", known[1])
        if subsets:
            what = "needs one of its subsets" if subset is None else f"has no subset {subset!r}"
            base = re.split(r"[:@\[]", name)[0].removesuffix(f"/{subset}")
            return DataError(
                f"data {name} {what}: {', '.join(subsets)}",
                hint=f"--data {name}/FILE..."
                if Path(name).exists()
                else f"--data {base}/{nearest(subset or '', subsets) or subsets[0]}",
            )
    return DataError(
        f"data {name}: the datasets library cannot read this directory: "
        f"{text.splitlines()[0] if text else type(error).__name__}",
        hint=f"--data {name}/FILE...",
    )
