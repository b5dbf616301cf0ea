"""``baton up``: a whole ring on one machine, in one terminal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from baton.cli import client
from baton.cli.client import Question
from baton.cli.console import PlainView, TerminalView, View
from baton.cli.ring import RingPlan
from baton.cli.supervisor import Supervisor
from baton.process import ready
from baton.process.options import StartError, UserError, join_address, local_host, parse_address
from baton.router.config import RouterConfig

_MEET_SECONDS = 30.0
_MEET_POLL_SECONDS = 0.1
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What ``baton up`` does besides running the ring."""

    question: Question | None = None
    log_level: int = logging.WARNING


def up(ring: RingPlan, options: UpOptions) -> int:
    """Run the ring until a signal. Returns the exit status; raises StartError when the ring cannot go on."""
    view: TerminalView | PlainView
    if sys.stdout.isatty():
        view = TerminalView(options.log_level)
        shown: AbstractContextManager[object] = view
    else:
        view = PlainView(options.log_level)
        shown = nullcontext()
    with shown:
        return asyncio.run(_Session(ring, options, view).run())


class _Session:
    """One run of ``baton up``."""

    def __init__(self, ring: RingPlan, options: UpOptions, view: TerminalView | PlainView) -> None:
        self._ring = ring
        self._options = options
        self._view = view
        self._started = time.monotonic()
        self._ready = False

    async def run(self) -> int:
        self._view.say(self._ring.describe())
        supervisor = Supervisor(self._ring.specs(), self._view)
        stop = asyncio.Event()
        _on_signals(stop, supervisor)
        stopped = asyncio.create_task(stop.wait())
        supervised = asyncio.create_task(supervisor.run())
        serving = asyncio.create_task(self._serve(supervisor))
        try:
            await _first(stopped, supervised, serving)
        finally:
            self._settle()
            if stop.is_set():
                self._view.say("stopping")
            await supervisor.stop()
            serving.cancel()
        return 0 if self._ready else INTERRUPTED

    async def _serve(self, supervisor: Supervisor) -> None:
        messages = await supervisor.all_ready()
        url = url_of(messages["router"], tls=self._ring.router.client_tls is not None)
        await self._meet(url)
        self._ready = True
        self._settle()
        _show_address(self._view, url, messages["router"], self._ring.router)
        if self._options.question:
            await asyncio.to_thread(self._answer, url, self._options.question)
        self._view.say("serving; Ctrl-C stops the ring")
        await asyncio.Event().wait()

    async def _meet(self, url: str) -> None:
        """Wait till the router has found its workers."""
        deadline = time.monotonic() + _MEET_SECONDS
        while not await asyncio.to_thread(client.is_ready, url):
            if time.monotonic() > deadline:
                raise StartError(f"the router did not reach its workers within {_MEET_SECONDS:.0f} s")
            await asyncio.sleep(_MEET_POLL_SECONDS)

    def _answer(self, url: str, question: Question) -> None:
        self._view.say(f"\n> {question.prompt}")
        first = tokens = None
        try:
            for piece in client.ask(url, question):
                if piece.text and first is None:
                    first = time.monotonic()
                tokens = piece.completion_tokens or tokens
                print(piece.text, end="", flush=True)
        except UserError as error:
            # The ring may be well (a wrong question, a model without a chat template): go on serving.
            self._view.warn(f"\nno answer: {error}")
            return
        after = f"{(first or time.monotonic()) - self._started:.1f} s"
        self._view.say(f"\n\n({tokens} tokens; the first came {after} after the start)")

    def _settle(self) -> None:
        if isinstance(self._view, TerminalView):
            self._view.settle()


def _on_signals(stop: asyncio.Event, supervisor: Supervisor) -> None:
    """The first signal ends the ring in order, the second at once."""

    def on_signal() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


async def _first(*tasks: asyncio.Task[object]) -> None:
    """Wait for one of the tasks, and raise what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def url_of(message: ready.Message, *, tls: bool = False) -> str:
    """The address at which the router that said this is called."""
    if not isinstance(message, ready.RouterReady):
        raise StartError("the router is ready but did not say where")
    host, port = parse_address(message.http)
    scheme = "https" if tls else "http"
    return f"{scheme}://{join_address(local_host(host), port)}"


def _show_address(view: View, url: str, message: ready.Message, router: RouterConfig) -> None:
    grpc = message.grpc if isinstance(message, ready.RouterReady) else None
    view.say(f"\nready on {url}" + (f", gRPC on {grpc}" if grpc else "") + "; ask it with")
    key = "" if router.api_keys is None else " -H 'Authorization: Bearer YOUR-KEY'"
    view.say(
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{router.model_name}", "stream": true, '
        '"messages": [{"role": "user", "content": "What is Baton?"}]}\''
    )
