"""The command `hocket`, and `python -m hocket`."""

import os
import signal
import sys

from hocket.spec.errors import one_of_srun, stopped_code


def main() -> int:
    """Run the command line. Returns its exit code; Ctrl-C while it is imported is one as well, and
    so is an error of hocket's own, whose traceback goes to a file."""
    if sys.argv[1:2] == ["train"]:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _requeued)
    elif sys.argv[1:2] == ["serve"] and one_of_srun():
        signal.signal(signal.SIGTERM, _drained)
    elif os.getpid() == 1:
        signal.signal(signal.SIGTERM, _ended)
    try:
        from hocket.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from hocket.cli.internal_error import report_internal_error

        return report_internal_error(error, sys.argv[1:])


def _requeued(number: int, frame: object) -> None:
    """End `hocket train` while it is imported and reads its options, as `jobs.early_stop` does
    later: nothing was begun, and a batch system queues the job again."""
    os.write(2, b"hocket: stopped before the run began; the same command starts it\n")
    os._exit(stopped_code(number))


def _drained(number: int, frame: object) -> None:
    """End a server that has no requests yet. srun sends SIGTERM to all tasks when one of them has
    failed, and the code of that one is to be srun's; else an operator stops the server. An
    exception would be lost where a package that is imported catches it."""
    os._exit(0)


def _ended(number: int, frame: object) -> None:
    """End at once, as SIGTERM ends every process but the first of a container, to which the kernel
    sends no signal without a handler."""
    os._exit(128 + number)


_requeued.before_run = True  # type: ignore[attr-defined]
_drained.raises = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    raise SystemExit(main())
