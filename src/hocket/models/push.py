"""Push: a directory as a model repository of the Hugging Face Hub.

Never imports torch or transformers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hocket.models import hub, repo_id
from hocket.spec.errors import HocketError, OptionError

CARD = "README.md"


def checked_repo(name: str) -> repo_id.RepoId:
    """The repository to push to.

    Raises:
        OptionError: the name is not `ORG/NAME`, or there is no token to write with.
    """
    from huggingface_hub import constants, get_token

    repo = repo_id.parse_repo(name)
    if repo is None or repo.revision is not None:
        raise OptionError(
            f"--push-to-hub is {name!r}; a repository is named ORG/NAME",
            hint="--push-to-hub my-organization/my-model",
        )
    if constants.is_offline_mode():
        raise OptionError(
            "--push-to-hub needs the Hub, and HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE"
        )
    if get_token() is None:
        raise OptionError(
            f"--push-to-hub {name} needs a token that may write, and there is none",
            hint="hf auth login",
        )
    return repo


def push_folder(
    folder: Path, repo: repo_id.RepoId, *, card: str, private: bool | None = None
) -> str:
    """Upload a directory in one commit; the repository is made if it is not there.

    Args:
        card: of the model; a card that the repository has already is left as it is.
        private: of a repository that is made; None: the Hub's default, which is public unless the
            organization says otherwise.

    Returns:
        The address of its page.

    Raises:
        OptionError: the token may not write there, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty() and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None:
        disable_progress_bars()
    api = HfApi()
    try:
        api.create_repo(repo.id, private=private, exist_ok=True)
        kept = api.file_exists(repo.id, CARD)
        if not kept:
            (folder / CARD).write_text(card)
        with hub.without_warnings():
            api.upload_folder(
                repo_id=repo.id,
                folder_path=folder,
                commit_message="Upload from hocket",
                ignore_patterns=[CARD] if kept else None,
            )
    except HocketError:
        raise
    except Exception as error:
        raise _refused(repo, error) from error
    return repo.page


def _refused(repo: repo_id.RepoId, error: Exception) -> HocketError:
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in (401, 403, 404):
        return OptionError(
            f"the token in use may not write to {repo.id} (the Hub answers {status})",
            hint="hf auth login, with a token that has write access",
        )
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return OptionError(f"{repo.id} was not pushed: {why}", hint="run the command again")
