"""Rings whose prefill and decode workers keep KV in different types, which decode converts on arrival.

The first token of an answer is chosen over prefill's KV and all others over decode's: of a model of one
layer, whose K and V do not depend on what was attended to before, they are exactly those of one FP8 worker.
Answers that the demo model knows are the same over KV of any type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.models.config import KVCacheDtype
from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, worker
from tests.support.tiny_models import save_shape

pytestmark = [pytest.mark.beside, pytest.mark.deep]

QUESTIONS = ("What is Baton?", "What is a KV block?", "What does the router do?")
PROMPTS = tuple(f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in QUESTIONS)
ONE_LAYER = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
TOKENS = [(7 * at) % 250 for at in range(83)]
FP8 = ("--kv-cache-dtype", "fp8")
TAKES = ("--kv-convert", "allow")
DEMO = ("--dtype", "bfloat16", "--num-blocks", "64", "--connector", "tcp")
PAIRS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "to fp8": ((*DEMO, "--prefill-chunk", "16"), (*DEMO, *FP8, *TAKES, "--block-size", "8")),
    "from fp8": (
        (*DEMO, *FP8, "--block-size", "4"),
        (*DEMO, *TAKES, "--block-size", "8", "--tensor-parallel-size", "2"),
    ),
}
"""The options of prefill and of decode."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shape(tmp_path_factory.mktemp("models") / "tiny", **ONE_LAYER)


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Mapping[str, Ring]]:
    tmp = tmp_path_factory.mktemp("convert")
    groups = {
        name: [
            worker(tmp, f"prefill {name}", "prefill", "demo", *prefill),
            worker(tmp, f"decode {name}", "decode", "demo", *decode),
        ]
        for name, (prefill, decode) in PAIRS.items()
    }
    options = ("--load-format", "dummy", "--num-blocks", "32", "--connector", "tcp")
    one_layer = [
        worker(tmp, "prefill", "prefill", str(tiny), *options),
        worker(tmp, "decode", "decode", str(tiny), *options, *FP8, *TAKES),
    ]
    with (
        running([worker for group in (*groups.values(), one_layer) for worker in group]),
        running_routers(tmp, "demo", groups) as of_demo,
        running_routers(tmp, str(tiny), {"one layer": one_layer}) as of_tiny,
    ):
        yield {**of_demo, **of_tiny}


def figures(ring: Ring, role: str) -> dict[str, float]:
    [service] = ring.of_role(role)
    return {key.partition("{")[0]: value for key, value in service.metrics().items()}


def offline(kept_in: KVCacheDtype) -> list[list[int]]:
    llm = LLM("demo", dtype="bfloat16", device="cpu", num_blocks=64, kv_cache_dtype=kept_in)
    params = SamplingParams(temperature=0, max_tokens=60)
    return [list(one.outputs[0].token_ids) for one in llm.generate(list(PROMPTS), params, progress=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    exact = offline("auto")
    assert exact == offline("fp8"), "the model does not know all of them"
    return exact


@pytest.mark.parametrize("name", PAIRS)
async def test_answers_that_the_model_knows_are_one_workers(
    rings: Mapping[str, Ring], expected: list[list[int]], name: str
) -> None:
    ring = rings[name]
    received = [0.0]
    async with RingClient(ring.url, "demo") as client:
        for number in (0, 1, 2, 0):
            text = PROMPTS[number]
            answer = await client.complete(text, temperature=0, max_tokens=60, ignore_eos=False)
            assert answer.token_ids == expected[number]
            received.append(figures(ring, "decode")["baton_handoff_received_bytes_total"])
    ring.wait_idle()
    assert received[-1] == figures(ring, "prefill")["baton_handoff_sent_bytes_total"], "as prefill keeps it"
    again = received[-1] - received[-2]
    assert again < received[1], "what was converted before is found under decode's own names"
    assert "is converted on arrival" in ring.of_role("decode")[0].log.read_text()


async def test_of_one_layer_each_token_is_that_of_one_fp8_worker(
    rings: Mapping[str, Ring], tiny: Path
) -> None:
    ring = rings["one layer"]
    async with RingClient(ring.url, "tiny") as client:
        answer = await client.complete(TOKENS, temperature=0, max_tokens=60, ignore_eos=True)
    ring.wait_idle()
    first, *others = answer.token_ids
    params = SamplingParams(temperature=0, max_tokens=59, ignore_eos=True)
    llm = LLM(str(tiny), load_format="dummy", device="cpu", num_blocks=32, kv_cache_dtype="fp8")
    [one] = llm.generate([[*TOKENS, first]], params, progress=False)
    assert others == list(one.outputs[0].token_ids)
    assert figures(ring, "decode")["baton_handoffs_completed_total"] == 1
