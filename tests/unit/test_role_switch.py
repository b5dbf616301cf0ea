"""A worker takes another role while it runs: who may have it do so, and what becomes of its requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from hypothesis import given
from hypothesis import strategies as st

from baton.core.role import ROLES, Role
from baton.core.role_proto import role_from_proto, role_to_proto
from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import Sequence as EngineSequence
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.identity import sign_switch
from baton.planner.switch_role import Switched, SwitchError, switch_role
from baton.router.dispatch.retries import RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.placement import PlacementOptions
from baton.telemetry.roles import CountedByRole
from baton.v1 import handoff_pb2, handoff_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker import drain
from baton.worker.switch_request import RoleIncarnation, SwitchRefusedError, role_asked_for
from tests.support.greetings import greet_decode
from tests.support.local_worker import KEY, LocalWorker, answer, local_ring, until

PROMPT = [7, 3, 90, 14, 2, 55, 21, 8, 13, 40]
STEP_S = 0.005
TOKENS = 40


def asked(
    post: RoleIncarnation, role: Role, *, key: bytes = KEY, timeout_s: float = 0.0
) -> pb.SwitchRoleRequest:
    return pb.SwitchRoleRequest(
        role=role_to_proto(role),
        incarnation=post.incarnation,
        timeout_s=timeout_s,
        proof=sign_switch(key, post.incarnation, role),
    )


def test_every_role_of_the_contract_has_a_name() -> None:
    named = {number: role_from_proto(number) for number in pb.Role.values()}
    assert named == {0: None, pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_BOTH: "both"}
    assert [role_from_proto(role_to_proto(role)) for role in ROLES] == list(ROLES)
    assert role_from_proto(99) is None, "of a newer release"


async def switched(worker: LocalWorker, role: Role, timeout_s: float = 0.0) -> Switched:
    return await switch_role(worker.address, role, ClusterKeys(KEY), timeout_s=timeout_s)


def roles(ring: WorkerRing) -> dict[str, str]:
    return {worker.address: worker.role if worker.ready else "" for worker in ring.fleet.workers}


async def alone(max_tokens: int, *prompts: Sequence[int]) -> list[list[int]]:
    """What one worker answers."""
    async with local_ring([LocalWorker("both")]) as ring:
        asked = (answer(ring, f"r{n}", prompt, max_tokens) for n, prompt in enumerate(prompts))
        return await asyncio.gather(*asked)


async def health(worker: LocalWorker, service: str) -> int:
    return int((await worker.health.Check(HealthCheckRequest(service=service), None)).status)


# --- who may


HERE = RoleIncarnation("prefill", "here")


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (
            pb.SwitchRoleRequest(),
            grpc.StatusCode.INVALID_ARGUMENT,
            "role: must be one of prefill, decode, both",
        ),
        (pb.SwitchRoleRequest(role=9), grpc.StatusCode.INVALID_ARGUMENT, "not 9"),  # type: ignore[arg-type]
        (asked(HERE, "decode", timeout_s=-1), grpc.StatusCode.INVALID_ARGUMENT, "timeout_s: .* not -1"),
        (asked(HERE, "decode", timeout_s=math.nan), grpc.StatusCode.INVALID_ARGUMENT, "timeout_s"),
        (asked(HERE, "decode", timeout_s=math.inf), grpc.StatusCode.INVALID_ARGUMENT, "timeout_s"),
        (asked(HERE, "decode", key=b"other"), grpc.StatusCode.PERMISSION_DENIED, "cluster key"),
        (
            asked(RoleIncarnation("prefill", "gone"), "decode"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "gone is not here",
        ),
        # As it would tell whoever has no key what is here.
        (
            asked(RoleIncarnation("prefill", "gone"), "decode", key=b"x"),
            grpc.StatusCode.PERMISSION_DENIED,
            "proof",
        ),
    ],
)
def test_what_is_refused(request_: pb.SwitchRoleRequest, status: grpc.StatusCode, says: str) -> None:
    with pytest.raises(SwitchRefusedError, match=says) as refused:
        role_asked_for(request_, HERE, ClusterKeys(KEY))
    assert refused.value.status is status


def test_a_proof_is_for_one_role_of_one_incarnation() -> None:
    given_away = asked(HERE, "decode")
    assert role_asked_for(given_away, HERE, ClusterKeys(KEY)) == "decode"
    for change in (pb.SwitchRoleRequest(role=pb.ROLE_BOTH), pb.SwitchRoleRequest(incarnation="other")):
        forged = pb.SwitchRoleRequest()
        forged.CopyFrom(given_away)
        forged.MergeFrom(change)
        with pytest.raises(SwitchRefusedError) as refused:
            role_asked_for(forged, HERE, ClusterKeys(KEY))
        assert refused.value.status is grpc.StatusCode.PERMISSION_DENIED


async def test_the_same_role_is_had_at_once_and_a_proof_serves_once() -> None:
    worker = LocalWorker("decode")
    async with local_ring([worker, LocalWorker("decode")]):
        before = worker.post
        assert await switched(worker, "decode") == Switched("decode", "decode", 0.0)
        assert worker.post is before
        proof = asked(before, "prefill")
        assert (await worker.switch.switch(proof)).now == pb.ROLE_PREFILL
        await switched(worker, "decode")
        with pytest.raises(SwitchRefusedError, match="is not here"):
            await worker.switch.switch(proof)


# --- what becomes of requests


@pytest.mark.parametrize(
    ("was", "now", "beside"),
    [
        ("decode", "prefill", ("prefill", "decode")),
        ("prefill", "decode", ("prefill", "decode")),
        ("both", "prefill", ("both",)),
    ],
)
async def test_answers_under_way_are_what_they_would_have_been(
    was: Role, now: Role, beside: Sequence[Role]
) -> None:
    prompts = [[number, *PROMPT] for number in range(8)]  # they share nothing, and go to all there are
    true = await alone(TOKENS, *prompts)
    changed = LocalWorker(was, step_s=STEP_S)
    others = [LocalWorker(role, step_s=STEP_S) for role in beside]
    async with local_ring([changed, *others]) as ring:
        under_way = [
            asyncio.create_task(answer(ring, f"r{prompt[0]}", prompt, TOKENS)) for prompt in prompts[:4]
        ]
        await until(lambda: changed.service.open_work().sequences)
        before = changed.incarnation
        done = await switched(changed, now)
        assert (done.was, done.now) == (was, now) and changed.incarnation != before
        await until(lambda: roles(ring)[changed.address] == now)
        under_way += [
            asyncio.create_task(answer(ring, f"r{prompt[0]}", prompt, TOKENS)) for prompt in prompts[4:]
        ]
        assert await asyncio.gather(*under_way) == true
        steps = changed.engine.stats().work
        assert steps.prompt_tokens if now == "prefill" else steps.sequences
        await until(lambda: not any(worker.held for worker in (changed, *others)))


async def test_who_waits_for_a_worker_of_a_role_gets_the_one_that_takes_it() -> None:
    workers = [LocalWorker("prefill"), LocalWorker("prefill")]
    async with local_ring(workers) as ring:
        waiting = asyncio.create_task(answer(ring, "r", PROMPT, 12))
        await until(lambda: len(ring.attempts.waiting))
        await switched(workers[0], "decode")
        assert [await asyncio.wait_for(waiting, 60)] == await alone(12, PROMPT)
        assert workers[1].engine.stats().work.prompt_tokens, "the other one has handed it on"


async def test_what_takes_longer_than_the_timeout_goes_on_elsewhere() -> None:
    """Here there is nobody else: it waits for the new role."""
    worker = LocalWorker("both", step_s=STEP_S)
    async with local_ring([worker]) as ring:
        under_way = asyncio.create_task(answer(ring, "r", PROMPT, 100))
        await until(lambda: worker.engine.generated_tokens > 10)
        done = await switched(worker, "decode", 0.05)
        assert 0.05 <= done.seconds < drain.CUT_S
        assert [await under_way] == await alone(100, PROMPT)


async def test_many_cuts_draw_on_no_retry_budget() -> None:
    policy = RetryPolicy(max_attempts=2, budget_rate=0.0, budget_share=0.0, budget_most=0.0)
    worker = LocalWorker("both", step_s=STEP_S)
    async with local_ring([worker], policy=policy) as ring:
        under_way = asyncio.create_task(answer(ring, "r", PROMPT, 100))
        for role in ("decode", "both", "decode", "both"):
            tokens = worker.engine.generated_tokens
            await until(lambda: worker.engine.generated_tokens > tokens + 2)  # noqa: B023
            await switched(worker, role, 0.01)
        assert [await under_way] == await alone(100, PROMPT)


async def test_what_cannot_be_ended_leaves_the_worker_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "CUT_S", 0.1)
    worker = LocalWorker("decode", step_s=STEP_S)
    async with local_ring([worker], placement=PlacementOptions("conditional")) as ring:
        params = ResolvedSampling(max_tokens=200, temperature=0.0, ignore_eos=True)
        worker.engine.add(EngineSequence("nobody's", 1, PROMPT, params))
        incarnation = worker.incarnation
        with pytest.raises(SwitchError, match="it serves on as decode: 1 sequences") as failed:
            await switched(worker, "prefill", 0.05)
        assert failed.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert worker.incarnation == incarnation
        assert await health(worker, "baton.v1.Worker") == HealthCheckResponse.SERVING
        await until(lambda: roles(ring)[worker.address] == "decode" and not ring.fleet.workers[0].draining)
        assert [await answer(ring, "r", PROMPT, 12)] == await alone(12, PROMPT)


# --- while it is under way


async def test_one_switch_at_a_time() -> None:
    worker = LocalWorker("both", step_s=STEP_S)
    async with local_ring([worker]) as ring:
        under_way = asyncio.create_task(answer(ring, "r", PROMPT, 80))
        await until(lambda: worker.service.open_work().sequences)
        first, second = (asyncio.create_task(switched(worker, "decode")) for _ in "ab")
        await until(lambda: ring.fleet.workers[0].draining)
        assert await health(worker, "baton.v1.Worker") == HealthCheckResponse.NOT_SERVING
        for other in ("prefill", "both"):
            with pytest.raises(SwitchError, match="a switch to decode is under way") as refused:
                await switched(worker, other)
            assert refused.value.status is grpc.StatusCode.ABORTED
        await under_way
        assert await first == await second
        await until(lambda: roles(ring)[worker.address] == "decode")
        assert await health(worker, "baton.v1.Worker") == HealthCheckResponse.SERVING


async def test_a_caller_that_goes_away_stops_nothing() -> None:
    worker = LocalWorker("both", step_s=STEP_S)
    async with local_ring([worker]) as ring:
        under_way = asyncio.create_task(answer(ring, "r", PROMPT, 60))
        await until(lambda: worker.service.open_work().sequences)
        caller = asyncio.create_task(switched(worker, "decode"))
        await until(lambda: ring.fleet.workers[0].draining)
        caller.cancel()
        await under_way
        await until(lambda: worker.post.role == "decode")


async def test_a_worker_that_is_told_to_end_ends_whatever_it_was_about_to_become() -> None:
    worker = LocalWorker("both", step_s=STEP_S)
    async with local_ring([worker]) as ring:
        under_way = asyncio.create_task(answer(ring, "r", PROMPT, 60))
        await until(lambda: worker.service.open_work().sequences)
        switching = asyncio.create_task(switched(worker, "decode"))
        await until(lambda: ring.fleet.workers[0].draining)
        await worker.switch.stop()
        with pytest.raises(SwitchError, match="this worker is ending") as refused:
            await switching
        assert refused.value.status is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(SwitchError, match="this worker is ending"):
            await switched(worker, "both")
        assert await worker.drain.run(5)
        assert [await under_way] == await alone(60, PROMPT)
        assert worker.post.role == "both"
        assert await health(worker, "baton.v1.Worker") == HealthCheckResponse.NOT_SERVING


# --- the name


async def test_who_holds_an_old_name_is_refused() -> None:
    """A prefill worker that has not heard of it hands nothing to what decodes there no more."""
    prefill, decode, other = LocalWorker("prefill"), LocalWorker("decode"), LocalWorker("decode")
    async with local_ring([prefill, decode, other]):
        await until(lambda: decode.decode.open_links)
        before = decode.incarnation
        await switched(decode, "prefill")
        await switched(decode, "decode")
        greeting = handoff_pb2.LinkOpen(
            prefill_incarnation="late",
            decode_incarnation=before,
            compatibility=prefill.wiring.compatibility,
            connectors=["tcp"],
            prefill_address=prefill.address,
        )
        async with grpc.aio.insecure_channel(decode.address) as channel:
            stream = handoff_pb2_grpc.HandoffStub(channel).Link(None)
            await greet_decode(stream, KEY, "late")
            await stream.write(handoff_pb2.PrefillMessage(open=greeting))
            refused = await stream.read()
        assert isinstance(refused, handoff_pb2.DecodeMessage)
        assert refused.refuse.field == "decode_incarnation"
        await until(lambda: decode.decode.open_links)
        assert {link.decode for link in decode.decode._peers} == {decode.incarnation}


# --- counts


@given(
    st.lists(
        st.one_of(st.integers(0, 9), st.sampled_from(("prefill", "decode", "both"))), min_size=1, max_size=30
    )
)
def test_each_role_has_what_was_counted_in_it(events: Sequence[int | str]) -> None:
    counted, total, role = CountedByRole("prefill"), 0, "prefill"
    true = dict.fromkeys(("prefill", "decode", "both"), 0)
    for event in events:
        if isinstance(event, int):
            total += event
            true[role] += event
        else:
            counted.split(("tokens",), total)
            counted.change(event)
            role = event
    told = counted.split(("tokens",), total)
    assert {name: told.get(name, 0) for name in true} == true
    assert counted.role == role in told
