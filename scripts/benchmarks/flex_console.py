"""What a script tells on stderr, notes along the way and the one line with which it ends; and how SIGTERM ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends the script with one line on stderr and exit status 1."""
    raise SystemExit(f"error: {message}")


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that what a script has taken is given back and what it has so far is written."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
