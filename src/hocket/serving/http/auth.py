"""Keys: who may ask, identified by a secret that is kept only as its digest."""

from __future__ import annotations

import hashlib
import hmac
import shlex
from collections.abc import Iterable
from pathlib import Path

from hocket.spec.errors import OptionError

LEAST = 8
"""Characters of a key: shorter ones are guessed."""
MOST = 1000
"""Keys in a file: each request is compared with all of them."""


class Keys:
    """Digests of keys, and whose they are.

    Args:
        keys: (user, key) pairs.
    """

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._known = [(_digest(key.encode()), user) for user, key in keys]

    def __len__(self) -> int:
        return len(self._known)

    def user(self, header: bytes | None) -> str | None:
        """Whose key stands in an `Authorization: Bearer ...` header; None: nobody's.

        Digests are compared, and all of them, so that the time says nothing of any key.
        """
        if header is None or header[:7].lower() != b"bearer ":
            return None
        given = _digest(header[7:].strip())
        found = None
        for digest, user in self._known:
            if hmac.compare_digest(digest, given):
                found = user
        return found

    @classmethod
    def read(cls, path: Path | str) -> Keys:
        """The keys of a file, one a line: `KEY`, or `NAME KEY`; `#` begins a comment.

        A key without a name is its own user.

        Raises:
            OptionError: it cannot be read, holds no key, or one that cannot be.
        """
        path = Path(path)
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"--api-key-file {path} cannot be read: {error}",
                hint=f"(umask 077; openssl rand -hex 24 > {shlex.quote(str(path))})",
            ) from None
        found: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split("#", 1)[0].split() if line.lstrip().startswith("#") else line.split()
            if not words:
                continue
            if len(words) > 2:
                raise OptionError(
                    f"--api-key-file {path}: line {number} holds {len(words)} words",
                    hint="KEY, or NAME KEY",
                )
            key = words[-1]
            if len(key) < LEAST:
                raise OptionError(
                    f"--api-key-file {path}: the key of line {number} has {len(key)} characters; "
                    f"at least {LEAST}",
                    hint="openssl rand -hex 24",
                )
            own = "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]
            found[key] = words[0][:64] if len(words) == 2 else own
        if not found:
            raise OptionError(f"--api-key-file {path} holds no key", hint="one key a line")
        if len(found) > MOST:
            raise OptionError(f"--api-key-file {path} holds {len(found)} keys; at most {MOST}")
        return cls((user, key) for key, user in found.items())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
