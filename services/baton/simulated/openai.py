"""A plain OpenAI API on a simulated worker, so that other routers can be put before the same workers.

The API is as much as routers pass through: completions and chats of one answer, streamed or whole. Texts
count as four characters a token, and a token is written as its id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping

import msgspec
import orjson
import uvicorn

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.net import sockets
from baton.process.options import StartError, join_address
from baton.telemetry.supervision import Supervision
from baton.v1 import inference_pb2, worker_pb2
from baton.worker.routers import Routers, RouterStream

Scope = MutableMapping[str, object]
Event = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

log = logging.getLogger(__name__)

OWNER = "http"
CHARS = 4
MAX_BODY_BYTES = 8 << 20
BEAT_S = 0.2
_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CANCELLED: "stop",
}


class SimulatedRequest(msgspec.Struct):
    """The fields that are used; others are ignored."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool = False


class Front:
    """Serves the API from the worker's own loop. To the engine it is one more router."""

    def __init__(self, engine: Engine, routers: Routers, model: str) -> None:
        self._engine = engine
        self._model = model
        self._stream = RouterStream(OWNER, worker_pb2.Load)
        self._stream.drain_noted = True
        self._stream.calls_again = False
        routers.add(self._stream)
        self._open: dict[str, asyncio.Queue[worker_pb2.TokenDelta]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._supervision = Supervision()

    async def listen(self, host: str, port: int) -> None:
        """Listen, and serve in the background. Raises StartError when the port cannot be had."""
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            http="httptools",
            interface="asgi3",
        )
        sock = _bind(host, port)
        log.info("OpenAI API at http://%s", join_address(host, sock.getsockname()[1]))
        server = uvicorn.Server(config)

        self._tasks = [
            asyncio.create_task(server._serve([sock])),  # without signal handlers: the worker has its own
            self._supervision.start("answers", self._deal_out),
            self._supervision.start("beat", self._beat),
        ]

    async def _deal_out(self) -> None:
        """Pass the tokens of each frame to their requests."""
        while (message := await self._stream.frames.get()) is not None:
            for delta in message.frame.deltas:
                queue = self._open.get(delta.request_id)
                if queue is not None and not delta.started:
                    queue.put_nowait(delta)

    async def _beat(self) -> None:
        while True:
            self._stream.pulse.heard()
            await asyncio.sleep(BEAT_S)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/v1/models":
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "baton"}
            await _reply(send, 200, orjson.dumps({"object": "list", "data": [model]}))
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(receive, send, chat=path != "/v1/completions")
        elif path == "/health":
            await _reply(send, 200, b"{}")
        else:
            await _reply(send, 404, _error(f"there is no {path} here"))

    async def _complete(self, receive: Receive, send: Send, chat: bool) -> None:
        try:
            ask = msgspec.json.decode(await _body(receive), type=SimulatedRequest)
            sequence = self._sequence(ask)
            queue = self._open[sequence.request_id] = asyncio.Queue()
            gone = asyncio.create_task(_gone(receive))
            try:
                self._engine.add(sequence)
                chunks = self._chunks(sequence, queue, gone)
                if ask.stream:
                    await self._send_stream(sequence, chunks, send, chat)
                else:
                    await self._send_whole(sequence, chunks, send, chat)
            finally:
                gone.cancel()
                del self._open[sequence.request_id]
                self._engine.cancel(sequence.request_id, 0)
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            await _reply(send, 400, _error(str(error)))

    def _sequence(self, ask: SimulatedRequest) -> Sequence:
        most = ask.max_completion_tokens or ask.max_tokens or 16
        seed = secrets.randbits(32) if ask.seed is None else ask.seed
        params = ResolvedSampling(
            max_tokens=most, temperature=ask.temperature, seed=seed, ignore_eos=ask.ignore_eos
        )
        given = ask.prompt if ask.prompt is not None else orjson.dumps(ask.messages).decode()
        prompt_ids = array("I", given) if isinstance(given, list) else self._ids(given)
        return Sequence(f"cmpl-{secrets.token_hex(8)}", 0, prompt_ids, params, owner=OWNER)

    def _ids(self, text: str) -> array[int]:
        pieces = (text[at : at + CHARS] for at in range(0, len(text), CHARS))
        return array("I", (zlib.crc32(piece.encode()) % self._engine.vocab_size for piece in pieces))

    async def _chunks(
        self, sequence: Sequence, queue: asyncio.Queue[worker_pb2.TokenDelta], gone: asyncio.Task[None]
    ) -> AsyncIterator[tuple[str, str | None]]:
        """Yield each text with None, and the last one with its finish reason, which is left out if the client
        has ``gone``."""
        reason: str | None = None
        while reason is None and not gone.done():
            delta = await queue.get()
            if delta.error:
                raise ValueError(delta.error)
            reason = _REASONS.get(delta.finish_reason)
            yield "".join(f" {token}" for token in delta.token_ids), reason

    async def _send_stream(
        self, sequence: Sequence, chunks: AsyncIterator[tuple[str, str | None]], send: Send, chat: bool
    ) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        kind = "chat.completion.chunk" if chat else "text_completion"
        before = orjson.dumps({"id": sequence.request_id, "object": kind, "model": self._model})[:-1]
        created = b',"created":%d,"choices":[' % time.time()
        try:
            async for text, reason in chunks:
                said = {"delta": {"content": text}} if chat else {"text": text}
                choice = orjson.dumps({"index": 0, **said, "finish_reason": reason})
                event = b"data: " + before + created + choice + b"]}\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ValueError as error:  # the status is already sent
            event = b"data: " + _error(str(error)) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send_whole(
        self, sequence: Sequence, chunks: AsyncIterator[tuple[str, str | None]], send: Send, chat: bool
    ) -> None:
        text, reason = "", None
        async for piece, reason in chunks:  # noqa: B007 - the last reason is used
            text += piece
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        counts = {"prompt_tokens": sequence.num_prompt, "completion_tokens": sequence.num_outputs}
        body = {
            "id": sequence.request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [{"index": 0, **said, "finish_reason": reason}],
            "usage": {**counts, "total_tokens": sequence.num_tokens},
        }
        await _reply(send, 200, orjson.dumps(body))


async def _gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _bind(host: str, port: int) -> socket.socket:
    try:
        return sockets.listen(host, port, backlog=2048)
    except OSError as error:
        raise StartError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from error


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    more = True
    while more:
        event = await receive()
        part = event.get("body", b"")
        assert isinstance(part, bytes)
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the body has more than {MAX_BODY_BYTES} bytes")
        more = bool(event.get("more_body"))
    return bytes(body)


async def _reply(send: Send, status: int, body: bytes) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _error(message: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}})
