"""`python -m hocket`: the same as the command `hocket`."""

from hocket.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
