"""Questions with known answers: what an undisturbed worker says, where nothing hangs on rounding.

A batch of another size adds float32 numbers in another order, and a token may then rightly differ where two
choices are as close as that. Such questions are not asked: a difference is then always a fault.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from baton.engine.sampling.sampler import BUCKET
from baton.hub import resolve_model
from baton_kernels.reference import reference_draw
from tests.support.chaos.client import ChaosClient
from tests.support.chaos.streams import made
from tests.support.ring import running_ring
from tests.support.sampling_cases import race_times
from tests.support.tiny_models import oracle_logits, save_llama

LARGE_BLOCKS = "large-blocks"
SHAPE: Mapping[str, object] = MappingProxyType(
    {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5}
)
"""The model of ``LARGE_BLOCKS``: small to compute, with large blocks to move: 128 KiB for 16 tokens."""
LENGTHS = (1, 16, 17, 64, 130, 333, 600, 700)
FAMILIES, MEMBERS, COMMON = 3, 2, 300
"""Prompts that begin alike: so many groups, of so many each, with so many tokens in common."""
SHORTEST, LONGEST = 8, 72
LONG_ANSWERS, LONG_ANSWER = 4, 300
MIN_LOGIT_MARGIN = 2e-4
MIN_RACE_MARGIN = 2e-4
TEMPERATURE = 0.8
RECORDING_S = 600.0


@dataclass(frozen=True)
class Question:
    """A request's body, and the tokens that answer it. ``chat``: asked of the chat endpoint."""

    name: str
    body: dict[str, object]
    chat: bool = False
    prompt_ids: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Catalogue:
    """``questions`` are asked and answered in full; those of ``long`` by clients that leave."""

    path: Path
    questions: tuple[Question, ...]
    long: tuple[Question, ...]

    @property
    def model(self) -> str:
        return self.path.name


def record(tmp: Path, seed: int, model: str = LARGE_BLOCKS) -> Catalogue:
    """Make the model (``LARGE_BLOCKS``, or as ``made`` has it), ask one worker of role ``both`` every
    candidate, and keep those whose answers are safe. The oracle must agree with the worker: ValueError if it
    does not."""
    if model == LARGE_BLOCKS:
        path = save_llama(tmp / model, **SHAPE)
    else:
        path = resolve_model(made(tmp, model))
    rng = random.Random(seed)
    with running_ring(tmp / "undisturbed", model=str(path), prefill=0, decode=0, both=1) as ring:
        questions = asyncio.run(_answered(ring.url, path, list(_candidates(rng))))
    return Catalogue(
        path,
        tuple(q for q in questions if not q.chat),
        tuple(q for q in questions if q.chat)[:LONG_ANSWERS],
    )


def _candidates(rng: random.Random) -> Iterator[Question]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    families = [tokens(COMMON) for _ in range(FAMILIES)]
    prompts = {f"{length} tokens": tokens(length) for length in LENGTHS}
    for family, common in enumerate(families):
        for member in range(MEMBERS):
            prompts[f"family {family}, member {member}"] = [*common, *tokens(rng.randint(1, 300))]
    for name, prompt in prompts.items():
        length = rng.randint(SHORTEST, LONGEST)
        body = {"prompt": prompt, "max_tokens": length}
        yield Question(f"{name}, greedy", {**body, "temperature": 0})
        drawn = {"temperature": TEMPERATURE, "seed": rng.getrandbits(63)}
        yield Question(f"{name}, drawn", {**body, **drawn})
    for number in range(2 * LONG_ANSWERS - 1):
        text = "".join(chr(rng.randint(97, 122)) for _ in range(rng.randint(20, 550)))
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": LONG_ANSWER, "temperature": 0}
        yield Question(f"chat {number}", body, chat=True)


async def _answered(url: str, path: Path, candidates: Sequence[Question]) -> list[Question]:
    async with ChaosClient(url, path.name, RECORDING_S) as client:
        replies = await asyncio.gather(*(client.ask(q, stream=False) for q in candidates))
    kept = []
    for question, reply in zip(candidates, replies, strict=True):
        if reply.failure is not None:
            raise ValueError(f"{question.name}: {reply.failure}")
        question = replace(question, prompt_ids=tuple(reply.prompt_ids), answer=tuple(reply.token_ids))
        if _is_safe(path, question):
            kept.append(question)
    return kept


def _is_safe(path: Path, question: Question) -> bool:
    """Whether no token of the answer hangs on rounding. ValueError if one is not the oracle's."""
    answer = torch.tensor(question.answer)
    logits = oracle_logits(path, [*question.prompt_ids, *question.answer])
    logits = logits[len(question.prompt_ids) - 1 : -1]
    seed = question.body.get("seed")
    if seed is None:
        best = logits.topk(2).values
        margins = best[:, 0] - best[:, 1]
        wrong, least = logits.argmax(-1) != answer, MIN_LOGIT_MARGIN
    else:
        assert isinstance(seed, int)
        drawn = [
            reference_draw(row, TEMPERATURE, 0, 1.0, 0.0, race_times(seed, position, len(row)), BUCKET)
            for position, row in enumerate(logits)
        ]
        margins = torch.tensor([margin for _, margin in drawn])
        wrong, least = torch.tensor([token for token, _ in drawn]) != answer, MIN_RACE_MARGIN
    safe = bool(margins.min() > least)
    if safe and bool(wrong.any()):
        raise ValueError(f"{question.name}: the undisturbed worker and transformers disagree")
    return safe
