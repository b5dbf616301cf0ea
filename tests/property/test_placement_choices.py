"""What holds of every choice, whatever the workers report."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.placement import (
    DISAGGREGATIONS,
    Decision,
    Estimate,
    PlacementOptions,
    Prompt,
    WorkerReport,
    choose,
)
from baton.router.placement.policy import MAX_PAIRED, TICK_S

SETTINGS = settings(max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "80")), deadline=None)


@st.composite
def fleets(draw: st.DrawFn, most: int = 12, group: bool = True) -> list[WorkerReport]:
    def worker(number: int) -> WorkerReport:
        return WorkerReport(
            address=f"w{number}",
            role=draw(st.sampled_from(["prefill", "decode", "both"])),
            prefill_tokens=draw(st.integers(0, 5000)),
            sequences=draw(st.integers(0, 20)),
            last_given_s=draw(st.sampled_from([0.0, 1.0, 2.0])),
            accepts=draw(st.sampled_from([True, True, True, False])),
            group=draw(st.sampled_from(["", "", "new"])) if group else "",
            max_running=draw(st.sampled_from([4, 16])),
            blocks_held=draw(st.integers(0, 100)),
            blocks_spare=draw(st.none() | st.integers(0, 100)),
            prefill_tokens_per_s=draw(st.sampled_from([0.0, 500.0, 1000.0, 9000.0])),
            step_base_s=draw(st.sampled_from([0.0, 0.01, 0.02])),
            step_row_s=draw(st.sampled_from([0.0, 0.001])),
            mixed_prefill_tokens=draw(st.sampled_from([16, 64, 256])),
            kv_bytes_per_token=draw(st.sampled_from([0, 1000])),
            takes_from=draw(st.sampled_from([(), (), ("",), ("new", "none")])) if group else (),
            link_bytes_per_s=draw(st.sampled_from([0.0, 1e6, 1e9])),
        )

    return [worker(number) for number in range(draw(st.integers(0, most)))]


PROMPTS = st.builds(
    Prompt,
    st.integers(300, 5000),
    st.dictionaries(st.sampled_from([f"w{n}" for n in range(12)]), st.sampled_from([0, 64, 288]), max_size=4),
)
OPTIONS = st.builds(
    PlacementOptions,
    st.sampled_from(DISAGGREGATIONS),
    st.sampled_from([None, 0.015, 0.05, 0.2]),
    st.sampled_from(["fail", "queue", "local"]),
)


def feeds(prefill: WorkerReport, decode: WorkerReport) -> bool:
    return prefill.group in (decode.group, *decode.takes_from)


def decide(workers: list[WorkerReport], prompt: Prompt, options: PlacementOptions) -> Decision | None:
    return choose(prompt, [Estimate.of(report, options) for report in workers], options)


@SETTINGS
@given(fleets(), PROMPTS, OPTIONS)
def test_those_who_are_chosen_may_and_can(
    workers: list[WorkerReport], prompt: Prompt, options: PlacementOptions
) -> None:
    decision = decide(workers, prompt, options)
    at = {worker.address: worker for worker in workers if worker.accepts}
    if decision is None:
        prefills = [worker for worker in at.values() if worker.role == "prefill"]
        for worker in at.values():  # nobody was overlooked
            assert worker.role != "both"
            if worker.role == "decode":
                assert not any(feeds(prefill, worker) for prefill in prefills)
                assert options.no_prefill != "local"
        return
    decode = at[decision.choice.decode]
    assert decode.role != "prefill"
    if decision.choice.prefill is not None:
        prefill = at[decision.choice.prefill]
        assert (prefill.role, decode.role) == ("prefill", "decode")
        assert feeds(prefill, decode)
        assert options.disaggregation != "never"
    elif decode.role == "decode":
        beside = [w for w in at.values() if w.role == "prefill" and feeds(w, decode)]
        assert options.disaggregation != "always" or not beside
        assert options.disaggregation == "never" or options.no_prefill == "local" or beside
        if beside and options.disaggregation == "conditional" and options.itl_target_s is not None:
            standing = Estimate.of(decode, options)
            assert not decode.sequences or standing.mixed_itl_s <= options.itl_target_s


@SETTINGS
@given(fleets(), PROMPTS, OPTIONS, st.data())
def test_less_to_do_never_makes_a_worker_less_wanted(
    workers: list[WorkerReport], prompt: Prompt, options: PlacementOptions, data: st.DataObject
) -> None:
    decision = decide(workers, prompt, options)
    if decision is None:
        return
    chosen = data.draw(st.sampled_from([address for address in decision.choice if address is not None]))
    worker = next(w for w in workers if w.address == chosen)
    less = worker._replace(
        prefill_tokens=data.draw(st.integers(0, worker.prefill_tokens)),
        sequences=data.draw(st.integers(0, worker.sequences)),
    )
    again = decide([less if w is worker else w for w in workers], prompt, options)
    assert again is not None and chosen in again.choice


@SETTINGS
@given(fleets(most=3 * MAX_PAIRED, group=False), PROMPTS, OPTIONS)
def test_the_choice_is_the_best_of_all_pairs(
    workers: list[WorkerReport], prompt: Prompt, options: PlacementOptions
) -> None:
    """Asked of each pair alone. Where a side has more workers than are paired, what is overlooked is at most
    the part of a transfer that the other prefill worker would hide."""
    decision = decide(workers, prompt, options)
    if decision is None:
        return
    prefills = [w for w in workers if w.accepts and w.role == "prefill"]
    others = [w for w in workers if w.accepts and w.role != "prefill"]
    everybody = [Estimate.of(w, options) for w in workers]
    penalty = {standing.address: standing.penalty_s for standing in everybody}
    best = float("inf")
    for decode in others:
        alone = [decode] if decode.role == "both" or not prefills else []
        asked = [[p, decode] for p in prefills] if decode.role == "decode" else []
        for pair in [*asked, alone]:
            found = decide(pair, prompt, options) if pair else None
            if found is not None:
                best = min(best, found.chosen.cost_s + penalty[found.chosen.decode])
    many = max(len(prefills), len(others)) > MAX_PAIRED
    hidden = prompt.num_tokens * max(standing.kv_token_s for standing in everybody) if many else 0.0
    ours = decision.chosen.cost_s + penalty[decision.chosen.decode]
    assert ours <= best + hidden + 2 * TICK_S
