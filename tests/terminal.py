"""A child process as a terminal starts it."""

from __future__ import annotations

import signal


def hears_signals() -> None:
    """For ``Popen(preexec_fn=...)``: a suite that runs in the background or under nohup ignores these, as its children
    would."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
