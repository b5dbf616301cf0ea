"""What ``baton explain`` prints: a trace as a router tells it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from baton.cli.client import get
from baton.router.traces.phases import MEANING

_BAR = 24
"""Characters for the longest that a choice took."""
Fields = Mapping[str, Any]


def explain(
    url: str, request_id: str | None, *, limit: int = 20, as_json: bool = False, api_key: str | None = None
) -> str:
    """Raises UserError when the router is not there, or does not know the request."""
    path = f"/debug/requests?limit={limit}" if request_id is None else _path_of(request_id)
    told: Fields = orjson.loads(get(url, path, api_key))
    if as_json:
        return orjson.dumps(told, option=orjson.OPT_INDENT_2).decode()
    return "\n".join(_list(told["requests"]) if request_id is None else _request(told))


def _path_of(request_id: str) -> str:
    return f"/debug/requests/{quote(request_id, safe='')}"


def _list(requests: Sequence[Fields]) -> Iterator[str]:
    if not requests:
        yield "no requests yet"
    for each in requests:
        ttft = "-" if each["ttft_ms"] is None else f"{each['ttft_ms']:.1f}"
        yield (
            f"{each['arrived']}  {each['request_id']}  {each['outcome']}  {each['prompt_tokens']} + "
            f"{each['completion_tokens']} tokens, TTFT {ttft} ms, {each['e2e_ms']:.1f} ms in all"
        )


def _request(told: Fields) -> Iterator[str]:
    yield f"{told['request_id']} of {told['tenant']}: {told['outcome']}"
    where = f"{told['endpoint']} for {told['model']}"
    yield f"{told['arrived']} at {where}, {told['prompt_tokens']} prompt tokens"
    if told["client_request_id"]:
        yield f"its client calls it {told['client_request_id']}"
    if told["trace_id"]:
        yield f"trace {told['trace_id']}"
    for choice in told["choices"]:
        yield ""
        yield from _choice(choice, told["e2e_ms"])


def _choice(choice: Fields, e2e_ms: float) -> Iterator[str]:
    ttft = "no token yet" if choice["ttft_ms"] is None else f"TTFT {choice['ttft_ms']:.1f} ms"
    tpot = "" if choice["tpot_ms"] is None else f", {choice['tpot_ms']:.1f} ms per token after it"
    yield f"choice {choice['index']}: {choice['tokens']} tokens, {ttft}{tpot}, {e2e_ms:.1f} ms in all"
    most = max((phase["ms"] for phase in choice["phases"]), default=0.0)
    first = choice["ttft_ms"]
    for phase in choice["phases"]:
        if first is not None and phase["start_ms"] >= first - 0.001:
            yield f"  {first:10.1f} ms  -- first token"
            first = None
        bar = "#" * round(_BAR * phase["ms"] / most) if most else ""
        attempt = "" if phase["attempt"] is None else f"[{phase['attempt']}]"
        name, meaning = f"{phase['name']:<17} {attempt:<4}", MEANING.get(phase["name"], "")
        yield f"  {phase['start_ms']:10.1f} + {phase['ms']:9.3f} ms  {name} {meaning:<40} {bar}".rstrip()
    for attempt in choice["attempts"]:
        yield from _attempt(attempt)


def _attempt(attempt: Fields) -> Iterator[str]:
    where = ""
    if "decode" in attempt:
        where = " at " + " > ".join(filter(None, (attempt["prefill"], attempt["decode"])))
    cached = f", {attempt['cached_tokens']} tokens cached" if "cached_tokens" in attempt else ""
    preempted = f", preempted {attempt['preemptions']} times" if attempt.get("preemptions") else ""
    end = f"; ended at {attempt['ended_ms']:.1f} ms: {attempt.get('why', '')}" if attempt["ended_ms"] else ""
    yield f"  attempt {attempt['number']}{where}{cached}{preempted}{end}"
    if handoff := attempt.get("handoff"):
        times = ", ".join(f"{name[:-3]} {handoff[name]:.1f}" for name in handoff if name.endswith("_ms"))
        yield f"    handoff over {handoff['connector']}, in ms: {times}"
    if placement := attempt.get("placement"):
        yield from _placement(placement)


def _placement(placement: Fields) -> Iterator[str]:
    for rank, way in enumerate(placement["considered"]):
        what = "chosen" if rank == 0 else "not   "
        where = " > ".join(filter(None, (way["prefill"], way["decode"])))
        parts = " + ".join(
            f"{part} {way[f'{part}_ms']:.1f}" for part in ("queue", "compute", "handoff", "wait")
        )
        yield (
            f"    {what} {where}: cost {way['cost_ms']:.1f} ms, expected TTFT {way['ttft_ms']:.1f} = "
            f"{parts}, cached {way['cached_tokens']}, stream {way['stream_ms']:.1f}, harm "
            f"{way['harm_ms']:.1f}"
        )
    for worker in placement["workers"]:
        yield (
            f"    {worker['address']} ({worker['role']}) had {worker['prefill_tokens']} prompt tokens "
            f"waiting, {worker['sequences']} sequences, {worker['blocks_held']} blocks held, "
            f"{worker['prefill_tokens_per_s']:.0f} tokens/s"
        )
