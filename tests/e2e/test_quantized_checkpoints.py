"""Rings of quantized checkpoints give transformers' answers with the weights that the codes stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from torch import Tensor

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.family_cases import NEW_TOKENS, questions
from tests.support.packed_models import DENSE, LATENT, QWEN_MOE, Packed, fp8_blocks, gptq, nvfp4, save_packed
from tests.support.ring import running, running_ring, running_routers, worker
from tests.support.tiny_models import Recipe

pytestmark = pytest.mark.beside

LENGTHS = (150, 64, 1)
BLOCK = 32
"""The outputs and inputs that share a scale in FP8."""


@dataclass(frozen=True)
class Checkpoint:
    """A quantized checkpoint, and the ring that serves it."""

    model: Recipe
    pack: Callable[[Tensor], Packed]
    config: Mapping[str, object]
    decode_ranks: int = 1


CHECKPOINTS: Mapping[str, Checkpoint] = MappingProxyType(
    {
        "fp8-blocks": Checkpoint(
            DENSE,
            partial(fp8_blocks, size=BLOCK),
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8_PB_WO",
                "group_size": BLOCK,
                "ignore": ["lm_head"],
            },
            decode_ranks=2,
        ),
        "gptq-latents": Checkpoint(
            LATENT, gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
        ),
        "nvfp4-experts": Checkpoint(
            QWEN_MOE,
            nvfp4,
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
        ),
    }
)


@pytest.mark.parametrize("name", all_deep_but(1, CHECKPOINTS))
async def test_answers_are_transformers(name: str, tmp_path: Path) -> None:
    case = CHECKPOINTS[name]
    path, meant = save_packed(case.model(tmp_path / "plain"), case.pack, case.config)
    asked = questions(meant, LENGTHS)
    with running_ring(
        tmp_path,
        model=str(path),
        options=("--connector", "tcp", "--verify-handoff", "--prefill-chunk", "32"),
        prefill_options=("--block-size", "16", "--num-blocks", "128"),
        decode_options=(
            *("--block-size", "64", "--num-blocks", "32"),
            *("--tensor-parallel-size", str(case.decode_ranks)),
        ),
    ) as ring:
        async with RingClient(ring.url, path.name) as client:
            answers = await asyncio.gather(
                *(client.complete(one.prompt, max_tokens=NEW_TOKENS, temperature=0) for one in asked)
            )
        ring.wait_idle()
    assert [[answer.token_ids] for answer in answers] == [one.answers for one in asked]


@pytest.mark.deep
async def test_other_weights_of_a_model_are_paired_by_name_alone(tmp_path: Path) -> None:
    """Prefill in FP8 hands over to decode in INT4 if both have a ``--kv-revision``, the same; decode answers
    alone otherwise."""
    plain = DENSE(tmp_path / "plain")
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
    int4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    paths = {
        "prefill": save_packed(plain, partial(fp8_blocks, size=BLOCK), fp8)[0],
        "decode": save_packed(plain, gptq, int4)[0],
    }
    options = ("--connector", "tcp", "--num-blocks", "64", "--served-model-name", "tiny")
    workers = {
        kind: [
            worker(tmp_path, f"{role}{kind}", role, str(path), *options, *named)
            for role, path in paths.items()
        ]
        for kind, named in (("apart", ()), ("paired", ("--kv-revision", "tiny-v1")))
    }
    handoffs = "baton_handoffs_completed_total"
    with running([each for pair in workers.values() for each in pair]):
        names = ("--queue-timeout", "5", "--served-model-name", "tiny")
        with running_routers(tmp_path, str(paths["decode"]), workers, names) as rings:
            for kind, ring in rings.items():
                async with RingClient(ring.url, "tiny") as client:
                    answer = await client.complete([*range(2, 60)], max_tokens=4, temperature=0)
                assert len(answer.token_ids) == 4
                ring.wait_idle()
                done = sum(n for name, n in ring.workers[1].metrics().items() if name.startswith(handoffs))
                assert done == (kind == "paired")
            log = rings["apart"].router.log.read_text()
    assert "fits no decode worker" in log
    assert rings["paired"].workers[0].log.read_text().count("KV counts as tiny-v1's") == 1
