"""Ctrl-C during training: the first is remembered until a step is whole, the second is obeyed at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets instead of raising KeyboardInterrupt wherever it strikes.

    Struck inside a step, the state may be given away to the step already, or be ahead of the metrics file. A program
    that handles SIGINT in its own way, or ignores it, keeps doing so, and outside the main thread no signal arrives.
    """
    asked, own = threading.Event(), signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not own:
        yield asked
        return

    def remember(_signal, _frame) -> None:
        asked.set()
        signal.signal(signal.SIGINT, own)

    signal.signal(signal.SIGINT, remember)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, own)
