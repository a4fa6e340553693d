"""``trirun`` and ``python -m trirun_cli``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """:func:`trirun_cli.commands.app.main`, whose import takes long enough to be interrupted."""
    try:
        from .interrupts import Interrupts

        with Interrupts():
            from .commands.app import main

            main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # While Python ends, an exception would only be printed.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
