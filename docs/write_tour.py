"""Run the tour on this machine and write its pages, in both languages, from the one run.

python docs/write_tour.py
"""

from __future__ import annotations

from pathlib import Path

from hocket.jobs.tour import tour, write_tour
from hocket.spec.tour import Stop

DOCS = Path(__file__).resolve().parent


def main() -> None:
    """Write docs/tour.md and docs/tour.ko.md."""

    def tell(stop: Stop) -> None:
        print(f"{stop.key}: {stop.verdict}, {stop.seconds:.0f} s", flush=True)

    stops = tour(on_stop=tell)
    for language, page in (("en", "tour.md"), ("ko", "tour.ko.md")):
        write_tour(str(DOCS / page), stops, language)


if __name__ == "__main__":
    main()
