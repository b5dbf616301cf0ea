"""Simulated workers behind a real router: real streams, real handoffs, real deaths."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from baton.net.message_parts import in_parts
from baton.v1.worker_pb2 import RouterMessage, Submit
from tests.support.ring import Ring, running, running_routers, simulated

pytestmark = pytest.mark.beside

PROMPT = "What a simulated worker says follows from every token that came before. " * 8
PROFILE = '{"step_base_ms": 15, "prefill_ms_per_1k": 20}'


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ring]]:
    tmp = tmp_path_factory.mktemp("simulated")
    (tmp / "profile.json").write_text(PROFILE)
    options = (
        *("--profile", str(tmp / "profile.json"), "--verify-handoff"),
        *("--max-model-len", "80000", "--num-blocks", "6000", "--block-size", "16"),
    )
    alone = simulated(tmp, "alone", "both", *options, "--http-port", "0")
    split = [
        simulated(tmp, f"{role}-{i}", role, *options)
        for role, i in (("prefill", 0), ("decode", 0), ("decode", 1))
    ]
    with running([alone, *split]), running_routers(tmp, "demo", {"alone": [alone], "split": split}) as found:
        yield found


def ask(ring: Ring, prompt: str | list[int] = PROMPT, **options: object) -> list[int]:
    client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="-", max_retries=0)
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=40,
        temperature=0,
        extra_body=body,
        **options,  # type: ignore[call-overload]
    )
    return list(answer.choices[0].token_ids)


def test_a_split_ring_answers_as_one_worker_does(rings: dict[str, Ring]) -> None:
    for prompt in (PROMPT, PROMPT + "more", "short"):
        assert ask(rings["split"], prompt) == ask(rings["alone"], prompt)
    prefill = rings["split"].of_role("prefill")[0]
    assert prefill.metrics()['baton_handoffs_completed_total{role="prefill"}'] == 3
    rings["split"].wait_idle()


@pytest.mark.deep
def test_a_prompt_that_no_message_holds_whole(rings: dict[str, Ring]) -> None:
    """From the router to prefill, and from prefill to decode, it goes in parts."""
    prompt = [300 + number % 3000 for number in range(70_000)]
    message = RouterMessage(submit=Submit(prompt_ids=prompt))
    assert len(list(in_parts(message))) > 1
    split = rings["split"]
    handed_on = 'baton_handoffs_completed_total{role="prefill"}'
    before = split.of_role("prefill")[0].metrics()[handed_on]
    assert ask(split, prompt) == ask(rings["alone"], prompt)
    assert split.of_role("prefill")[0].metrics()[handed_on] == before + 1
    split.wait_idle()


def test_a_stream_goes_on_after_the_death_of_its_worker(rings: dict[str, Ring]) -> None:
    ring = rings["split"]
    client = openai.OpenAI(base_url=f"{ring.url}/v1", api_key="-", max_retries=0)
    body = {"return_token_ids": True, "ignore_eos": True}
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stream=True, extra_body=body
    )
    token_ids: list[int] = []
    killed = None
    for chunk in stream:
        token_ids += chunk.choices[0].token_ids if chunk.choices else []  # type: ignore[attr-defined]
        if len(token_ids) >= 5 and killed is None:
            killed = next(w for w in ring.of_role("decode") if w.blocks()["held"])
            killed.kill()
    assert killed is not None
    assert token_ids == ask(rings["alone"])
    killed.restart()
    ring.wait_workers()


def test_its_plain_api_serves_other_routers(rings: dict[str, Ring]) -> None:
    log = rings["alone"].workers[0].log.read_text()
    found = re.search(r"OpenAI API at (http://\S+)", log)
    assert found is not None
    client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="-", max_retries=0)
    whole = client.completions.create(model="demo", prompt="a prompt", max_tokens=6, temperature=0)
    pieces = client.completions.create(
        model="demo", prompt="a prompt", max_tokens=6, temperature=0, stream=True
    )
    assert whole.choices[0].text == "".join(piece.choices[0].text for piece in pieces)
    assert whole.usage is not None and whole.usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="demo", prompt=3, max_tokens=6)  # type: ignore[call-overload]
    with urllib.request.urlopen(f"{found[1]}/v1/models", timeout=60) as response:
        assert [model["id"] for model in json.load(response)["data"]] == ["demo"]


def test_a_fault_ends_the_worker(tmp_path: Path) -> None:
    worker = simulated(tmp_path, "mortal", "both", "--fault", "die_mean_s=0.000001", "--http-port", "0")
    with running([worker]):
        found = re.search(r"OpenAI API at (http://\S+)", worker.log.read_text())
        assert found is not None
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="-", max_retries=0)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="demo", prompt="a prompt", max_tokens=6)
        assert worker.process.wait(60) == 137
