"""Hub errors: what huggingface_hub raises, as errors that say what is wrong and one way to mend it.

Never imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hocket.catalogue.models import entry, model_names
from hocket.models.hub_limits import RETRIED, EndlessReply, limit_replies
from hocket.models.repo_id import DATASET, RepoId, storage
from hocket.spec.errors import DataError, HocketError, ModelError, nearest

ATTEMPTS = 3
"""Tries of one call. huggingface_hub itself resumes a file whose connection ends early."""


def _repo_errors(repo: RepoId) -> type[HocketError]:
    """The class of errors about a repository."""
    return DataError if repo.kind == DATASET else ModelError


def _what(repo: RepoId) -> str:
    return "data set" if repo.kind == DATASET else "model"


def lacking(repo: RepoId, folder: Path, missing: Sequence[str]) -> HocketError:
    """The error of files that a snapshot does not have."""
    from huggingface_hub import constants

    some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if constants.is_offline_mode():
        return _repo_errors(repo)(
            f"HF_HUB_OFFLINE is set, and the cache holds {repo.id} without {some} ({folder})",
            hint=_on_another(repo),
        )
    return _repo_errors(repo)(f"{_what(repo)} {repo} has no {some}")


def _on_another(repo: RepoId) -> str:
    """The line to run where there is a network."""
    of = " --repo-type dataset" if repo.kind == DATASET else ""
    at = f" --revision {repo.revision}" if repo.revision else ""
    name = repo.id.partition("/")[2]
    shape = next((n for n in model_names() if entry(n).hub_id == repo.id), None)
    return (
        f"where there is a network: hf download {repo.id}{of}{at} --local-dir {name}; then name "
        "that folder"
        + (f"; without one, plan and rehearse have its shape as {shape}" if shape else "")
    )


@contextmanager
def explained(repo: RepoId) -> Iterator[None]:
    """Within, errors of huggingface_hub become ours.

    Raises:
        ModelError, DataError: see `snapshot`.
    """
    limit_replies()
    try:
        yield
    except HocketError:
        raise
    except Exception as error:
        raise explanation(repo, error) from error


def explanation(repo: RepoId, error: BaseException) -> HocketError:
    """An error of huggingface_hub (or of datasets, which calls it) as one that can be mended."""
    from huggingface_hub import constants, errors

    kind = _repo_errors(repo)
    causes = list(_chain(error))

    def found(of: type[BaseException]) -> Any:
        return next((one for one in causes if isinstance(one, of)), None)

    if found(errors.GatedRepoError):
        return _gated(repo)
    if found(errors.RepositoryNotFoundError):
        return _not_found(repo)
    if found(errors.RevisionNotFoundError):
        near = nearest(repo.revision or "", _revisions(repo))
        return kind(
            f"{_what(repo)} {repo.id} has no revision {repo.revision!r}",
            hint=f"did you mean {repo.id}@{near}?" if near else f"{repo.page}/commits/main",
        )
    where = constants.HF_HUB_CACHE
    if found(errors.OfflineModeIsEnabled) or constants.is_offline_mode():
        return kind(
            f"HF_HUB_OFFLINE is set, and the cache {where} does not hold {_what(repo)} {repo}"
            + (" as a whole" if storage(repo).is_dir() else ""),
            hint=_on_another(repo),
        )
    endless = found(EndlessReply)
    if endless is not None:
        return kind(
            f"{repo} cannot be downloaded: {endless}",
            hint="run the command again later; what was downloaded is kept",
        )
    http = found(errors.HfHubHTTPError)
    if http is not None:
        status = getattr(http.response, "status_code", None)
        if status in (401, 403):
            return _gated(repo)
        return kind(
            f"{constants.ENDPOINT} answers {status} to the request for {repo}",
            hint="run the command again later; what was downloaded is kept",
        )
    broken = next((one for one in causes if broke_off(one)), None)
    if broken is not None:
        return kind(
            f"the download of {repo} broke off {ATTEMPTS} times: {broken}",
            hint="run the command again: it continues where this one ended",
        )
    disk = next((one for one in causes if isinstance(one, OSError) and one.errno), None)
    network = next((one for one in causes if _of_network(one)), None)
    if network is not None:
        return kind(
            f"there is no folder {repo}, {constants.ENDPOINT} cannot be reached ({network}), "
            f"and the cache {where} does not hold {_what(repo)} {repo}",
            hint=_on_another(repo),
        )
    if disk is not None:
        return kind(
            f"{repo} cannot be stored in {where}: {disk.strerror}",
            hint=f"HF_HOME=DIRECTORY, on a disk with enough space; it is {constants.HF_HOME} now",
        )
    text = str(error).strip().splitlines()
    return kind(f"{repo} cannot be downloaded: {text[0] if text else type(error).__name__}")


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def _of_network(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError"})


def _gated(repo: RepoId) -> HocketError:
    from huggingface_hub import get_token

    if get_token() is None:
        return _repo_errors(repo)(
            f"{_what(repo)} {repo.id} is gated: its licence has to be accepted, and no token was "
            "sent",
            hint=f"accept it at {repo.page}, then: hf auth login",
        )
    return _repo_errors(repo)(
        f"{_what(repo)} {repo.id} is gated, and the account of the token in use has no access",
        hint=f"accept its licence at {repo.page}, or another account: hf auth login",
    )


def _not_found(repo: RepoId) -> HocketError:
    from huggingface_hub import constants, get_token

    why = "" if get_token() else ", or it is private and no token was sent (hf auth login)"
    names = _similar(repo)
    near = nearest(repo.id, names) or (names[0] if names else None)
    return _repo_errors(repo)(
        f"there is no directory {repo.id} here, and {constants.ENDPOINT} has no {_what(repo)} "
        f"{repo.id}{why}",
        hint=f"did you mean {near}?" if near else f"search at {constants.ENDPOINT}/{repo.kind}s",
    )


def _similar(repo: RepoId) -> list[str]:
    """Names of repositories like one that is not there: of its owner, then of its name."""
    from huggingface_hub import HfApi

    owner, _, name = repo.id.partition("/")
    api: Any = HfApi()
    listed = api.list_datasets if repo.kind == DATASET else api.list_models
    for query in ({"author": owner, "limit": 100}, {"search": name, "limit": 20}):
        with suppress(Exception):
            found = [str(one.id) for one in listed(**query)]
            if found:
                return found
    return []


def _revisions(repo: RepoId) -> list[str]:
    from huggingface_hub import HfApi

    with suppress(Exception):
        refs = HfApi().list_repo_refs(repo.id, repo_type=repo.kind)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []


def broke_off(error: BaseException) -> bool:
    """Whether a connection that was there ended: by the names that httpx gives such errors."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"NetworkError", "ProtocolError"}) and "ConnectError" not in names


def busy(error: BaseException) -> bool:
    """Whether the Hub answered that it cannot answer now."""
    responses = (getattr(one, "response", None) for one in _chain(error))
    return any(getattr(one, "status_code", None) in RETRIED for one in responses)
