"""Ctrl-C and SIGTERM during training: the first is remembered until a step is whole, the second is obeyed at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator

# What each signal does unless a program has handlers of its own. Schedulers (Slurm, Kubernetes) end a job by SIGTERM.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets, instead of striking in the midst of a step.

    Struck inside a step, the state may be given away to the step already, or be ahead of the metrics file. A program
    that handles a signal in its own way, or ignores it, keeps doing so, and outside the main thread none arrives.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    ours = {number: usual for number, usual in _USUAL.items() if signal.getsignal(number) is usual}

    def restore() -> None:
        for number, usual in ours.items():
            signal.signal(number, usual)

    def remember(_signal, _frame) -> None:
        asked.set()
        restore()

    for number in ours:
        signal.signal(number, remember)
    try:
        yield asked
    finally:
        restore()
