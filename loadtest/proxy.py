"""A plain proxy before two vLLM servers with NixlConnector: prefill computes the prompt and one token, decode
fetches the KV blocks from it and streams the answer.

    python -m loadtest.proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Bytes of the answer go through as they come. What decode needs to fetch the blocks is ``kv_transfer_params``
in prefill's answer; the fields are those of vLLM 0.32.0.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from baton.bench.config import parse_url
from baton.bench.http import HttpClient
from baton.bench.http import Response as Answer
from baton.bench.target import COMPLETIONS

MODELS = "/v1/models"
OF_THE_WHOLE_ANSWER = ("stream", "stream_options", "min_tokens", "return_token_ids")
"""The fields of a request that are left out of the one that asks prefill for one token."""


def prefill_body(fields: dict[str, object]) -> bytes:
    """Return the request to prefill for a client's request."""
    kept = {name: value for name, value in fields.items() if name not in OF_THE_WHOLE_ANSWER}
    return orjson.dumps({**kept, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})


class Proxy:
    """Forwards to one prefill and one decode server."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = HttpClient(parse_url("prefill", prefill))
        self._decode = HttpClient(parse_url("decode", decode))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route(MODELS, self.models),
                Route(COMPLETIONS, self.complete, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response()

    async def models(self, request: Request) -> Response:
        async with self._decode.request("GET", MODELS) as answer:
            return Response(await _whole(answer), answer.status, media_type="application/json")

    async def complete(self, request: Request) -> Response:
        """Answer a client's request. A refusal of either server goes to the client as it is. A first answer
        that names no blocks is an error: decode would compute the prompt itself, and the measurement would be
        of something else."""
        fields = orjson.loads(await request.body())
        async with self._prefill.request("POST", COMPLETIONS, prefill_body(fields)) as answer:
            status, body = answer.status, await _whole(answer)
        if status != 200:
            return Response(body, status, media_type="application/json")
        transfer = orjson.loads(body).get("kv_transfer_params")
        if not transfer or not transfer.get("remote_block_ids"):
            message = "prefill handed no KV blocks on; is NixlConnector set up?"
            return Response(orjson.dumps({"error": {"message": message}}), 502, media_type="application/json")
        return await self._hand_on(orjson.dumps({**fields, "kv_transfer_params": transfer}))

    async def _hand_on(self, body: bytes) -> Response:
        """Stream decode's answer, piece by piece. A client that leaves closes the connection to decode."""
        async with AsyncExitStack() as stack:
            answer = await stack.enter_async_context(self._decode.request("POST", COMPLETIONS, body))
            open_still = stack.pop_all()

        async def pieces() -> AsyncIterator[bytes]:
            async with open_still:
                async for piece in answer.pieces():
                    yield piece

        media_type = "text/event-stream" if answer.status == 200 else "application/json"
        return StreamingResponse(pieces(), answer.status, media_type=media_type)


async def _whole(answer: Answer) -> bytes:
    return b"".join([piece async for piece in answer.pieces()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", required=True, help="address of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="address of the server that answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    app = Proxy(chosen.prefill, chosen.decode).app()
    uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning", timeout_keep_alive=600)


if __name__ == "__main__":
    main()
