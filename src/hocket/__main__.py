"""The command `hocket`, and `python -m hocket`."""

import sys


def main() -> int:
    """Run the command line. Returns its exit code; Ctrl-C while it is imported is one as well."""
    try:
        from hocket.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
