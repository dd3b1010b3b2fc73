"""Hub limits: replies after which a download would never end, or wait for hours.

    a reply of the Hub  ->  its headers, as they arrive  ->  an error where no end is in sight

huggingface_hub sleeps as long as `Retry-After` and `RateLimit` ask, follows `Link: rel="next"`
without end, and begins a file again without counting where its range is ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

RETRIED = (408, 429, 500, 502, 503, 504)
"""Answers of the Hub after which a request is sent again."""

LONGEST_WAIT = 330
"""Seconds. The Hub counts requests in windows of 300."""

MOST_PAGES = 1000
"""Of one listing, of up to 1,000 files each."""

MOST_RESTARTS = 5
"""Of one file."""

_RESET, _SECONDS = re.compile(r";\s*t=(\d{1,4000})"), re.compile(r"\s*(\d{1,4000})\s*")


class EndlessReply(Exception):
    """What the Hub answers has no end in sight; says why."""


def limit_replies() -> None:
    """From here on no request of huggingface_hub in this process waits or is repeated without end:
    it raises `EndlessReply`."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    usual = _http._GLOBAL_CLIENT_FACTORY
    if getattr(usual, "limited", False):
        return
    limits = _Limits()

    def client() -> Any:
        made = usual()
        made.event_hooks["response"].append(limits.check)
        return made

    client.limited = True  # type: ignore[attr-defined]
    set_client_factory(client)


class _Limits:
    """Counts of this process: pages of a listing, by its path; restarts of a file, by its URL."""

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()

    def check(self, response: Any) -> None:
        """Hook of httpx: called with each reply before its body is read."""
        host, path, url = response.url.host, str(response.url.path), str(response.url)
        if response.status_code in RETRIED:
            asked = _seconds_asked(response.headers)
            if asked > LONGEST_WAIT:
                raise EndlessReply(
                    f"{host} answers {response.status_code}, and asks to wait "
                    f"{min(asked, 10**12):,} seconds (waited at most: {LONGEST_WAIT})"
                )
        following = response.links.get("next", {}).get("url")
        self.pages[path] = 0 if following is None else self.pages[path] + 1
        if following == url or self.pages[path] > MOST_PAGES:
            raise EndlessReply(f"the listing {path} of {host} does not end")
        ranged = "range" in response.request.headers and response.status_code == 200
        self.restarts[url] = self.restarts[url] + 1 if ranged else 0
        if self.restarts[url] > MOST_RESTARTS:
            raise EndlessReply(
                f"the download of {path} breaks off, and {host} begins it again each time"
            )


def _seconds_asked(headers: Any) -> int:
    """Seconds after which a request may be sent again; 0 where the reply does not say."""
    asked = [int(found) for found in _RESET.findall(headers.get("ratelimit", ""))]
    if found := _SECONDS.fullmatch(headers.get("retry-after", "")):
        asked.append(int(found[1]))
    return max(asked, default=0)
