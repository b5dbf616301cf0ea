"""``python -m loadtest.split``: options, proxy, what is counted of bursts, the table's arithmetic."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.bench.config import ServeConfig
from baton.bench.record import RequestFailure, RequestRecord, TokenArrival
from baton.bench.serve import measure
from baton.bench.summary import Summary
from baton.bench.workload.config import WorkloadConfig
from loadtest import cores, split
from loadtest.bursts import Bursts, Outcome, figures_of, gaps_since, offer
from loadtest.engines import Engine
from loadtest.proxy import Proxy
from loadtest.turns import Figures, Round, rows, take_turns
from tests.support.api_server import serving_app, until
from tests.support.fake_openai import FakeServer
from tests.support.tiny_models import save_byte_tokenizer

BLOCKS = {"remote_block_ids": [[3, 4]], "remote_engine_id": "p", "do_remote_prefill": True}
NO_BLOCKS = {**BLOCKS, "remote_block_ids": []}
UNFINISHED = RequestFailure("unfinished", "the run ended first")


class TestOptions:
    def test_defaults_are_those_of_the_load(self) -> None:
        chosen = split.parse(["--parts", "bursts"])
        assert {name: getattr(chosen, name) for name in vars(Bursts())} == vars(Bursts())

    def test_flags_and_options_of_others(self) -> None:
        both = "--max-num-batched-tokens 128"
        chosen = split.parse(["--parts", "bursts", "--vllm-as-it-pins", "--both", both])
        assert not chosen.apart
        assert chosen.both == both.split()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--parts", "bursts,all"], "--parts: there is no 'all'; allowed: vllm, bursts"),
            (["--parts", "bursts", "--every", "0"], "--every: must be above 0, not 0"),
            (["--parts", "bursts", "--prompt-len", "-1"], "--prompt-len: must be above 0, not -1"),
            (["--peers", "nowhere"], "--peers: there is no vLLM in nowhere; scripts/peers installs it"),
        ],
    )
    def test_what_cannot_work_is_named(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            split.parse(arguments)
        assert said in capsys.readouterr().err


class TestCores:
    @pytest.mark.parametrize(
        ("all_cores", "shares"),
        [([0, 1], ([0], [1])), ([2, 3, 5], ([2], [3])), ([0, 1, 2, 3], ([0, 1], [2, 3]))],
    )
    def test_halves_are_equal(self, all_cores: list[int], shares: tuple[list[int], list[int]]) -> None:
        assert cores.share_out(all_cores) == shares

    def test_one_core_is_too_few(self) -> None:
        with pytest.raises(SystemExit, match="need a core each, and there is 1"):
            cores.share_out([0])


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Signals take their time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class TestTurns:
    def test_everyone_gets_each_seed_and_goes_first_in_turn(self) -> None:
        asked: list[tuple[str, int]] = []

        def ask(url: str, seed: int) -> Figures:
            asked.append((url, seed))
            return {"ms": float(seed)}

        done = list(take_turns("case", {name: Engine(name) for name in "ab"}, ask, 3, count(7)))
        assert asked == [("a", 7), ("b", 7), ("b", 8), ("a", 8), ("a", 9), ("b", 9)]
        assert [one.figures["b"]["ms"] for one in done] == [7, 8, 9]

    def test_what_never_rests_is_stopped_while_others_are_asked(self) -> None:
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
            engines = {"spins": Engine("spins", (process.pid,)), "rests": Engine("rests")}

            def ask(url: str, seed: int) -> Figures:
                stopped = url == "rests"
                wait_until(lambda: (psutil.Process(process.pid).status() == psutil.STATUS_STOPPED) == stopped)
                return {}

            try:
                assert len(list(take_turns("case", engines, ask, 2, count()))) == 2
            finally:
                process.kill()

    def test_ratios_are_of_each_round(self) -> None:
        pairs = [(10.0, 5.0), (12.0, 3.0), (30.0, 10.0)]
        rounds = [Round("c", {"ours": {"x": our}, "theirs": {"x": their}}) for our, their in pairs]
        # The ratio of the medians would be 12 / 5.
        assert rows(rounds, "ours", "theirs") == [("c", "x", "12.0", "5.0", "3.00", "2.00 3.00 4.00")]


def record(
    *arrivals: tuple[float, int], sent: float = 0.0, output: int = 0, failure: RequestFailure | None = None
) -> RequestRecord:
    chunks = tuple(TokenArrival(at, tokens) for at, tokens in arrivals)
    return RequestRecord(0, sent, sent, chunks[-1].at, chunks, output_tokens=output, failure=failure)


class TestBursts:
    LOAD = Bursts(streams=1, settle=2.0, count=2, every=4.0, prompts=2, answer_len=3)

    def test_times(self) -> None:
        assert self.LOAD.times == [2, 2, 6, 6]
        assert self.LOAD.end == 10

    def test_gaps_count_from_the_first_burst_on_whoever_began_before(self) -> None:
        stream = record((0.5, 1), (1.0, 1), (1.75, 1), (2.75, 2), sent=0.5)
        assert list(gaps_since(stream, 2.0)) == [0.75, 0.5, 0.5]

    def test_figures(self) -> None:
        stream = record((0.0, 1), (2.0, 1), (2.1, 1), (2.3, 1), (3.3, 1), failure=UNFINISHED)
        prompts = [
            record((ttft, 3), sent=due, output=3)
            for due, ttft in zip(self.LOAD.times, (1, 2, 3, 6), strict=True)
        ]
        figures = figures_of(Outcome([stream], prompts), self.LOAD)
        assert figures["streams' ITL median, ms"] == pytest.approx(600)
        assert figures["streams' longest gap, ms"] == pytest.approx(2000)
        assert figures["streams' tokens/s"] == pytest.approx(4 / 8)
        assert figures["bursts' TTFT median, ms"] == pytest.approx(2500)
        assert figures["bursts' TTFT longest, ms"] == pytest.approx(6000)

    @pytest.mark.parametrize(
        ("stream", "prompt", "said"),
        [
            (record((1, 1), (3, 1)), record((1, 3), output=3), "did not run to the end: its answer is over"),
            (
                record((1, 1), (3, 1), failure=RequestFailure("broken", "gone")),
                record((1, 3), output=3),
                "gone",
            ),
            (record((1, 1), (3, 1), failure=UNFINISHED), record((1, 2), output=2), "prompt of a burst: 2"),
            (record((1, 1), (3, 1), failure=UNFINISHED), record((1, 3), failure=UNFINISHED), "ended first"),
        ],
    )
    def test_a_part_of_the_load_is_no_comparison(
        self, stream: RequestRecord, prompt: RequestRecord, said: str
    ) -> None:
        with pytest.raises(RuntimeError, match=said):
            figures_of(Outcome([stream], [prompt]), self.LOAD)

    async def test_streams_run_until_the_end_and_bursts_come_when_due(self, tmp_path: Path) -> None:
        save_byte_tokenizer(tmp_path)
        server = FakeServer(schedule=[(0.02, 1)] * 6)
        load = Bursts(
            streams=2,
            stream_input=5,
            stream_output=200,
            settle=0.04,
            count=2,
            every=0.03,
            prompts=3,
            prompt_len=7,
            answer_len=6,
        )
        async with serving_app(server.app()) as url:
            outcome = await offer(url, tmp_path, load, seed=1)
        assert [r.failure and r.failure.kind for r in outcome.streams] == ["unfinished"] * 2
        assert [r.due for r in outcome.prompts] == pytest.approx([0.04] * 3 + [0.07] * 3)
        assert all(r.failure is None and r.output_tokens == 6 for r in outcome.prompts)
        prompts = [cast(list[int], call.body["prompt"]) for call in server.calls[1:]]  # one finds the form
        assert [len(prompt) for prompt in prompts] == [5, 5, *[7] * 6]
        begins = {tuple(prompt[:5]) for prompt in prompts}
        assert len(begins) == len(prompts)  # or a prefix cache would know some of it


@dataclass
class FakePrefill:
    """Answers as vLLM's prefill does: with where the blocks are, or as told."""

    transfer: Mapping[str, object] | None = field(default_factory=lambda: BLOCKS)
    status: int = 200
    bodies: list[dict[str, object]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        return app

    async def complete(self, request: Request) -> Response:
        self.bodies.append(json.loads(await request.body()))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no room"}}, self.status)
        return JSONResponse({"choices": [{"text": "x" * 100_000}], "kv_transfer_params": self.transfer})


@asynccontextmanager
async def proxied(prefill: FakePrefill, decode: FakeServer) -> AsyncIterator[str]:
    async with (
        serving_app(prefill.app()) as prefill_url,
        serving_app(decode.app()) as decode_url,
        serving_app(Proxy(prefill_url, decode_url).app()) as url,
    ):
        yield url


async def bench(url: str, model: Path) -> Summary:
    save_byte_tokenizer(model)
    workload = WorkloadConfig(num_prompts=4, input_len=10, output_len=5)
    config = ServeConfig(workload=workload, url=url, tokenizer=str(model), max_concurrency=2)
    return (await measure(config)).summary


class TestProxy:
    async def test_the_prompt_goes_to_prefill_and_the_answer_comes_from_decode(self, tmp_path: Path) -> None:
        prefill, decode = FakePrefill(), FakeServer(schedule=[(0.0, 1)] * 5)
        async with proxied(prefill, decode) as url:
            summary = await bench(url, tmp_path)
        assert summary.errors == {}
        assert summary.output_tokens == 20
        assert len(prefill.bodies) == len(decode.calls)
        for asked, call in zip(prefill.bodies, decode.calls, strict=True):
            assert asked["max_tokens"] == 1
            assert asked["kv_transfer_params"] == {"do_remote_decode": True}
            assert not {"stream", "stream_options", "return_token_ids"} & asked.keys()
            assert call.body["kv_transfer_params"] == BLOCKS
        asked_for = sorted(str(asked["prompt"]) for asked in prefill.bodies)
        assert asked_for == sorted(str(call.body["prompt"]) for call in decode.calls)
        assert decode.calls[-1].body["max_tokens"] == 5
        assert decode.calls[-1].body["stream"] is True

    async def test_tokens_come_as_decode_sends_them(self) -> None:
        decode = FakeServer(schedule=[(0.0, 1), (0.2, 1)])
        async with proxied(FakePrefill(), decode) as url, httpx.AsyncClient() as client:
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            clock = asyncio.get_running_loop().time
            times = []
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if "choices" in line and "usage" not in line:
                        times.append(clock())
        assert times[1] - times[0] > 0.1

    async def test_a_client_that_leaves_ends_decodes_answer(self) -> None:
        decode = FakeServer(schedule=[(0.0, 1), (60.0, 1)])
        async with proxied(FakePrefill(), decode) as url, httpx.AsyncClient() as client:
            async with client.stream("POST", f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                await anext(answer.aiter_lines())
                assert decode.open == 1
            await until(lambda: decode.open == 0)

    async def test_decode_is_not_asked_without_blocks(self) -> None:
        prefill, decode = FakePrefill(), FakeServer()
        cases = [(503, BLOCKS, 503, "no room"), (200, None, 502, "no KV"), (200, NO_BLOCKS, 502, "no KV")]
        async with proxied(prefill, decode) as url, httpx.AsyncClient() as client:
            for prefill.status, prefill.transfer, status, said in cases:
                answer = await client.post(f"{url}/v1/completions", json={"prompt": "x"})
                assert answer.status_code == status
                assert said in answer.json()["error"]["message"]
        assert decode.calls == []

    async def test_what_decode_refuses_is_told(self) -> None:
        decode = FakeServer(token_ids=False)
        async with proxied(FakePrefill(), decode) as url, httpx.AsyncClient() as client:
            answer = await client.post(
                f"{url}/v1/completions", json={"prompt": "x", "return_token_ids": True}
            )
        assert answer.status_code == 400
        assert "unknown" in answer.json()["error"]["message"]
