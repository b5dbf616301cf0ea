"""On a CUDA device: the same attention, the same logits, the same tokens, and a ring whose pools are there.

Run by ``make gpu``; skipped (and never reported as passed) where there is no device.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs import GraphedModel
from baton.engine.sequence import Sequence
from baton.transport.pool_memory import PoolMemory, pinned
from baton.transport.staging import StagingBudget
from baton_kernels.attention import AttentionPlan, new_pool, paged_attention, write_kv
from baton_kernels.paged import Chunk, PagedBatch
from tests.support.clients import RingClient
from tests.support.ring import Ring, running, running_routers, worker
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS, oracle_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIN_MARGIN = 2e-3
"""Where the oracle's best two logits are closer, another order of float32 sums may choose the other."""


def engine(path: Path, device: str, dtype: str) -> Engine:
    return Engine.from_config(EngineConfig(model=path, device=device, dtype=dtype, num_blocks=256))


def run(on: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = ResolvedSampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    sequences = [Sequence(f"r{i}", 0, prompt, params) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        on.add(sequence)
    while on.has_work:
        on.step()
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    path = TINY_MODELS[name](tmp_path / name)
    rng = random.Random(0)
    drawn: list[tuple[list[int], list[int]]] = []
    while len(drawn) < 6:
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 300))]
        answer, margin = oracle_greedy(path, prompt, 32)
        if margin > MIN_MARGIN:
            drawn.append((prompt, answer))
    torch.backends.cuda.matmul.allow_tf32 = False
    answers = run(engine(path, "cuda", "float32"), [prompt for prompt, _ in drawn], 32)
    assert answers == [answer for _, answer in drawn]


def test_replayed_steps_equal_eager_ones(tmp_path: Path) -> None:
    path = TINY_MODELS["qwen3"](tmp_path / "qwen3")
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[(i * 29 + j * 7) % 250 for j in range(3 + 9 * i)] for i in range(11)]
    answers = []
    for eager in (True, False):
        config = EngineConfig(path, device="cuda", dtype="float32", num_blocks=256, enforce_eager=eager)
        on = Engine.from_config(config)
        assert isinstance(runner_of(on).model, GraphedModel) is not eager
        params = ResolvedSampling(max_tokens=40, temperature=0.9, ignore_eos=True)
        sequences = [
            Sequence(f"r{i}", 0, prompt, replace(params, seed=i, max_tokens=9 + 3 * i))
            for i, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            on.add(sequence)
        while on.has_work:
            on.step()
        answers.append([sequence.output_ids for sequence in sequences])
    same = sum(one == other for one, other in zip(*answers, strict=True))
    assert same >= 10, "another order of float32 sums may have changed one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_equals_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, block, blocks, context = 8, 2, 64, 16, 32, 100
    table = torch.randperm(blocks, generator=generator)[: -(-context // block)]
    positions = torch.arange(context)
    batch = PagedBatch(
        positions=positions,
        slot_blocks=table[positions // block],
        slot_offsets=positions % block,
        num_decode=0,
        decode_tables=torch.zeros((0, 1), dtype=torch.int64),
        decode_contexts=torch.zeros(0, dtype=torch.int64),
        chunks=(Chunk(0, context, context, table),),
    )
    q, k, v = (torch.randn(context, n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))

    def attend(device: str) -> torch.Tensor:
        moved = PagedBatch(
            batch.positions.to(device),
            batch.slot_blocks.to(device),
            batch.slot_offsets.to(device),
            0,
            batch.decode_tables.to(device),
            batch.decode_contexts.to(device),
            (Chunk(0, context, context, table.to(device)),),
        )
        pool = new_pool(blocks, kv_heads, 1, block, dim, dtype=dtype, device=torch.device(device))
        plan = AttentionPlan.build(moved, pool, frozenset({None}), heads)
        write_kv(pool, 0, k.to(device, dtype), v.to(device, dtype), plan)
        out = paged_attention(pool, 0, q.to(device, dtype), plan, scale=dim**-0.5, window=None)
        return out.float().cpu()

    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend("cuda"), attend("cpu"), rtol=tolerance, atol=tolerance)


def test_blocks_come_back_from_the_host_tier(tmp_path: Path) -> None:
    path = TINY_MODELS["llama"](tmp_path / "llama")
    config = EngineConfig(path, device="cuda", dtype="float32", num_blocks=10, host_kv_bytes=1 << 22)
    on = Engine.from_config(config)
    prompts = [[(i * 29 + salt * 3) % 250 for i in range(20)] for salt in range(4)]
    oracle = [oracle_greedy(path, prompt, 60) for prompt in prompts]
    for _ in range(2):
        for answer, (expected, margin) in zip(run(on, prompts, 60), oracle, strict=True):
            assert answer == expected or margin < MIN_MARGIN
    host = on.stats().host_tier
    assert host.blocks.saved > 0
    assert host.blocks.restored > 0


def test_pages_cross_host_memory_unchanged() -> None:
    source = torch.randn(16, 2, 3, 2, 16, 64, device="cuda").bfloat16()
    target = torch.zeros_like(source)
    taken, given = PoolMemory(source).part(16), PoolMemory(target).part(16)
    piece = memoryview(bytearray(3 * taken.form_of([0]).nbytes))
    assert taken.in_place([5, 6, 1]) == []
    taken.gather([5, 6, 1], piece)
    given.scatter([3, 4, 9], piece)
    torch.cuda.synchronize()
    assert torch.equal(target[[3, 4, 9]], source[[5, 6, 1]])


def test_pinned_memory_is_what_staging_is_made_of() -> None:
    room = StagingBudget(allocate=pinned)
    piece = room.take(1000, lambda: None)
    assert piece is not None
    assert torch.frombuffer(piece, dtype=torch.uint8).is_pinned()
    room.give_back(piece)
    assert room.take(10, lambda: None).obj is piece.obj


def test_views_of_device_memory_are_the_pool_itself() -> None:
    pool = torch.randn(16, 2, 3, 2, 16, 64, device="cuda").bfloat16()
    memory = PoolMemory(pool).part(16)
    run, single = memory.on_device([5, 6, 1])
    torch.as_tensor(run, device=f"cuda:{run.device}").zero_()
    torch.as_tensor(single, device=f"cuda:{single.device}").zero_()
    zero = (pool == 0).flatten(1).all(dim=1)
    assert zero.nonzero().flatten().tolist() == [1, 5, 6]


@pytest.mark.parametrize("connector", ["tcp", "ucx", "nccl"])
async def test_ring_with_pools_on_the_device(connector: str, tmp_path: Path) -> None:
    prompts = [[(7 * i * j + j) % 4000 for j in range(1, 40 + 30 * i)] for i in range(8)]
    options = ("--device", "cuda", "--kv-cache-memory", "1GiB", "--connector", connector)
    workers = {role: worker(tmp_path, role, role, "demo", *options) for role in ("prefill", "decode", "both")}
    for role, service in workers.items():
        service.environment = {"NCCL_HOSTID": role}  # or NCCL refuses two ranks on one device

    async def ask(ring: Ring) -> list[list[int]]:
        async with RingClient(ring.url, "demo") as client:
            asked = (client.complete(p, max_tokens=32, temperature=0) for p in prompts)
            answers = await asyncio.gather(*asked)
        ring.wait_idle()
        return [answer.token_ids for answer in answers]

    groups = {"split": [workers["prefill"], workers["decode"]], "one": [workers["both"]]}
    with running(list(workers.values())), running_routers(tmp_path, "demo", groups) as rings:
        assert await ask(rings["split"]) == await ask(rings["one"])
        assert f"connector {connector}" in workers["prefill"].log.read_text()
