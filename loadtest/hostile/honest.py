"""Honest tenants that stream all the time, and probes: the latencies and failures that they see.

    python -m loadtest.hostile.honest RECORD TENANT... < target.json

It runs until its standard input has another line, lets open streams end, and writes the outcome of all
requests. Each stream of a tenant asks at a fixed rate, on a connection that it keeps, as clients do; each
tenant has one over gRPC.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import msgspec
import uvloop

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc
from loadtest.hostile import wire
from loadtest.hostile.vocabulary import Target
from loadtest.hostile.wire import Line

STREAMS = 4
"""Streams of each tenant over HTTP."""
PERIOD_S = 2.8
MAX_TOKENS = 120
"""Tokens of a stream: so many that the one gap of a handoff does not set the 99th percentile of all gaps."""
PROBE_S = 0.02
FRESH_S = 0.5
"""The time between probes that each take a connection of their own, in seconds."""
PROBE_PATIENCE_S = 5.0
PATIENCE_S = 10.0
"""The time without any answer after which a request has failed, in seconds."""
ENDING_S = 12.0
WORDS = 40


class Request(msgspec.Struct, kw_only=True):
    """One request. Times are seconds of the system's monotonic clock."""

    tenant: str
    sent_at: float
    times: list[float] = []
    """The moments at which pieces of the stream came."""
    ended_at: float | None = None
    failed: str = ""
    """Why the request failed; empty: it was answered whole."""


class Probe(msgspec.Struct, kw_only=True):
    """One look at whether the router answers."""

    sent_at: float
    took_s: float
    fresh: bool
    """Whether the probe had a connection of its own."""
    failed: bool = False


class Recorded(msgspec.Struct, kw_only=True):
    """The record of all honest clients."""

    requests: list[Request] = []
    probes: list[Probe] = []


class Honest:
    """All clients of one ring."""

    def __init__(self, target: Target, tenants: tuple[str, ...]) -> None:
        self._target = target
        self._tenants = tenants
        self._over = asyncio.Event()
        self.recorded = Recorded()

    async def run(self) -> Recorded:
        """Run until ``stop``, and until open streams have ended."""
        streams = [
            asyncio.create_task(each)
            for tenant in self._tenants
            for each in (*(self._http(tenant, i) for i in range(STREAMS)), self._grpc(tenant))
        ]
        probes = [asyncio.create_task(self._probe()), asyncio.create_task(self._probe_afresh())]
        await self._over.wait()
        _, open_still = await asyncio.wait(streams, timeout=ENDING_S)
        for task in [*open_still, *probes]:
            task.cancel()
        ended = await asyncio.gather(*streams, *probes, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return self.recorded

    def stop(self) -> None:
        self._over.set()

    # --- streams

    async def _turns(self, number: int) -> AsyncIterator[int]:
        """Yield turns at a fixed rate, or later if the request before takes longer."""
        asked = 0
        at = time.monotonic() + PERIOD_S * number / STREAMS
        while not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), max(0.0, at - time.monotonic()))
                return
            yield asked
            asked += 1
            at = max(at + PERIOD_S, time.monotonic())

    def _begin(self, tenant: str) -> Request:
        request = Request(tenant=tenant, sent_at=time.monotonic())
        self.recorded.requests.append(request)
        return request

    async def _http(self, tenant: str, number: int) -> None:
        line: Line | None = None
        async for asked in self._turns(number):
            request = self._begin(tenant)
            try:
                if line is None or line.reader.at_eof():
                    line = await wire.call(self._target.http, source=None)
                line.writer.write(self._body(tenant, number, asked))
                await _stream(line, request)
                request.ended_at = time.monotonic()
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                request.failed = str(error) or type(error).__name__
                if line is not None:
                    line.close()
                line = None
            except asyncio.CancelledError:
                request.failed = "not ended"
                raise

    def _body(self, tenant: str, number: int, asked: int) -> bytes:
        body = msgspec.json.encode(
            {
                "model": "demo",
                "prompt": _prompt(tenant, number, asked),
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        )
        return wire.request("/v1/completions", body, key=self._target.keys.get(tenant))

    async def _grpc(self, tenant: str) -> None:
        key = self._target.keys.get(tenant)
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        async with grpc.aio.insecure_channel(self._target.grpc) as channel:
            stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(channel)
            async for asked in self._turns(STREAMS):
                request = self._begin(tenant)
                wanted = pb.GenerateRequest(
                    model="demo",
                    text=_prompt(tenant, STREAMS, asked),
                    params=pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
                )
                try:
                    async for _ in stub.Generate(wanted, metadata=metadata, timeout=3 * PATIENCE_S):
                        request.times.append(time.monotonic())
                    request.ended_at = time.monotonic()
                except grpc.aio.AioRpcError as error:
                    request.failed = f"gRPC {error.code().name}"
                except asyncio.CancelledError:
                    request.failed = "not ended"
                    raise

    # --- probes

    async def _probe(self) -> None:
        """Probe on one connection that stays open."""
        line: Line | None = None
        while True:
            began = time.monotonic()
            probe = Probe(sent_at=began, took_s=0.0, fresh=False)
            try:
                if line is None:
                    line = await wire.call(self._target.http, source=None)
                    began = probe.sent_at = time.monotonic()
                line.writer.write(wire.request("/version"))
                answer = await wire.answer_of(line, began, 60.0)
                probe.failed = answer.ending != "200"
            except OSError:
                probe.failed = True
            except asyncio.CancelledError:
                self._keep(probe)
                raise
            self._keep(probe)
            if probe.failed and line is not None:
                line.close()
                line = None
            await asyncio.sleep(max(0.001 if not probe.failed else PROBE_S, PROBE_S - probe.took_s))

    async def _probe_afresh(self) -> None:
        while True:
            probe = Probe(sent_at=time.monotonic(), took_s=0.0, fresh=True)
            answer = await wire.ask(
                self._target.http, wire.request("/health"), wait_s=PROBE_PATIENCE_S, source=None
            )
            probe.failed = answer.ending != "200"
            self._keep(probe)
            await asyncio.sleep(max(0.0, FRESH_S - probe.took_s))

    def _keep(self, probe: Probe) -> None:
        probe.took_s = time.monotonic() - probe.sent_at
        self.recorded.probes.append(probe)


def _prompt(tenant: str, number: int, asked: int) -> str:
    words = " ".join(f"w{(number * 7919 + asked * 104729 + at) % 9973}" for at in range(WORDS))
    return f"{tenant} {words}"


async def _stream(line: Line, request: Request) -> None:
    """Read one stream to its end. Raises ValueError for a malformed answer."""
    async with asyncio.timeout(PATIENCE_S):
        head = await line.reader.readuntil(b"\r\n\r\n")
    status = head[9:12].decode("ascii", "replace")
    if status != "200":
        line.close()
        raise ValueError(f"HTTP {status}")
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        async with asyncio.timeout(PATIENCE_S):
            data = await line.reader.read(wire.PIECE)
        if not data:
            raise EOFError("broken off")
        request.times += [time.monotonic()] * data.count(b"data: {")
        if b'data: {"error"' in data:
            line.close()
            raise ValueError("an error in the stream")
        tail = (tail + data)[-64:]
    if b"[DONE]" not in tail:
        line.close()
        raise ValueError("ended without [DONE]")


async def _main(target: Target, tenants: tuple[str, ...]) -> Recorded:
    honest = Honest(target, tenants)
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(sys.stdin.fileno())
        honest.stop()

    loop.add_reader(sys.stdin.fileno(), heard)
    return await honest.run()


def main() -> None:
    target = msgspec.json.decode(sys.stdin.buffer.readline(), type=Target)
    gc.disable()  # a collection over all records would be in the times
    record, *tenants = sys.argv[1:]
    recorded = uvloop.run(_main(target, tuple(tenants)))
    Path(record).write_bytes(msgspec.json.encode(recorded))


if __name__ == "__main__":
    main()
