"""Stats: said once where they are counted, taken as one value, exported as they are documented."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import astuple, dataclass, field
from typing import Annotated

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.guidance import MaskStats
from baton.engine.sequence import Sequence
from baton.grammar.compiler import GrammarStats
from baton.process.exported import Counters, counter, exported_figures, gauge
from baton.telemetry.roles import CountedByRole
from baton.telemetry.stats_collector import StatsCollector
from baton.worker.metrics import WorkerCollector
from tests.support.fake_engine import fake_engine, run
from tests.support.local_worker import LocalWorker, local_ring, until
from tests.support.metric_docs import described, exported

PARAMS = ResolvedSampling(max_tokens=30)


@dataclass
class _Cups(Counters):
    washed: Annotated[int, counter("cups_washed", "Cups washed.")] = 0
    broken: Annotated[int, counter("cups_broken", "Cups broken.")] = 0


@dataclass(frozen=True, slots=True)
class _Kitchen:
    heat: Annotated[float, gauge("kitchen_heat", "Degrees.")]
    name: str
    cups: _Cups = field(default_factory=_Cups)
    cooks: Annotated[int, gauge("kitchen_cooks", "Cooks.")] = 1


def test_marked_fields_are_found_in_order_wherever_they_are_nested() -> None:
    figures = list(exported_figures(_Kitchen(21.5, "small", _Cups(3, 1))))
    assert [(metric.kind, metric.name, metric.text, value) for metric, value in figures] == [
        ("gauge", "kitchen_heat", "Degrees.", 21.5),
        ("counter", "cups_washed", "Cups washed.", 3),
        ("counter", "cups_broken", "Cups broken.", 1),
        ("gauge", "kitchen_cooks", "Cooks.", 1),
    ]


def test_a_copy_does_not_follow_its_owner() -> None:
    cups = _Cups(3, 1)
    taken = cups.copy()
    cups.washed += 1
    assert (taken, cups) == (_Cups(3, 1), _Cups(4, 1))


def test_counters_stay_with_the_role_that_counted_and_gauges_go_with_the_process() -> None:
    counted = CountedByRole("prefill")
    kitchen = _Kitchen(20.0, "small", _Cups(3))
    registry = CollectorRegistry()
    registry.register(StatsCollector(counted, lambda: kitchen))
    assert registry.get_sample_value("cups_washed_total", {"role": "prefill"}) == 3
    counted.change("decode")
    kitchen.cups.washed += 2
    assert registry.get_sample_value("cups_washed_total", {"role": "prefill"}) == 3
    assert registry.get_sample_value("cups_washed_total", {"role": "decode"}) == 2
    assert registry.get_sample_value("kitchen_heat", {"role": "decode"}) == 20.0
    assert registry.get_sample_value("kitchen_heat", {"role": "prefill"}) is None


@pytest.mark.parametrize("host_blocks", [0, 100])
def test_an_engines_stats_are_of_one_moment(host_blocks: int) -> None:
    engine = fake_engine(16, max_num_seqs=4, host_blocks=host_blocks)
    run(engine, Sequence("first", 1, list(range(20)), PARAMS))
    before = engine.stats()
    kept = copy.deepcopy(before)
    run(engine, *(Sequence(f"{number}", 1, [number, *range(15)], PARAMS) for number in range(4)))
    assert before == kept
    after = engine.stats()
    assert after.generated_tokens == before.generated_tokens + 4 * 30
    assert after.work.steps > before.work.steps
    assert after.scheduler.preemptions > before.scheduler.preemptions
    assert (after.host_tier.blocks.saved > before.host_tier.blocks.saved) == bool(host_blocks)
    assert (after.host_tier.copied.saved > before.host_tier.copied.saved) == bool(host_blocks)


async def test_a_worker_exports_what_is_documented_and_each_metric_once() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]):
        counted = CountedByRole("both")
        registry = CollectorRegistry()
        registry.register(WorkerCollector(counted, worker.service.stats))
        registry.register(StatsCollector(counted, GrammarStats))
        registry.register(StatsCollector(counted, MaskStats))
        names = Counter(family.name for family in registry.collect())
        page = exported(generate_latest(registry).decode())
    assert set(names.values()) == {1}
    known = described()
    for name, kind in page.types.items():
        assert known[name].type == kind, name
        assert "worker" in known[name].where, name
        assert page.labels.get(name, known[name].labels) == known[name].labels, name
    shown = {name for name in page.types if name in known}
    assert {"baton_preemptions_total", "baton_host_kv_hit_blocks_total", "baton_kv_blocks"} <= shown
    assert {"baton_speculation_drafted_tokens_total", "baton_engine_steps_total"} <= shown


async def test_routers_are_told_what_is_exported() -> None:
    worker = LocalWorker("both")
    async with local_ring([worker]):
        worker.engine.add(Sequence("here", 1, list(range(20)), PARAMS))
        await until(lambda: worker.engine.generated_tokens == 30 and not worker.engine.has_work)
        stats, load = worker.service.stats(), worker.service.load()
    engine = stats.engine
    assert (load.blocks_free, load.blocks_cached, load.blocks_held) == astuple(engine.blocks)
    assert load.blocks_cached and load.prefill_tokens_per_s and load.step_base_ms
    assert load.prefill_tokens_per_s == engine.pace.prefill_tokens_per_s
    assert (load.step_base_ms, load.step_row_ms) == (
        engine.pace.step_base_s * 1e3,
        engine.pace.step_row_s * 1e3,
    )
