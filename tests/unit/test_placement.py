"""Who is chosen for a request, one reason at a time. What holds of all choices:
tests/property/test_placement_choices.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.router.placement import (
    Choice,
    Decision,
    Estimate,
    PlacementOptions,
    Prompt,
    WorkerReport,
    choose,
)
from baton.router.placement.options import HANDOFF_S

SPLIT = PlacementOptions("always")
CONDITIONAL = PlacementOptions()

KNOWN = {"prefill_tokens_per_s": 1000.0, "step_base_s": 0.02, "step_row_s": 0.001}
LINK = {"kv_bytes_per_token": 1000, "link_bytes_per_s": 1e6}
"""A millisecond for each token."""


def worker(address: str, **known: object) -> WorkerReport:
    """Its role is that of the first letter of its address."""
    role = {"p": "prefill", "d": "decode", "b": "both"}[address[0]]
    values: dict[str, object] = {"prefill_tokens": 0, "sequences": 0, **KNOWN, **known}
    return WorkerReport(address=address, role=role, **values)  # type: ignore[arg-type]


def decide(
    workers: Sequence[WorkerReport],
    options: PlacementOptions = SPLIT,
    tokens: int = 100,
    cached: dict[str, int] | None = None,
) -> Decision | None:
    estimates = [Estimate.of(report, options) for report in workers]
    return choose(Prompt(tokens, cached or {}), estimates, options)


def chosen(
    workers: Sequence[WorkerReport],
    options: PlacementOptions = SPLIT,
    tokens: int = 100,
    cached: dict[str, int] | None = None,
) -> Choice:
    decision = decide(workers, options, tokens, cached)
    assert decision is not None
    return decision.choice


class TestPairs:
    def test_prefill_is_chosen_by_its_queue_and_decode_by_its_streams(self) -> None:
        workers = [worker("p1", prefill_tokens=100), worker("p2"), worker("d1", sequences=1), worker("d2")]
        assert chosen(workers) == Choice("d2", "p2")
        assert chosen(workers[::-1]) == Choice("d2", "p2")

    def test_a_queue_counts_in_seconds_not_in_tokens(self) -> None:
        fast = worker("p1", prefill_tokens=500, prefill_tokens_per_s=10_000.0)
        assert chosen([fast, worker("p2", prefill_tokens=100), worker("d1")]) == Choice("d1", "p1")

    def test_among_equals_it_is_whoever_waited_longest(self) -> None:
        workers = [worker("p1", last_given_s=2.0), worker("p2", last_given_s=1.0)]
        workers += [worker("d1", last_given_s=3.0), worker("d2", last_given_s=4.0)]
        assert chosen(workers) == chosen(workers[::-1]) == Choice("d1", "p2")

    def test_prefill_goes_by_what_it_has_of_the_prompt(self) -> None:
        workers = [worker("p1", prefill_tokens=500), worker("p2"), worker("d1")]
        assert chosen(workers, tokens=1000, cached={"p1": 600}) == Choice("d1", "p1")
        assert chosen(workers, tokens=1000, cached={"p1": 400}) == Choice("d1", "p2")

    def test_decode_goes_by_what_need_not_be_sent(self) -> None:
        workers = [worker("p1", **LINK), worker("d1", sequences=2), worker("d2")]
        workers[1:] = [w._replace(kv_bytes_per_token=1000) for w in workers[1:]]
        assert chosen(workers, tokens=1000) == Choice("d2", "p1")
        # Only what computing does not hide: with all of it cached at prefill, a second of transfer.
        assert chosen(workers, tokens=1000, cached={"p1": 992, "d1": 992}) == Choice("d1", "p1")

    def test_computing_hides_all_of_a_transfer_but_the_last_chunk(self) -> None:
        workers = [worker("p1", **LINK, chunk_tokens=256), worker("d1")]
        decision = decide(workers, tokens=2000)
        assert decision is not None
        assert decision.chosen.handoff_s == pytest.approx(HANDOFF_S + 0.256)
        assert decision.chosen.ttft_s == pytest.approx(2.0 + HANDOFF_S + 0.256)

    def test_decode_without_a_seat_or_room_makes_wait(self) -> None:
        full = worker("d1", sequences=8, max_running=8)
        assert chosen([worker("p1"), full, worker("d2", sequences=9, max_running=16)]) == Choice("d2", "p1")
        crowded = worker("d1", blocks_held=40, blocks_spare=1)
        assert chosen([worker("p1"), crowded, worker("d2", sequences=1)]) == Choice("d2", "p1")

    def test_only_workers_of_one_group_are_paired(self) -> None:
        workers = [worker("p1", group="old", prefill_tokens=300), worker("d1", group="old")]
        workers += [worker("p2", group="new"), worker("d2", group="newer")]
        assert chosen(workers) == Choice("d1", "p1"), "nobody prefills for d2: its release comes last"
        assert chosen([workers[0], workers[3]]) == Choice("d2")
        assert chosen([*workers[:3], worker("d2", group="new")]) == Choice("d2", "p2")
        assert chosen(workers[:3]) == Choice("d1", "p1")

    def test_a_worker_that_converts_takes_over_from_another_group(self) -> None:
        prefill, alike = worker("p", group="exact"), worker("d1", group="exact", sequences=3)
        other = worker("d2", group="fp8", takes_from=("exact", "none there"))
        assert chosen([prefill, alike, other]) == Choice("d2", "p")
        assert chosen([prefill, other]) == Choice("d2", "p")
        assert chosen([alike, other._replace(sequences=6)]) == Choice("d1")
        both = worker("p2", group="fp8", prefill_tokens=500)
        assert chosen([prefill, both, other]) == Choice("d2", "p")
        assert chosen([prefill._replace(prefill_tokens=900), both, other]) == Choice("d2", "p2")
        never = PlacementOptions(disaggregation="never")
        assert chosen([prefill, other], never) == Choice("d2")
        assert chosen([prefill, other._replace(takes_from=())]) == Choice("d2"), (
            "it computes the prompt itself"
        )

    def test_nobody_converts_what_is_compared(self) -> None:
        compared = worker("p1", group="exact", verifies=True)
        plain = worker("p2", group="exact", prefill_tokens=900)
        other = worker("d2", group="fp8", takes_from=("exact",))
        assert chosen([compared, plain, other]) == Choice("d2", "p2")
        assert chosen([compared, other]) == Choice("d2"), "it computes the prompt itself"
        alike = worker("d1", group="exact", sequences=3)
        assert chosen([compared, alike, other]) == Choice("d1", "p1")

    def test_a_pair_that_cannot_be_linked_is_left_out_whoever_is_least_loaded(self) -> None:
        prefills = [worker(f"p{at}", prefill_tokens=100 * at) for at in range(6)]
        near = frozenset(f"p{at}" for at in range(4))
        assert chosen([*prefills, worker("d1", unlinked=near)]) == Choice("d1", "p4")
        assert chosen([*prefills, worker("d1", unlinked=near), worker("d2")]) == Choice("d2", "p0")
        everybody = near | {"p4", "p5"}
        alone = worker("d1", unlinked=everybody)
        busy = worker("d2", sequences=30)
        assert chosen([*prefills, alone]) == Choice("d1"), "it computes the prompt itself"
        assert chosen([*prefills, alone, busy]) == Choice("d2", "p0"), "a prompt is for a prefill worker"
        conditional = PlacementOptions()
        assert chosen([*prefills, alone, busy], conditional) == Choice("d1")
        waits = PlacementOptions("always", no_prefill="queue")
        assert decide([*prefills, alone], waits) is None

    def test_a_guest_that_cannot_be_linked_is_no_guest(self) -> None:
        prefill = worker("p", group="exact")
        guest = worker("d", group="fp8", takes_from=("exact",), unlinked=frozenset({"p"}))
        assert chosen([prefill, guest]) == Choice("d")

    def test_a_release_without_prefill_helps_out_when_the_other_is_full(self) -> None:
        """As when of the new release all prefill workers are there, and one decode worker."""
        old = [worker(f"d{number}", group="old", sequences=3) for number in range(4)]
        prefill = worker("p", group="new")
        busy = worker("d", group="new", sequences=7, max_running=8)
        assert chosen([*old, prefill, busy]) == Choice("d", "p")
        full = busy._replace(sequences=8)
        assert chosen([*old, prefill, full]) in [Choice(each.address) for each in old]
        crowded = busy._replace(blocks_held=40, blocks_spare=1)
        assert chosen([*old, prefill, crowded]) in [Choice(each.address) for each in old]
        slow = PlacementOptions(disaggregation="always", itl_target_s=0.001)
        assert chosen([prefill, busy, old[0]], slow) == Choice("d", "p"), "a target is no reason"


class TestLocalPrefill:
    def test_one_that_is_both_computes_the_prompt_as_well(self) -> None:
        assert chosen([worker("p1"), worker("d1", sequences=1), worker("b1")]) == Choice("b1")
        busy = worker("b1", sequences=4, prefill_tokens=500)
        assert chosen([worker("p1"), worker("d1"), busy]) == Choice("d1", "p1")

    def test_without_prefill_decode_computes_the_prompt(self) -> None:
        assert chosen([worker("d1")]) == Choice("d1")

    def test_without_decode_there_is_nobody(self) -> None:
        assert decide([worker("p1"), worker("p2")]) is None
        assert decide([]) is None

    def test_an_idle_decode_worker_is_sooner_than_a_handoff(self) -> None:
        workers = [worker("p1", **LINK), worker("d1")]
        assert chosen(workers, CONDITIONAL) == Choice("d1")
        assert chosen(workers) == Choice("d1", "p1")
        assert chosen(workers, PlacementOptions("never")) == Choice("d1")

    def test_without_a_target_it_must_pay_for_the_streams_it_delays(self) -> None:
        """400 ms of computing delay each of 4 streams by as much: that is worth a queue of 2 s."""
        for queue, choice in ((1500, Choice("d1", "p1")), (2500, Choice("d1"))):
            workers = [worker("p1", prefill_tokens=queue), worker("d1", sequences=4)]
            assert chosen(workers, CONDITIONAL, tokens=400) == choice, queue

    def test_a_target_bounds_the_step_that_a_prompt_shares_with_streams(self) -> None:
        """At a chunk of 64 tokens: 64 ms, and 24 ms for 4 streams."""
        workers = [worker("p1", prefill_tokens=2500), worker("d1", sequences=4, mixed_prefill_tokens=64)]
        assert chosen(workers, PlacementOptions(itl_target_s=0.09)) == Choice("d1")
        assert chosen(workers, PlacementOptions(itl_target_s=0.08)) == Choice("d1", "p1")

    def test_prompts_that_wait_at_decode_count(self) -> None:
        workers = [worker("p1", prefill_tokens=500), worker("d1", prefill_tokens=1000)]
        assert chosen(workers, CONDITIONAL) == Choice("d1", "p1")

    def test_decodes_own_cache_counts(self) -> None:
        """It has the answer of the turn before, which no prefill worker has."""
        workers = [worker("p1", **LINK), worker("d1", sequences=8)]
        assert chosen(workers, CONDITIONAL, 1000, {"p1": 600, "d1": 960}) == Choice("d1")
        assert chosen(workers, CONDITIONAL, 1000, {"p1": 600}) == Choice("d1", "p1")


class TestTarget:
    def test_decode_within_the_target_goes_before_all_others(self) -> None:
        options = PlacementOptions("always", itl_target_s=0.03)
        workers = [worker("p1", **LINK), worker("d1", sequences=10), worker("d2", sequences=9)]
        assert chosen(workers, options, 1000, {"d1": 992}) == Choice("d2", "p1")

    def test_if_nobody_is_within_it_somebody_is_chosen(self) -> None:
        options = PlacementOptions("always", itl_target_s=0.001)
        assert chosen([worker("p1"), worker("d1", sequences=1), worker("d2")], options) == Choice("d2", "p1")


class TestBeforeTheFirstMeasurement:
    def test_the_least_loaded_are_chosen(self) -> None:
        blank = {"prefill_tokens_per_s": 0.0, "step_base_s": 0.0, "step_row_s": 0.0}
        workers = [worker("p1", prefill_tokens=10, **blank), worker("p2", **blank)]
        workers += [worker("d1", sequences=1, **blank), worker("d2", **blank)]
        assert chosen(workers) == Choice("d2", "p2")

    def test_a_crowd_is_not_free(self) -> None:
        """A fit over one sequence at a time finds no slope."""
        workers = [worker("p1"), worker("d1", sequences=30, step_row_s=0.0)]
        workers += [worker("d2", step_base_s=0.021, step_row_s=0.0)]
        assert chosen(workers) == Choice("d2", "p1")


def test_a_decision_explains_itself() -> None:
    workers = [worker("p1", prefill_tokens=500, **LINK), worker("d1", sequences=2)]
    decision = decide(workers, CONDITIONAL, 1000, {"p1": 600})
    assert decision is not None
    assert {(one.prefill, one.decode) for one in decision.considered} == {("p1", "d1"), (None, "d1")}
    assert decision.chosen.queue_s == pytest.approx(0.5)
    assert decision.chosen.compute_s == pytest.approx(0.4)
    assert decision.chosen.cached == 600
    line = str(decision)
    assert line.startswith("1000 tokens at p1 > d1: cost ")
    assert "queue 500 + compute 400 + handoff 605 + wait 0, cached 600" in line
    assert "(not d1: cost" in line
    assert "\n" not in line
