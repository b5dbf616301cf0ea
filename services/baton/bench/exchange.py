"""Sends requests and records their answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from baton.bench.events import DONE, EventReader
from baton.bench.http import BrokenError, ConnectError, HttpClient
from baton.bench.record import RequestFailure, RequestRecord
from baton.bench.stream import PartialAnswer
from baton.bench.target import COMPLETIONS, refusal


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose body is already encoded, so that encoding it delays no other request."""

    body: bytes
    prompt_tokens: int
    """The prompt's tokens as the workload asks for them; the server's own count takes precedence."""


class RequestSender:
    """Sends requests of one run; the run's clock starts when the sender is made."""

    def __init__(self, client: HttpClient, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        self._began = time.perf_counter()

    def now(self) -> float:
        """The seconds since the run began."""
        return time.perf_counter() - self._began

    async def send(self, index: int, prepared: Prepared, due: float) -> RequestRecord:
        """Send one request now and return its record, which also holds any error. If the call is cancelled,
        the record says that the run ended first."""
        sent = self.now()
        answer = PartialAnswer()
        try:
            async with asyncio.timeout(self._timeout):
                failure = await self._stream(prepared.body, answer, sent)
        except TimeoutError:
            failure = RequestFailure("timeout", f"no whole answer within {self._timeout:g} s")
        except ConnectError as error:
            failure = RequestFailure("connect", str(error))
        except BrokenError as error:
            failure = RequestFailure("broken", str(error))
        except msgspec.MsgspecError as error:
            failure = RequestFailure("bad_event", str(error))
        except asyncio.CancelledError:
            failure = RequestFailure("unfinished", "the run ended first")
        return RequestRecord(
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

    async def _stream(self, body: bytes, answer: PartialAnswer, sent: float) -> RequestFailure | None:
        async with self._client.request("POST", COMPLETIONS, body) as response:
            if response.status != 200:
                said = refusal(response.status, await response.body())
                return RequestFailure(f"http_{response.status}", said)
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
