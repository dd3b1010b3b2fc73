"""Replies of a Hub that never end: what huggingface_hub would follow for ever is an error."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.models import hub_limits
from hocket.models.hub_limits import MOST_PAGES, MOST_RESTARTS, EndlessReply, limit_replies

pytestmark = pytest.mark.train
TREE = "https://hub/api/models/a/b/tree/main"


def reply(url: str, status: int = 200, asked: dict[str, str] | None = None, **headers: str) -> Any:
    from huggingface_hub.utils import _http

    named = {name: value.encode("latin-1") for name, value in headers.items()}
    request = _http.httpx2.Request("GET", url, headers=asked or {})
    return _http.httpx2.Response(status, headers=named, request=request)


def test_every_client_is_limited_and_once() -> None:
    from huggingface_hub.utils import _http, close_session, get_session

    limit_replies()
    factory = _http._GLOBAL_CLIENT_FACTORY
    limit_replies()
    assert _http._GLOBAL_CLIENT_FACTORY is factory
    close_session()  # as after a connection that failed
    assert len(get_session().event_hooks["response"]) == 1


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "331"}, 331),
        (503, {"Retry-After": " 99999999 "}, 99_999_999),
        (429, {"RateLimit": '"api";r=0;t=3600', "Retry-After": "1"}, 3600),
        (429, {"Retry-After": "9" * 3000}, 10**12),
    ],
)
def test_a_long_wait_is_an_error(status: int, headers: dict[str, str], seconds: int) -> None:
    with pytest.raises(EndlessReply, match=f"answers {status}, and asks to wait {seconds:,} sec"):
        hub_limits._Limits().check(reply(TREE, status, **headers))


@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"Retry-After": "300"}), (429, {"RateLimit": '"api";r=0;t=299'}), (503, {}),
     (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), (200, {"Retry-After": "99999"}),
     (429, {"Retry-After": "\u00b2"}), (404, {"RateLimit": '"api";r=9;t=9999'}),
     (200, {"RateLimit": '"api";r=12;t=9999'})],
)  # fmt: skip
def test_a_wait_as_the_hub_asks_for_is_none(status: int, headers: dict[str, str]) -> None:
    hub_limits._Limits().check(reply(TREE, status, **headers))


def test_pages_of_a_listing_end() -> None:
    def page(number: int, follow: int | None) -> Any:
        link = {} if follow is None else {"Link": f'<{TREE}?cursor={follow}>; rel="next"'}
        return reply(f"{TREE}?cursor={number}", **link)

    limits = hub_limits._Limits()
    for _ in range(3):  # three listings of 900 pages
        for number in range(900):
            limits.check(page(number, number + 1 if number < 899 else None))
    with pytest.raises(EndlessReply, match="does not end"):
        limits.check(page(7, 7))
    limits.check(page(0, None))
    for number in range(MOST_PAGES):  # two pages that lead to each other
        limits.check(page(number % 2, (number + 1) % 2))
    with pytest.raises(EndlessReply, match="does not end"):
        limits.check(page(0, 1))


def test_a_file_that_begins_again_each_time_ends() -> None:
    limits, ranged = hub_limits._Limits(), {"Range": "bytes=10-"}
    for _ in range(2):
        limits.check(reply("https://hub/a/file"))
        for _ in range(MOST_RESTARTS):
            limits.check(reply("https://hub/a/file", asked=ranged))
            limits.check(reply("https://hub/a/other", 206, asked=ranged))
    with pytest.raises(EndlessReply, match="/a/file breaks off, and hub begins it again"):
        limits.check(reply("https://hub/a/file", asked=ranged))
