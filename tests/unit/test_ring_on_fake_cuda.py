"""The ring on a device whose work runs late: the same tokens as on a CPU, and no mistake goes unseen.

The model (``FakeModel``) makes its tokens of every K and V that it finds. So a copy that comes too early or
too late changes them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.engine import step_inputs
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kv import streamed_copies
from baton.engine.sampling import sampler
from baton.engine.sequence import Sequence as Request
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import TokenTable
from baton.text.tokenizer import Tokenizer
from baton.transport import device_copies
from baton.transport.pool_memory import PoolMemory
from tests.support.deep import all_deep_but
from tests.support.drafters import ScriptedDrafter
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fake_cuda.streams import Order
from tests.support.fake_engine import AHEAD, fake_engine, run, run_alone
from tests.support.local_worker import LocalWorker, answer, local_ring
from tests.support.tiny_models import EOS, VOCAB_SIZE, ModelDir, save_byte_tokenizer

ORDERS = get_args(Order)
MEMORY = 512 << 20
GREEDY = ResolvedSampling(max_tokens=10, temperature=0.0, ignore_eos=True)


def prompt(number: int, length: int) -> list[int]:
    return [(i * i * 31 + i * 17 + number * 7 + 5) % 97 for i in range(length)]


@pytest.fixture(autouse=True)
def launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched ahead, as on a device."""
    monkeypatch.setenv(AHEAD, "at once")


@pytest.fixture(params=all_deep_but(1, ORDERS))
def cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    with FakeCuda(order=request.param, memory_bytes=MEMORY) as device:
        yield device


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    """Over tokens that are bytes."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer.from_dir(path)
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
    yield compiler
    compiler.close()


def requests() -> list[Request]:
    """Requests that use what the sampler has."""
    sampled = ResolvedSampling(max_tokens=14, temperature=0.9, seed=3, ignore_eos=True)
    regex = StructuredOutput("regex", "[a-c]{4,30}")
    params = [
        GREEDY,
        replace(sampled, top_k=7, top_p=0.9, min_p=0.05),
        replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3, prompt_logprobs=2),
        replace(sampled, logit_bias=((4, 3.0), (9, -2.0)), bad_word_ids=((5,), (6, 7)), min_tokens=4),
        replace(sampled, structured_output=regex, seed=8),
        replace(sampled, allowed_token_ids=tuple(range(10, 60)), frequency_penalty=0.7),
    ]
    return [Request(f"r{i}", 1, prompt(i, 6 + 9 * i), own) for i, own in enumerate(params)]


class TestEngine:
    @pytest.mark.parametrize("graphs", all_deep_but([True], [False, True]), ids=["eager", "graphs"])
    def test_tokens_are_a_cpus(self, graphs: bool, cuda: FakeCuda, grammars: GrammarCompiler) -> None:
        make = partial(
            fake_engine, 24, vocab_size=VOCAB_SIZE, grammars=grammars, eos_token_ids=frozenset({EOS})
        )
        engine = make(device="cuda", graphs=graphs)
        assert run(engine, *requests()) == run(make(), *requests())
        assert engine.stats().scheduler.preemptions > 0
        assert (cuda.timeline.issued["replay "] > 0) is graphs

    @pytest.mark.parametrize("fault", [0, 3])
    def test_drafts_are_verified(self, fault: int, cuda: FakeCuda) -> None:
        drafter = ScriptedDrafter(fault)
        for number in range(3):
            drafter.expect(prompt(number, 20), run_alone(prompt(number, 20), GREEDY))
        engine = fake_engine(drafter=drafter, device="cuda", graphs=True)
        outputs = run(engine, *(Request(f"r{i}", 1, prompt(i, 20), GREEDY) for i in range(3)))
        assert outputs == [run_alone(prompt(i, 20), GREEDY) for i in range(3)]

    def test_blocks_come_back_from_the_host_tier(self, cuda: FakeCuda) -> None:
        assert host_tier_answers() == expected_of_host_tier()

    @pytest.mark.deep
    @pytest.mark.parametrize("kernels", all_deep_but(1, ["plain", "interpreted"]))
    def test_a_model_with_its_kernels(self, kernels: str, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        prompts = [prompt(number, 3 + 11 * number) for number in range(3)]
        answers = engine_answers(path, "cpu", prompts)
        with FakeCuda(kernels=kernels) as device:  # type: ignore[arg-type]
            assert engine_answers(path, "cuda", prompts) == answers
            assert device.timeline.issued["replay "] > 0

    @pytest.mark.deep
    @pytest.mark.parametrize("name", all_deep_but(1, ["qwen3-moe", "gpt-oss", "gemma3", "llama4"]))
    def test_models_of_other_families(self, name: str, model_dir: ModelDir) -> None:
        """Experts, sinks, windows and post-norms, in graphs, with the launches of real kernels."""
        path = model_dir(name)
        prompts = [prompt(number, 3 + 11 * number) for number in range(3)]
        answers = engine_answers(path, "cpu", prompts)
        with FakeCuda() as device:
            assert engine_answers(path, "cuda", prompts) == answers
            assert device.timeline.issued["replay "] > 0

    def test_a_models_drafts_are_verified(self, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        prompts = [[7, 3, 9] * (2 + number) for number in range(3)]
        answers = engine_answers(path, "cpu", prompts)
        with FakeCuda() as device:
            drafts = {"speculative_method": "ngram", "speculative_ngram_min": 1}
            assert engine_answers(path, "cuda", prompts, num_speculative_tokens=2, **drafts) == answers
            assert device.timeline.issued["replay "] > 0

    @pytest.mark.deep
    def test_a_model_on_the_second_device(self, model_dir: ModelDir) -> None:
        path = model_dir("llama")
        prompts = [prompt(number, 3 + 11 * number) for number in range(3)]
        answers = engine_answers(path, "cpu", prompts)
        with FakeCuda(devices=2):
            assert engine_answers(path, "cuda:1", prompts) == answers

    @pytest.mark.deep
    def test_its_start_tells_of_weights_and_of_recordings(self, model_dir: ModelDir) -> None:
        config = EngineConfig(
            model_dir("llama"), device="cuda", dtype="float32", num_blocks=16, max_num_seqs=4
        )
        told: list[tuple[str, int, int]] = []
        with FakeCuda():
            Engine.from_config(replace(config, max_graph_tokens=16), lambda *part: told.append(part))
        stages = [stage for stage, _, _ in told]
        assert stages == sorted(stages, reverse=True)  # load, then capture
        loaded, captured = ([part[1:] for part in told if part[0] == stage] for stage in ("load", "capture"))
        assert loaded[-1][0] == loaded[-1][1] > 0
        count = len(captured)
        assert count > 4  # steps with prompts, too
        assert captured == [(done, count) for done in range(1, count + 1)]


def engine_answers(path: Path, device: str, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    config = EngineConfig(path, device=device, dtype="float32", num_blocks=16, max_num_seqs=4, **options)
    engine = Engine.from_config(replace(config, max_graph_tokens=16))
    return run(engine, *(Request(f"r{i}", 0, own, GREEDY) for i, own in enumerate(prompts)))


def host_tier_answers() -> list[list[int]]:
    """The answers to some prompts twice, between which others needed the whole pool."""
    engine = fake_engine(num_blocks=20, host_blocks=100, device="cuda")
    outputs = []
    for turn in range(2):
        for number in range(3):
            outputs += run(engine, Request(f"{turn}.{number}", 1, prompt(number, 33), GREEDY))
        run(engine, *(Request(f"other{turn}{i}", 1, prompt(50 + i, 50), GREEDY) for i in range(3)))
    assert engine.stats().host_tier.blocks.restored > 0
    return outputs


def expected_of_host_tier() -> list[list[int]]:
    return [run_alone(prompt(number, 33), GREEDY) for _ in range(2) for number in range(3)]


def ring_answers(graphs: bool = False, roles: Sequence[Role] = ("prefill", "decode")) -> list[list[int]]:
    """The answers of a ring with its pools on the device to some prompts, twice."""

    async def ask() -> list[list[int]]:
        make = partial(fake_engine, num_blocks=40, host_blocks=64, device="cuda", graphs=graphs)
        workers = [LocalWorker(role, make_engine=make) for role in roles]
        async with asyncio.timeout(120), local_ring(workers) as ring:
            answers = []
            for turn in range(2):
                asked = (answer(ring, f"{turn}.{i}", prompt(i, 20 + 11 * i), 10) for i in range(5))
                answers += await asyncio.gather(*asked)
            return answers

    return asyncio.run(ask())


def expected_of_ring() -> list[list[int]]:
    return [run_alone(prompt(i, 20 + 11 * i), GREEDY) for _ in range(2) for i in range(5)]


@pytest.mark.parametrize("graphs", all_deep_but([True], [False, True]), ids=["eager", "graphs"])
def test_a_ring_with_its_pools_on_the_device(graphs: bool, cuda: FakeCuda) -> None:
    assert ring_answers(graphs) == expected_of_ring()
    waits = cuda.timeline.waits
    assert waits["Event.synchronize"] > 0


Plant = Callable[[pytest.MonkeyPatch], None]


def wait_for_no_copy(patch: pytest.MonkeyPatch) -> None:
    """A missing wait: pieces are sent, and pages reported to have arrived, while the copies are on their
    way."""
    patch.setattr(device_copies._Lane, "wait", lambda lane: lane.done.record(lane.stream))


def report_arrivals_early(patch: pytest.MonkeyPatch) -> None:
    """A copy reported too early: pages are said to have arrived when the copy into the pool was started."""
    scatter, wait = device_copies.DeviceCopies.scatter, device_copies._Lane.wait
    here = threading.local()

    def early(self: device_copies.DeviceCopies, *tensors: Tensor) -> None:
        here.early = True
        scatter(self, *tensors)
        here.early = False

    patch.setattr(device_copies.DeviceCopies, "scatter", early)
    patch.setattr(
        device_copies._Lane, "wait", lambda lane: None if getattr(here, "early", False) else wait(lane)
    )


def copy_on_the_stream_that_computes(patch: pytest.MonkeyPatch) -> None:
    """A wrong stream: what is waited for is not where the copies are."""
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def reuse_the_staging_of_ids(patch: pytest.MonkeyPatch) -> None:
    """A reused staging buffer: the pinned ids of one launch are overwritten by those of the next, as only
    the last launch of a copy is waited for."""
    patch.setattr(device_copies, "_MAX_ROWS", 2)
    launches, wait, here = device_copies._launches, device_copies._Lane.wait, threading.local()

    def counted(lane: device_copies._Lane, pool: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
        for start, count in launches(lane, pool, num_rows):
            here.last = start + count == num_rows
            yield start, count

    patch.setattr(device_copies, "_launches", counted)
    patch.setattr(device_copies._Lane, "wait", lambda lane: wait(lane) if here.last else None)


def start_steps_before_restores(patch: pytest.MonkeyPatch) -> None:
    """A missing wait of one stream for another: a step does not come behind the host tier's copies."""
    patch.setattr(streamed_copies.StreamedCopies, "join", lambda copies: None)


def save_what_has_not_left_the_pool(patch: pytest.MonkeyPatch) -> None:
    """A missing wait of one stream for another: the bus does not wait for the copy out of the pool."""
    patch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: None)


def reuse_the_ring(patch: pytest.MonkeyPatch) -> None:
    """A reused staging buffer: the next blocks to be saved enter the ring before the last have left it."""
    patch.setattr(streamed_copies, "RING_BYTES", 1)

    def wait(stream: Any, event: Any) -> None:
        if stream.priority == 0:
            event.wait(stream)

    patch.setattr(torch.cuda.Stream, "wait_event", wait)


def read_tokens_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """A host read of device memory, by the engine."""
    choose = sampler.choose
    patch.setattr("baton.engine.token_choice.choose", lambda *given: choose(*given).numpy())


def read_results_early(patch: pytest.MonkeyPatch) -> None:
    """A missing wait: the tokens of a step are read before they have reached the host."""
    patch.setattr(torch.cuda.Event, "synchronize", lambda event: None)


def reuse_the_steps_buffer(patch: pytest.MonkeyPatch) -> None:
    """A reused staging buffer: a step is laid out where the copy of the one before still reads."""
    buffer = torch.zeros(1 << 16, dtype=torch.int64, pin_memory=True)
    patch.setattr(step_inputs, "host_buffer", lambda size, device: buffer[:size].zero_())


def send_pages_in_place(patch: pytest.MonkeyPatch) -> None:
    """A host read of device memory, by a link: it takes the pool's pages for the host's."""
    patch.setattr("baton.transport.pool_memory.DeviceCopies", lambda *given: None)


def ring_is_right() -> None:
    assert ring_answers() == expected_of_ring()


def host_tier_is_right() -> None:
    assert host_tier_answers() == expected_of_host_tier()


def engine_is_right() -> None:
    assert run(fake_engine(device="cuda"), Request("r", 1, prompt(0, 9), GREEDY)) == [
        run_alone(prompt(0, 9), GREEDY)
    ]


def links_take_the_pool() -> None:
    pool = torch.zeros(4, 2, 2, 2, 4, 3, device="cuda")
    assert PoolMemory(pool).part(4).in_place([1]) == []


@pytest.mark.parametrize(
    ("plant", "check", "error", "order"),
    all_deep_but(
        1,
        [
            (wait_for_no_copy, ring_is_right, AssertionError, "late"),
            (wait_for_no_copy, ring_is_right, AssertionError, "others_first"),
            (report_arrivals_early, ring_is_right, AssertionError, "late"),
            (copy_on_the_stream_that_computes, ring_is_right, AssertionError, "late"),
            (reuse_the_staging_of_ids, ring_is_right, AssertionError, "late"),
            (start_steps_before_restores, host_tier_is_right, AssertionError, "late"),
            (save_what_has_not_left_the_pool, host_tier_is_right, AssertionError, "late"),
            (reuse_the_ring, host_tier_is_right, AssertionError, "others_first"),
            (read_results_early, engine_is_right, AssertionError, "late"),
            (reuse_the_steps_buffer, engine_is_right, AssertionError, "late"),
            (read_tokens_on_the_host, engine_is_right, TypeError, "early"),
            (send_pages_in_place, links_take_the_pool, TypeError, "early"),
        ],
    ),
)
def test_a_mistake_shows(
    plant: Plant,
    check: Callable[[], None],
    error: type[Exception],
    order: Order,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeCuda(order=order, memory_bytes=MEMORY), monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(error):
            check()
