"""Heads of requests that do not end, and connections on which none comes."""

from __future__ import annotations

import asyncio
import time

from loadtest.hostile.vocabulary import MIB, Attack, Felt, Found, Setup, Target, Watched
from loadtest.hostile.wire import PIECE, Line, call, push

START = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n"
MAX_BYTES = 64 * MIB
LONGER_S = 12.0
"""A time longer than a head may take, in seconds."""
SWALLOWED_MIB = 16.0
"""More MiB than all buffers on the way hold."""


async def _endless(target: Target, found: Found, begin: bytes, piece: bytes, most: int) -> None:
    line = await call(target.http)
    line.writer.write(begin)
    taken = await push(line, piece, most // len(piece), until=time.monotonic() + 15)
    found.figures["swallowed_mib"] = taken / MIB
    found.count("still open" if await line.is_open(1.0) else "closed")
    line.close()


async def one_header(target: Target, found: Found) -> None:
    await _endless(target, found, START + b"x-long: ", b"a" * PIECE, MAX_BYTES)


async def many_lines(target: Target, found: Found) -> None:
    """Send 11 MiB of header lines."""
    await _endless(target, found, START, b"a: b\r\n" * 40_000, 11 * MIB)


async def long_path(target: Target, found: Found) -> None:
    await _endless(target, found, b"GET /", b"a" * PIECE, MAX_BYTES)


def _swallowed(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("swallowed_mib") >= SWALLOWED_MIB


def _kept_lines(found: Found, watched: Watched, felt: Felt) -> bool:
    return watched.rss_grew > 80


async def _open(target: Target, found: Found, count: int, sources: int = 1) -> list[Line]:
    """Open ``count`` connections, from ``sources`` addresses in turns."""
    lines = []
    for number in range(count):
        try:
            async with asyncio.timeout(2.0):
                lines.append(await call(target.http, source=f"127.0.0.{2 + number % sources}"))
        except (OSError, TimeoutError):
            found.count("refused connection")
    return lines


async def _keep(lines: list[Line], found: Found, seconds: float, piece: bytes = b"") -> None:
    """Send ``piece`` each second on each connection, and count the connections that stay."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1.0)
        for line in lines:
            if piece and not line.writer.transport.is_closing():
                line.writer.write(piece)
    open_still = await asyncio.gather(*(line.is_open(0.5) for line in lines))
    found.figures["still_open"] = sum(open_still)
    found.got |= {"still open": sum(open_still), "closed": len(lines) - sum(open_still)}


async def slow(target: Target, found: Found) -> None:
    """Run Slowloris."""
    lines = await _open(target, found, 200)
    for line in lines:
        line.writer.write(START)
    await _keep(lines, found, LONGER_S, b"a: b\r\n")


async def silent_256(target: Target, found: Found) -> None:
    await _keep(await _open(target, found, 300), found, LONGER_S)


async def silent_1024(target: Target, found: Found) -> None:
    await _keep(await _open(target, found, 1100, sources=8), found, LONGER_S)


def _stay(found: Found, watched: Watched, felt: Felt) -> bool:
    return found.figure("still_open") >= 100


def _locked_out(found: Found, watched: Watched, felt: Felt) -> bool:
    return felt.probes_failed >= 2


ATTACKS = (
    Attack(
        name="head-long",
        finding="S2",
        aim="one header of 16 MiB and more is taken in",
        run=one_header,
        reached=_swallowed,
    ),
    Attack(
        name="head-lines",
        finding="S2",
        aim="11 MiB of header lines take 80 MiB",
        run=many_lines,
        reached=_kept_lines,
    ),
    Attack(
        name="head-path",
        finding="S2",
        aim="a path of 16 MiB and more is taken in",
        run=long_path,
        reached=_swallowed,
    ),
    Attack(
        name="head-slow",
        finding="S6",
        aim="100 unfinished heads are open after 12 s",
        run=slow,
        reached=_stay,
        max_s=30,
    ),
    Attack(
        name="silent-256",
        finding="S6",
        aim="new connections get no answer",
        run=silent_256,
        reached=_locked_out,
        setup=Setup(descriptors=256),
        max_s=30,
    ),
    Attack(
        name="silent-1024",
        finding="S6",
        aim="new connections get no answer (strangers at 8 addresses)",
        run=silent_1024,
        reached=_locked_out,
        setup=Setup(descriptors=1024),
        max_s=40,
    ),
)
