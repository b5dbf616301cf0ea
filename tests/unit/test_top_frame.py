"""``baton top``: what a frame shows of a ring, and what is said where there is none to show."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from baton.cli.ring_figures import (
    PointFigures,
    RingFigures,
    TenantFigures,
    WorkerFigures,
    WorkerRates,
    ask_for_figures,
    rates_between,
)
from baton.cli.top_frame import HEAD_LINES, count_text, curve, frame
from baton.process.options import UserError


def worker(address: str, role: str = "decode", **more: object) -> WorkerFigures:
    figures: dict[str, object] = {
        "model": "m",
        "ready": True,
        "draining": False,
        "running": 3,
        "waiting": 2,
        "blocks_free": 50,
        "blocks_cached": 25,
        "blocks_held": 25,
        "open_handoffs": 1,
    }
    return WorkerFigures(address=address, role=role, **{**figures, **more})  # type: ignore[arg-type]


def point(rate: float) -> PointFigures:
    return PointFigures(rate, 10 * rate, 92.4, 1410.0, 11.25, None)


def shown(ring: RingFigures, *, columns: int = 120, lines: int | None = None, failure: str = "") -> list[str]:
    rates = {"d:1": WorkerRates(0, 812.4), "p:1": WorkerRates(7512, 9.5)}
    console = Console(width=columns, file=io.StringIO(), highlight=False)
    with console.capture() as told:
        console.print(frame(ring, "http://here", rates, columns=columns, lines=lines, failure=failure))
    return [line.rstrip() for line in told.get().splitlines()]


RING = RingFigures(
    in_flight=12,
    waiting=4,
    prompt_tokens=45_200,
    generated_tokens=950,
    answers=1234,
    workers=[
        worker("d:2", draining=True),
        worker("p:1", "prefill", blocks_free=0, blocks_cached=0, blocks_held=0),
        worker("d:1"),
        worker("x:1", "unknown", ready=False),
        worker("d:3", ejected=True),
        worker("d:4", refused=True),
    ],
    points=[point(0), point(400), point(800)],
    tenants=[TenantFigures("acme", 3), TenantFigures("idle", 0), TenantFigures("other", 1)],
)


def test_a_frame() -> None:
    bar = "█" * 2 + "▒" * 2 + "░" * 4 + "  25 %"
    assert shown(RING) == [
        "baton top  http://here",
        "requests  12 in flight, 4 waiting, 1.2k answered (queue: acme 3, other 1)",
        "tokens/s  800 generated         ▁▅█                             950 in all",
        "          8k of prompts         ▁▅█                             45k in all",
        "latency   TTFT p50 92.4 ms, p99 1.41 s    ITL p50 11.2 ms, p99 -",
        "",
        "role     worker  state      run  wait  handoffs  prompt/s  tokens/s  KV held",
        "prefill  p:1     ready        3     2         1      7.5k       9.5  -",
        f"decode   d:1     ready        3     2         1         0       812  {bar}",
        f"         d:2     draining     3     2         1         -         -  {bar}",
        f"         d:3     ejected      3     2         1         -         -  {bar}",
        f"         d:4     refused      3     2         1         -         -  {bar}",
        f"unknown  x:1     not ready    3     2         1         -         -  {bar}",
    ]
    assert HEAD_LINES == 7


def test_rates_are_those_between_two_looks() -> None:
    def ring(**tokens: int) -> RingFigures:
        return RingFigures(
            workers=[
                worker(one, prompt_tokens=10 * done, generated_tokens=done) for one, done in tokens.items()
            ]
        )

    told = rates_between(ring(same=5, more=10, anew=90), ring(same=5, more=30, anew=1, new=7), 2.0)
    assert told == {"same": WorkerRates(0, 0), "more": WorkerRates(100, 10)}


def test_an_empty_ring() -> None:
    lines = shown(RingFigures())
    assert lines[-1] == "no workers: the router waits for them"
    assert "latency   TTFT -    ITL -" in lines


def test_no_more_lines_than_there_is_room_for() -> None:
    many = RingFigures(workers=[worker(f"d:{number:03}") for number in range(100)])
    lines = shown(many, lines=24)
    assert len(lines) == 24
    assert lines[-1].strip() == "… 84 more"
    assert len(shown(RING, lines=2)) == HEAD_LINES + 2


def test_a_common_terminal_shows_a_cluster_whole() -> None:
    far = [worker("10.244.113.107:9000", ready=False), worker("10.244.113.108:9000", "prefill")]
    queue = [TenantFigures(f"tenant-{number}", 1) for number in range(9)]
    lines = shown(RingFigures(workers=far, tenants=queue, points=RING.points), columns=80, lines=24)
    assert len(lines) == HEAD_LINES + 2, "no line is broken"
    assert lines[-1].endswith(" 25 %")
    assert not any("…" in line for line in lines[HEAD_LINES - 1 :])


def test_models_are_told_apart_where_there_are_several() -> None:
    lines = shown(RingFigures(workers=[worker("d:1"), worker("d:2", model="n")]))
    assert lines[-3].split()[:4] == ["role", "worker", "model", "state"]
    assert lines[-1].split()[:3] == ["d:2", "n", "ready"]


def test_figures_that_are_old_say_why() -> None:
    assert shown(RING, failure="it is gone")[0].endswith("it is gone")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.0k"),
        (1234, "1.2k"),
        (45_200, "45k"),
        (2.5, "2.5"),
        (3.4e12, "3400G"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert count_text(value) == text


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([0, 0], "▁▁"), ([0, 1, 2], "▁▅█"), ([9] * 50, "█" * 30)]
)
def test_curves(values: list[float], drawn: str) -> None:
    assert curve(values) == drawn


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/" else status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            403,
            b'{"error": {"message": "Not yours."}}',
            r"an operator's key is needed \(--api-key\): Not yours",
        ),
        (401, b"", r"an operator's key is needed \(--api-key\): HTTP 401"),
        (404, b"", "runs with --no-ui"),
        (503, b'{"error": {"message": "Draining."}}', "the ring refused: Draining."),
        (200, b'{"operator": false, "tenants": [], "every_s": 2}', "this one is of a tenant alone"),
        (200, b'{"workers": 3}', "figures that this version does not know"),
    ],
)
def test_what_is_no_ring_to_show_is_one_line(status: int, body: bytes, message: str) -> None:
    with answering(status, body) as url, pytest.raises(UserError, match=message) as error:
        ask_for_figures(url, "key")
    assert "\n" not in str(error.value)


def test_nothing_there() -> None:
    with pytest.raises(UserError, match=r"nothing listens on http://127\.0\.0\.1:9"):
        ask_for_figures("http://127.0.0.1:9", None)
