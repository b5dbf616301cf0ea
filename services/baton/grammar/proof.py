"""Tries a grammar out in a process of its own, which is killed if that takes too long."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO

import msgspec

from baton.core.structured_output import StructuredOutput
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.limits import LITTLE_CPU_S, START_S, TRIAL_CPU_S, TRIAL_S
from baton.grammar.table import TokenTable
from baton.grammar.trial import GrammarTrial, Outcome, frame


class ProvingGround:
    """A process for trials, started for the first one and again after a grammar that killed it. For use by
    one thread."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._spent = False
        self._cpu_s = 0.0
        """The CPU time that the process had used at its last answer, in seconds."""
        self.used_cpu_s = 0.0
        """The CPU time of all trials so far and of restarting killed processes, in seconds."""

    def prove(self, output: StructuredOutput) -> str:
        """Return the grammar in llguidance's notation. Raises GrammarError if the grammar is invalid or
        exceeds the limits, and GrammarBusyError if no trial can be held."""
        process = self._started()
        try:
            attempt = GrammarTrial(output.kind, output.text, output.around)
            return self._ask(process, frame(attempt), TRIAL_S).grammar
        except TimeoutError:
            if self._spend(process) < LITTLE_CPU_S:
                raise GrammarBusyError(f"trying it out took over {TRIAL_S:g} s, most of it waiting") from None
            raise GrammarError(f"it is too complex: compiling it takes over {TRIAL_S:g} s") from None
        except EOFError:
            self._spend(process)
            if process.returncode == -signal.SIGALRM:
                raise GrammarBusyError("trying it out took longer than it may, most of it waiting") from None
            raise GrammarError(f"it is too complex: compiling it takes {_too_much(process)}") from None

    def renew(self) -> None:
        """Restart the process if the last trial killed it, so that the next one need not wait. The restart
        takes a while: report the outcome of the last trial first. Raises GrammarBusyError if the process does
        not start; the next trial then tries again."""
        if self._spent:
            self.close()
            self._start()
            self._await_ready()
            self.used_cpu_s += self._cpu_s

    def close(self) -> None:
        """Kill the process, whatever it does."""
        process, self._process = self._process, None
        self._ready = self._spent = False
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # unsent data
                        stream.close()

    def _spend(self, process: subprocess.Popen[bytes]) -> float:
        """Kill the process if it has not ended. Return the CPU time of its last trial, in seconds."""
        self._spent = True
        # Not by Popen, which would reap the process without the time that it used.
        os.kill(process.pid, signal.SIGKILL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        trial_s = max(0.0, used.ru_utime + used.ru_stime - self._cpu_s)
        self.used_cpu_s += trial_s
        return trial_s

    def _started(self) -> subprocess.Popen[bytes]:
        self.renew()
        if self._process is None:
            self._start()
        return self._await_ready()

    def _await_ready(self) -> subprocess.Popen[bytes]:
        process = self._process
        assert process is not None
        if not self._ready:
            try:
                self._cpu_s = self._receive(process, START_S).cpu_s
            except (TimeoutError, EOFError):
                self.close()
                raise GrammarBusyError("the process that tries grammars out did not start") from None
            self._ready = True
        return process

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "baton.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # A process that dies at once is noticed when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._send(process, frame(self._table))

    def _ask(self, process: subprocess.Popen[bytes], question: bytes, limit_s: float) -> Outcome:
        try:
            self._send(process, question)
        except BrokenPipeError:
            raise EOFError from None
        outcome = self._receive(process, limit_s)
        self.used_cpu_s += outcome.cpu_s - self._cpu_s
        self._cpu_s = outcome.cpu_s
        if outcome.error is not None:
            raise GrammarError(outcome.error)
        return outcome

    @staticmethod
    def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(content)
        process.stdin.flush()

    @staticmethod
    def _receive(process: subprocess.Popen[bytes], limit_s: float) -> Outcome:
        """Return the next answer. Raises TimeoutError, and EOFError when the process has ended."""
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        size = int.from_bytes(_read(process.stdout, 4, deadline))
        return msgspec.msgpack.decode(_read(process.stdout, size, deadline), type=Outcome)


def _too_much(process: subprocess.Popen[bytes]) -> str:
    """Say of which resource the grammar took too much, after the process died of it."""
    if process.returncode == -signal.SIGPROF:
        return f"over {TRIAL_CPU_S:g} s"
    return "too much memory or depth"


def _read(source: IO[bytes], size: int, deadline: float) -> bytes:
    """Read exactly ``size`` bytes from a pipe. Raises TimeoutError and EOFError."""
    content = b""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while len(content) < size:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(source.fileno(), size - len(content))
            if not part:
                raise EOFError
            content += part
    return content
