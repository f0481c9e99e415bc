"""What a script tells on stderr: notes along the way, and the one line with which it ends."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends the script with one line on stderr and exit status 1."""
    raise SystemExit(f"error: {message}")


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
