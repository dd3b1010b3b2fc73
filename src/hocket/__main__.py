"""The command `hocket`, and `python -m hocket`."""

import sys


def main() -> int:
    """Run the command line. Returns its exit code; Ctrl-C while it is imported is one as well, and
    so is an error of hocket's own, whose traceback goes to a file."""
    try:
        from hocket.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from hocket.cli.internal_error import report_internal_error

        return report_internal_error(error, sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
