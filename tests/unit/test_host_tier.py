"""Evicted blocks in host memory: what comes back is what was evicted, and by copy only where that pays."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_memory import HostMemory
from baton.engine.kv.host_tier import CopyPlan, HostTier
from baton.engine.sequence import Sequence
from tests.support.fake_engine import AlwaysCopy, fake_engine, run, run_alone
from tests.support.local_worker import LocalWorker, answer, local_ring, until
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = pytest.mark.usefixtures("launched")

PARAMS = ResolvedSampling(max_tokens=24, seed=5, temperature=1.5)


def prompt(number: int, length: int = 33) -> list[int]:
    return [(i * i * 31 + i * 17 + number * 7 + 5) % 97 for i in range(length)]


class Never(BreakEven):
    def copying_pays(self, blocks: int) -> bool:
        return False


def push_out(engine: Engine) -> None:
    """Others need the whole pool."""
    run(engine, *(Sequence(f"other{i}", 1, prompt(50 + i, 50), PARAMS) for i in range(3)))


class TestEngine:
    def test_an_evicted_prefix_comes_back_by_copy(self) -> None:
        engine = fake_engine(num_blocks=20, host_blocks=100)
        [first] = run(engine, Sequence("a", 1, prompt(1), PARAMS))
        push_out(engine)
        again = Sequence("b", 1, prompt(1), PARAMS)
        assert run(engine, again) == [first] == [run_alone(prompt(1), PARAMS)]
        assert again.num_cached == 32
        load = engine.stats()
        assert load.host_tier.blocks.restored == 8
        block_bytes = runner_of(engine).pool[0].nbytes
        assert load.host_tier.copied.restored == 8 * block_bytes
        assert load.host_tier.copied.saved == load.host_tier.blocks.saved * block_bytes
        assert load.host_tier.used == load.host_tier.blocks.saved <= load.host_tier.slots == 100
        assert load.scheduler.prefix_hit_tokens == 32
        # It is in the pool again, for others to find.
        once_more = Sequence("c", 1, prompt(1), PARAMS)
        assert run(engine, once_more) == [first]
        assert (once_more.num_cached, engine.stats().host_tier.blocks.restored) == (32, 8)

    def test_and_is_computed_where_that_is_cheaper(self) -> None:
        engine = fake_engine(num_blocks=20, host_blocks=100, break_even=Never(4))
        [first] = run(engine, Sequence("a", 1, prompt(1), PARAMS))
        push_out(engine)
        again = Sequence("b", 1, prompt(1), PARAMS)
        assert run(engine, again) == [first]
        assert (again.num_cached, engine.stats().host_tier.blocks.restored) == (0, 0)

    def test_a_block_that_was_kept_once_is_not_copied_again(self) -> None:
        engine = fake_engine(num_blocks=20, host_blocks=100)
        for round_ in range(3):
            run(engine, Sequence(f"a{round_}", 1, prompt(1), PARAMS))
            push_out(engine)
            if round_ == 1:
                saved = engine.stats().host_tier.blocks.saved
        assert engine.stats().host_tier.blocks.saved == saved

    @pytest.mark.parametrize("host_blocks", [1, 5, 300])
    def test_preempted_sequences_come_back_by_copy(self, host_blocks: int) -> None:
        engine = fake_engine(num_blocks=16, host_blocks=host_blocks)
        params = ResolvedSampling(max_tokens=40, seed=8, top_p=0.9)
        prompts = [prompt(n, 9) for n in range(6)]
        outputs = run(engine, *(Sequence(str(i), 1, p, params) for i, p in enumerate(prompts)))
        assert outputs == [run_alone(p, params) for p in prompts]
        load = engine.stats()
        assert load.scheduler.preemptions > 0
        assert host_blocks < 300 or load.scheduler.swapped_in > 0
        assert load.blocks.held == 0
        assert (
            load.host_tier.blocks.saved - load.host_tier.blocks.evicted == load.host_tier.used <= host_blocks
        )

    def test_salted_sequences_find_their_own_only(self) -> None:
        engine = fake_engine(num_blocks=20, host_blocks=100)
        for salt in (b"a", b"b"):
            seq = Sequence(salt.decode(), 1, prompt(1), PARAMS, cache_salt=salt)
            run(engine, seq)
            assert seq.num_cached == 0
            push_out(engine)
        again = Sequence("again", 1, prompt(1), PARAMS, cache_salt=b"a")
        run(engine, again)
        assert again.num_cached == 32

    def test_the_index_goes_on_in_the_pool_behind_what_is_in_the_tier(self) -> None:
        """Of a chain in both, the pool may have lost the middle."""
        engine = fake_engine(num_blocks=20, host_blocks=100)
        [first] = run(engine, Sequence("a", 1, prompt(1), PARAMS))
        scheduler, pool = engine.scheduler, engine.pool
        seq = Sequence("b", 1, prompt(1), PARAMS)
        seq.extend_hashes(4)
        kept = pool.match_prefix(seq.hashes[:2])
        tail = pool.match_prefix(seq.hashes[5:8])
        assert (len(kept), len(tail)) == (2, 3)
        taken = pool.allocate(pool.num_allocatable)  # the middle goes
        engine.copy_blocks()
        assert taken is not None
        pool.free(taken)
        pool.free(kept)
        pool.free(tail)
        [found] = scheduler.cache.find(seq.hashes[:8]).groups
        assert [pages is None for pages in found.pages] == [
            *2 * [False],
            *3 * [True],
            *3 * [False],
        ]
        pool.free([*kept, *tail])
        assert run(engine, seq) == [first]
        assert (seq.num_cached, engine.stats().host_tier.blocks.restored) == (32, 3)


class TestBreakEven:
    def test_measures_both_and_chooses_the_cheaper(self) -> None:
        even = BreakEven(block_size=4)
        assert even.copying_pays(1)
        even.copied(10, 1.0)  # 0.1 s a block
        assert even.copying_pays(1)
        even.computed(100, 2.0)  # 0.02 s a token, 0.08 s a block
        assert not even.copying_pays(1)
        for _ in range(20):  # another model's prompts, or a busier device
            even.computed(100, 4.0)
        assert even.copying_pays(1)
        even.copied(0, 1.0)
        even.computed(0, 1.0)
        assert even.copy_s == 0.1


class TestTier:
    def test_the_least_recently_used_goes_first(self) -> None:
        tier = HostTier(2, AlwaysCopy(4))
        for block, name in enumerate((b"a", b"b", b"a", b"c")):
            tier.save((block,), name)
        assert [tier.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
        assert tier.counters.evicted == 1

    def test_what_is_to_be_read_is_not_overwritten(self) -> None:
        tier = HostTier(1, AlwaysCopy(4))
        tier.save((0,), b"a")
        tier.take_plan()
        tier.keep([b"a"])
        tier.save((1,), b"b")
        tier.restore(b"a", [5])
        assert tier.take_plan() == CopyPlan({}, {5: 0})
        assert tier.counters.dropped == 1
        tier.save((1,), b"b")
        assert tier.take_plan() == CopyPlan({0: 1}, {})

    def test_copies_are_made_in_order_and_in_runs(self) -> None:
        pool = torch.arange(8.0)[:, None].repeat(1, 3)
        memory = HostMemory(pool, 6, AlwaysCopy(4))
        memory.carry_out(CopyPlan({0: 2, 1: 3, 4: 7, 5: 6}, {}))
        memory.carry_out(CopyPlan({2: 1}, {2: 4, 3: 5, 1: 0, 0: 2}))
        assert pool[:, 0].tolist() == [1, 2, 7, 6, 4, 5, 6, 7]
        assert (memory.copied.saved, memory.copied.restored) == (5 * 12, 4 * 12)


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"host_kv_bytes": -1}, "host_kv_bytes is -1; allowed: 0 and more"),
            ({"host_kv_bytes": 1 << 20, "prefix_caching": False}, "allowed: 0, as without prefix_caching"),
        ],
    )
    def test_errors(self, settings: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            EngineConfig(Path("model"), **settings)  # type: ignore[arg-type]

    def test_a_real_model_answers_as_without_it(self, tmp_path: Path) -> None:
        model = TINY_MODELS["llama"](tmp_path / "llama")
        with pytest.raises(ValueError, match=r"host_kv_bytes is 1; allowed: 0, or \d+ and more \(a block\)"):
            Engine.from_config(EngineConfig(model, host_kv_bytes=1, num_threads=1))
        config = EngineConfig(model, dtype="float32", num_blocks=10, host_kv_bytes=1 << 22, num_threads=1)
        engine = Engine.from_config(config)
        assert engine.scheduler.tier is not None
        engine.scheduler.tier.break_even.copying_pays = lambda blocks: True  # type: ignore[method-assign]
        params = ResolvedSampling(max_tokens=60, temperature=0.0, ignore_eos=True)
        prompts = [[(i * 29 + salt * 3) % 250 for i in range(20)] for salt in range(4)]
        oracle = [oracle_greedy(model, ids, 60) for ids in prompts]
        for turn in range(2):
            outputs = run(engine, *(Sequence(f"{turn}-{i}", 1, p, params) for i, p in enumerate(prompts)))
            for output, (expected, margin) in zip(outputs, oracle, strict=True):
                assert output == expected or margin < 1e-3
        load = engine.stats()
        assert load.host_tier.blocks.restored > 0
        assert load.scheduler.swapped_in > 0


@pytest.mark.parametrize("roles", [["both"], ["prefill", "decode"]], ids=["one worker", "ring"])
async def test_small_pools_answer_as_large_ones_do(roles: list[Role]) -> None:
    """Through real services. Requests come again after others have pushed them out of both pools."""
    make = partial(fake_engine, num_blocks=18, host_blocks=300)
    workers = [LocalWorker(role, make_engine=make) for role in roles]
    asked = [(prompt(n, 13), 40) for n in range(6)]
    expected = [run_alone(ids, ResolvedSampling(n, temperature=0.0, ignore_eos=True)) for ids, n in asked]
    async with local_ring(workers) as ring:
        for turn in range(2):
            answers = [answer(ring, f"r{turn}-{n}", *request) for n, request in enumerate(asked)]
            assert await asyncio.gather(*answers) == expected
        loads = [worker.engine.stats() for worker in workers]
        assert all(load.host_tier.blocks.restored > 0 for load in loads)
        assert loads[-1].scheduler.preemptions > 0
        assert loads[-1].scheduler.swapped_in > 0
        await until(lambda: all(worker.held == 0 for worker in workers))
