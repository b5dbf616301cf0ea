"""Sends one request and keeps the record of its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from baton.bench.events import DONE, EventReader
from baton.bench.http import BrokenError, ConnectError, HttpClient
from baton.bench.record import Failure, Record
from baton.bench.stream import Answer
from baton.bench.target import COMPLETIONS, refusal


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose body is written already, so that writing it delays no other."""

    body: bytes
    prompt_tokens: int
    """As asked for; the server's own count goes before it."""


class Exchange:
    """Sends requests of one run; its clock starts when it is made."""

    def __init__(self, client: HttpClient, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    async def send(self, index: int, prepared: Prepared, due: float) -> Record:
        """The record of one request, sent now. Whatever goes wrong is in it. If this is cancelled, the record
        says that the run ended first."""
        sent = self.now()
        answer = Answer()
        try:
            async with asyncio.timeout(self._timeout):
                failure = await self._stream(prepared.body, answer, sent)
        except TimeoutError:
            failure = Failure("timeout", f"no whole answer within {self._timeout:g} s")
        except ConnectError as error:
            failure = Failure("connect", str(error))
        except BrokenError as error:
            failure = Failure("broken", str(error))
        except msgspec.MsgspecError as error:
            failure = Failure("bad_event", str(error))
        except asyncio.CancelledError:
            failure = Failure("unfinished", "the run ended first")
        return Record(
            index=index,
            due=due,
            sent=sent,
            ended=self.now() - sent,
            arrivals=tuple(answer.arrivals),
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else prepared.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            tokens_per_chunk_known=answer.counted,
            failure=failure,
        )

    async def _stream(self, body: bytes, answer: Answer, sent: float) -> Failure | None:
        async with self._client.request("POST", COMPLETIONS, body) as response:
            if response.status != 200:
                said = refusal(response.status, await response.body())
                return Failure(f"http_{response.status}", said)
            events = EventReader()
            ended = False
            async for piece in response.pieces():
                at = self.now() - sent
                for data in events.feed(piece):
                    if data == DONE:
                        ended = True
                    else:
                        answer.take(data, at)
        return answer.failure(ended)
