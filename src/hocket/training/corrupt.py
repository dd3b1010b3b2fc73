"""Corrupt records: counted, noted with file and line, and skipped up to a limit."""

from __future__ import annotations

from hocket.spec.errors import DataError

NOTED = 20
"""Records whose file and line are kept."""


class CorruptRecords:
    """The records of a data set that cannot be read.

    Args:
        limit: records that may be skipped.

    Attributes:
        count: skipped so far; one that is read again counts once. notes: of the first of them,
            file, line and reason.
    """

    def __init__(self, limit: float = 0) -> None:
        self.limit = limit
        self.count = 0
        self.notes: list[str] = []
        self._seen: set[str] = set()

    def skip(self, error: DataError) -> None:
        """Skip the record that `error` describes.

        Raises:
            DataError: it is one too many.
        """
        if error.message in self._seen:
            return
        if self.count >= self.limit:
            if not self.limit:
                raise error
            raise DataError(
                f"{error.message}; {self.count:,} corrupt records before it were skipped, which is "
                "the limit (max_corrupt_records)",
                hint=f"--max-corrupt-records {10 * int(self.limit)}, or repair the file",
            )
        self.count += 1
        self._seen.add(error.message)
        if len(self.notes) < NOTED:
            self.notes.append(error.message)
