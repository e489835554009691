"""Trainers that take turns: each loads, compiles and warms up once, then trains only while it is told to.

`Turns` sits in the trainer's process and hears of every optimiser step; `Trainer` is its handle in the process that
measures. They exchange lines of JSON over stdin and stdout. Nothing but the standard library: trainers live in
environments of their own.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Turns:
    """The trainer's side. tokens: a turn ends with the first step at which it has seen so many. warm_up: steps before
    the first turn, in which things compile and pools fill."""

    def __init__(self, tokens: int, warm_up: int, about: dict[str, Any]):
        # Whatever a library prints goes to stderr, so that stdout holds our lines only.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._tokens, self._warm_up, self._about = tokens, warm_up, about
        self._began, self._seen, self._steps, self._waited = time.perf_counter(), 0, 0, 0.0

    def step(self, tokens: int, waited: float = 0.0) -> None:
        """To be called after each finished optimiser step. tokens: those it saw, without padding. waited: seconds of it
        in which the trainer waited for data. Returns when there is more to train; raises SystemExit at the end."""
        self._steps += 1
        self._seen += tokens
        self._waited += waited
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up:
                self._wait({"about": self._about, "peak_loading": peak_memory()})
        elif self._seen >= self._tokens:
            seconds = time.perf_counter() - self._began
            self._wait({"tokens": self._seen, "seconds": seconds, "steps": self._steps, "waited": self._waited})

    def _wait(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)
        if sys.stdin.readline() != "turn\n":
            print(json.dumps({"peak_stepping": peak_memory()}), file=self._out, flush=True)
            raise SystemExit(0)
        if "about" in message:
            forget_peak()
        self._began, self._seen, self._steps, self._waited = time.perf_counter(), 0, 0, 0.0


def peak_memory() -> int:
    """Bytes of the largest resident set so far.

    Not getrusage: its maximum begins with that of the process which started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """The next peak is that from here on (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Trainer:
    """The measuring side: a process that calls `Turns.step`. Its stderr goes to the file `log`."""

    def __init__(self, name: str, command: list[str | os.PathLike], environment: dict[str, str], log: Path):
        self.name, self._log = name, log
        with open(log, "w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def ready(self) -> dict[str, Any]:
        """Waits for the end of the warm-up: {about, peak_loading}."""
        return self._read()

    def turn(self) -> dict[str, Any]:
        """One turn: {tokens, seconds, steps, waited}."""
        self._say("turn\n")
        return self._read()

    def end(self) -> dict[str, Any]:
        """Ends the process: {peak_stepping}, of all turns."""
        self._say("end\n")
        last = self._read()
        self._process.wait(60)
        return last

    def kill(self) -> None:
        """Ends the process at once, unless it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> RuntimeError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["(it said nothing)"]
        return RuntimeError(f"{self.name} ended with status {self._process.wait(60)} / {self._log} / {lines[-1]}")
