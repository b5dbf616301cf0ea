"""Chats with models whose layers keep different things: the tokens of each turn are those of a cold engine,
and a turn finds as much of the turns before it as the policy says, unless that was evicted in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.engine import sequence_states
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.page_counts import PageCounts
from baton.engine.sequence import Sequence
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout
from tests.support.fake_engine import run
from tests.support.tiny_models import ModelDir

pytestmark = pytest.mark.deep

MODELS = {
    "mistral": "windows alone",
    "gemma3": "windows beside full layers",
    "youtu": "latents alone",
    "qwen3-5": "states beside full layers",
    "kimi-linear": "states beside latents",
}
BLOCK_SIZE = 8
CHUNK = 32
INTERVAL = 48
"""Tokens between two snapshots, in place of many more."""
CHATS = {"two turns": (100, 30), "four turns": (75, 20, 41, 9)}
"""The tokens that each turn adds to those before it and their answers."""
PARAMS = ResolvedSampling(max_tokens=21, temperature=0.0, ignore_eos=True)
LONGEST = sum(CHATS["four turns"]) + 4 * PARAMS.max_tokens
OTHERS = 2
"""Requests, of as many tokens as the longest chat, that push all out of a pool for one of them."""
SNAPSHOTS = 4
"""As many have room beside the longest chat, in such a pool."""
HOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Turn:
    """A prompt, which begins with the turns before it, and a cold engine's answer."""

    prompt: list[int]
    answer: list[int]


Script = Callable[[str, str], list[Turn]]


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def engine_of(
    model_dir: ModelDir, name: str, *, ample: bool = True, host_bytes: int = 0, caching: bool = True
) -> Engine:
    """``ample``: the pool has room for all that is ever asked, not for one sequence alone."""
    path = model_dir(name)
    layout = kv_layout(ModelConfig.from_dir(path), BLOCK_SIZE, torch.float32)
    counts = PageCounts(layout, CHUNK)
    alone = counts.of(LONGEST) + SNAPSHOTS * layout.state_pages + layout.num_tables
    everything = 64 * (layout.num_tables * (LONGEST // BLOCK_SIZE) + layout.state_pages)
    return Engine.from_config(
        EngineConfig(
            path,
            dtype="float32",
            num_threads=1,
            block_size=BLOCK_SIZE,
            num_blocks=everything if ample else alone,
            host_kv_bytes=host_bytes,
            prefill_chunk=CHUNK,
            prefix_caching=caching,
        )
    )


@pytest.fixture(autouse=True)
def snapshots_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_states, "INTERVAL", INTERVAL)


@pytest.fixture(scope="module")
def script(model_dir: ModelDir) -> Script:
    """The turns of a chat with a model, each answered by an engine that keeps nothing."""
    known: dict[tuple[str, str], list[Turn]] = {}

    def turns(name: str, chat: str) -> list[Turn]:
        if (name, chat) in known:
            return known[name, chat]
        said: list[int] = []
        made: list[Turn] = []
        rng = random.Random(f"{name} {chat}")
        engine = engine_of(model_dir, name, caching=False)
        for more in CHATS[chat]:
            prompt = said + draw(rng, more)
            [answer] = run(engine, Sequence("cold", 1, prompt, PARAMS))
            made.append(Turn(prompt, answer))
            said = prompt + answer
        known[name, chat] = made
        return made

    return turns


def kept_behind(engine: Engine, turns: list[Turn]) -> int:
    """The tokens behind which the next turn goes on if nothing was evicted. A state: the last of its
    snapshots, behind the last whole block of a prompt or every ``INTERVAL`` tokens. All else: the last whole
    block of what was computed, which the last token of an answer was not."""
    last = turns[-1]
    computed = len(last.prompt) + len(last.answer) - 1
    if engine.layout.state is None:
        return computed // BLOCK_SIZE * BLOCK_SIZE
    ends = [(len(turn.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for turn in turns]
    return max(*ends, computed // INTERVAL * INTERVAL)


def push_out(engine: Engine, rng: random.Random, count: int) -> None:
    """Others take the pages of what is kept, one after another."""
    for number in range(count):
        run(engine, Sequence(f"other{number}", 1, draw(rng, LONGEST - 1), replace(PARAMS, max_tokens=1)))


def talk(engine: Engine, turns: list[Turn], between: Callable[[], None]) -> list[tuple[int, int]]:
    """Each turn's cached tokens, and those that the policy keeps for it."""
    found: list[tuple[int, int]] = []
    for number, turn in enumerate(turns):
        seq = Sequence(f"turn{number}", 1, turn.prompt, PARAMS)
        assert run(engine, seq) == [turn.answer], f"turn {number + 1}"
        found.append((seq.num_cached, kept_behind(engine, turns[:number]) if number else 0))
        between()
    assert engine.stats().blocks.held == 0
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_turn_finds_what_the_policy_keeps(
    name: str, chat: str, model_dir: ModelDir, script: Script
) -> None:
    engine = engine_of(model_dir, name)
    rng = random.Random(0)
    found = talk(engine, script(name, chat), lambda: push_out(engine, rng, 1))
    assert [cached for cached, _ in found] == [kept for _, kept in found]
    assert all(cached > 0 for cached, _ in found[1:])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_evicted_is_computed_again(name: str, model_dir: ModelDir, script: Script) -> None:
    engine = engine_of(model_dir, name, ample=False)
    rng = random.Random(1)
    found = talk(engine, script(name, "four turns"), lambda: push_out(engine, rng, OTHERS))
    assert [cached for cached, _ in found] == [0] * len(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_is_evicted_is_computed_again(name: str, model_dir: ModelDir, script: Script) -> None:
    """The pages that were used last are there. Of windows, they are all that a next turn needs."""
    engine = engine_of(model_dir, name, ample=False)

    def steal() -> None:
        free = engine.pool.stats().free
        stolen = engine.pool.allocate(free + (engine.pool.num_allocatable - free) // 3)
        assert stolen is not None
        engine.pool.free(stolen)

    found = talk(engine, script(name, "four turns"), steal)
    assert all(cached <= kept for cached, kept in found)
    assert all(cached == kept for cached, kept in found) is MODELS[name].startswith("windows")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_evicted_comes_back_from_the_host(
    name: str, model_dir: ModelDir, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BreakEven, "copying_pays", lambda self, blocks: True)
    engine = engine_of(model_dir, name, ample=False, host_bytes=HOST_BYTES)
    rng = random.Random(3)
    found = talk(engine, script(name, "four turns"), lambda: push_out(engine, rng, OTHERS))
    assert [cached for cached, _ in found] == [kept for _, kept in found]
    assert engine.stats().host_tier.blocks.restored > 0
