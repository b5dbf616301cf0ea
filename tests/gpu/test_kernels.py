"""The Triton kernels on a device, against the float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.logits import LogitRules, Row, adjust, allowed_words
from baton.engine.sampling.sampler import choose
from baton_kernels import rows
from baton_kernels.activation import SILU, Activation
from baton_kernels.attention import AttentionPlan, paged_attention, rotate_and_store, write_kv
from baton_kernels.blocks import copy_blocks
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import loop_over_experts
from baton_kernels.latent import LatentPlan
from baton_kernels.norm import Norm
from baton_kernels.reference import (
    reference_attention,
    reference_expanded_attention,
    reference_latent_attention,
    reference_route,
    reference_write_kv,
)
from baton_kernels.rotary import HeadNorm
from baton_kernels.routing import Routing, Scores
from baton_kernels.window import ChunkedWindow
from loadtest.mixtures import Mixture
from tests.support.expert_cases import TOLERANCE as EXPERTS_TOLERANCE
from tests.support.latent_steps import LAYER, LatentCase, step_of
from tests.support.paged_steps import TOLERANCE, Case, lay_out, moved, sinks_of
from tests.support.sampling_cases import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4, 8])
    return Case(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 5, 8, 16]),
        kv_heads=kv_heads,
        head_dim=rng.choice([64, 96, 128, 256]),
        block_size=rng.choice([16, 32, 64]),
        window=rng.choice([None, rng.randint(1, 2000), ChunkedWindow(rng.randint(1, 2000))]),
        decode=tuple(rng.randint(1, 4000) for _ in range(rng.choice([0, 1, 5, 60]))),
        chunks=tuple((rng.choice([0, rng.randint(0, 3000)]), rng.randint(1, 300)) for _ in range(3)),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        softcap=rng.choice([None, None, 0.5, 20.0]),
        has_sinks=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(60))
def test_attention(seed: int) -> None:
    torch.manual_seed(seed)
    case = random_case(seed)
    pool, batch = moved(*lay_out(case), CUDA)
    tokens = batch.positions.numel()
    fused = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim, device=CUDA).to(case.dtype)
    q, k, v = torch.split(fused, [case.heads, case.kv_heads, case.kv_heads], dim=1)
    plan = AttentionPlan.build(batch, pool, {case.window}, case.heads)
    expected_pool = pool.clone()
    reference_write_kv(expected_pool, 1, k, v, batch)
    write_kv(pool, 1, k, v, plan)
    assert torch.equal(pool, expected_pool)
    sinks = sinks_of(case)
    how: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    how["sinks"] = None if sinks is None else sinks.to(CUDA)
    out = paged_attention(pool, 1, q, plan, **how)
    expected = reference_attention(pool, 1, q, batch, **how)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


def test_a_captured_decode_step_serves_other_lengths() -> None:
    torch.manual_seed(0)
    case = Case(8, 2, 128, 64, None, (3000, 17, 1, 900), (), torch.bfloat16)
    pool, batch = moved(*lay_out(case), CUDA)
    q = torch.randn(4, 8, 128, device=CUDA).bfloat16()

    def step() -> torch.Tensor:
        plan = AttentionPlan.build(batch, pool, {None}, case.heads)
        return paged_attention(pool, 1, q, plan, scale=0.1, window=None)

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for contexts in ((3000, 17, 1, 900), (1, 16, 1, 899), (2999, 1, 1, 1)):
        batch.decode_contexts.copy_(torch.tensor(contexts))
        graph.replay()
        expected = reference_attention(pool, 1, q, batch, scale=0.1, window=None)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)


NOBODY = Case(1, 1, 64, 64, None, (1,), ())
LATENT_SIZES = ((128, 576, 512), (16, 576, 512), (20, 576, 512), (40, 288, 256), (32, 320, 256), (4, 40, 30))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "width", "value_dim"), LATENT_SIZES)
@pytest.mark.parametrize("queries", [1, 3])
def test_absorbed_latents(queries: int, heads: int, width: int, value_dim: int, dtype: torch.dtype) -> None:
    """Slots of nobody are NaN. A second launch finds what the first has left."""
    torch.manual_seed(queries)
    chunks = ((0, 5), (31, 40), (2000, 3))
    case = LatentCase(heads, width, value_dim, 64, (3, 64, 65, 2100), chunks, dtype, queries)
    step = step_of(case)
    view, batch = moved(step.view, step.batch, CUDA)
    plan = LatentPlan.build(batch, view, heads)
    how: dict[str, Any] = {"scale": case.scale, "value_dim": value_dim}
    q = step.q.to(CUDA)
    out = plan.attend(view, LAYER, q, **how)
    expected = reference_latent_attention(view, LAYER, q, batch, **how)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(plan.attend(view, LAYER, q, **how), out)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 20), (96, 64), (128, 128), (192, 128), (256, 256)])
def test_expanded_latents(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    view, batch = moved(torch.zeros(2, 1, 1, 1, 64, 64, dtype=dtype), lay_out(NOBODY)[1], CUDA)
    plan = LatentPlan.build(batch, view, 3)
    for length, context in ((1, 1), (140, 140), (40, 700)):
        q, k = (torch.randn(tokens, 3, dim, device=CUDA).to(dtype) for tokens in (length, context))
        v = torch.randn(context, 3, 16 + value_dim, device=CUDA).to(dtype)[..., 16:]
        out = plan.attend_expanded(q, k, v, scale=dim**-0.5)
        expected = reference_expanded_attention(q, k, v, scale=dim**-0.5)
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_latents_go_to_their_slots_and_come_back() -> None:
    torch.manual_seed(0)
    step = step_of(LatentCase(4, 576, 512, 64, (40, 3), ((100, 22),), torch.bfloat16))
    view, batch = moved(step.view, step.batch, CUDA)
    plan = LatentPlan.build(batch, view, 4)
    stored = torch.full_like(view, torch.nan)
    plan.store(stored, LAYER, step.latents.to(CUDA))
    own = stored[batch.slot_blocks, 0, LAYER, 0, batch.slot_offsets]
    assert torch.equal(own.cpu(), step.latents)
    assert int(stored.isfinite().sum()) == step.latents.numel()
    gathered = plan.gather(view, LAYER, batch.chunks[0])
    assert torch.equal(gathered[100:].cpu(), step.latents[2:])
    assert gathered.isfinite().all()


def test_captured_latents_serve_other_lengths() -> None:
    torch.manual_seed(0)
    step = step_of(LatentCase(16, 576, 512, 64, (3000, 17, 1, 900), (), torch.bfloat16))
    view, batch = moved(step.view, step.batch, CUDA)
    q = step.q.to(CUDA)

    def attended() -> torch.Tensor:
        plan = LatentPlan.build(batch, view, 16)
        return plan.attend(view, LAYER, q, scale=0.05, value_dim=512)

    for _ in range(2):
        attended()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attended()
    for contexts in ((3000, 17, 1, 900), (1, 16, 1, 899), (2999, 0, 1, 1)):
        batch.decode_contexts.copy_(torch.tensor(contexts))
        graph.replay()
        expected = reference_latent_attention(view, LAYER, q, batch, scale=0.05, value_dim=512)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate_up = torch.randn(33, 4096).to(dtype), torch.randn(33, 8192).to(dtype)
    weight, residual = torch.randn(4096).to(dtype), torch.randn(33, 4096)
    kept = residual.to(CUDA)
    there = Norm(weight.to(CUDA), 1e-5)
    normed = rows.add_norm(x.to(CUDA), kept, there, dtype).cpu()
    activated = rows.gated_product(gate_up.to(CUDA), SILU).cpu()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(activated, rows.gated_product(gate_up, SILU), rtol=tolerance, atol=tolerance)
    expected = rows.add_norm(x, residual, Norm(weight, 1e-5), dtype)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kept.cpu(), residual)


@pytest.mark.parametrize("vocab", [320, 32000, 128256, 151936])
def test_draws(vocab: int) -> None:
    drawn = Rows.random(vocab, 64, vocab)
    expected = drawn.expected()
    tokens = choose(drawn.logits.to(CUDA), drawn.params, drawn.positions)
    assert tokens.device.type == "cuda"
    sure = [at for at, token in enumerate(expected) if token is not None]
    assert len(sure) > 45
    assert [int(tokens[at]) for at in sure] == [expected[at] for at in sure]


def test_rules_and_masks() -> None:
    rng = random.Random(0)
    vocab = 128256
    logits = torch.randn(33, vocab)
    chosen = []
    for at in rng.sample(range(33), 20):
        params = ResolvedSampling(
            max_tokens=1,
            logit_bias=tuple((token, rng.uniform(-9, 9)) for token in rng.sample(range(vocab), 1000)),
            bad_word_ids=((5,), (77,)),
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            presence_penalty=0.4,
        )
        if at % 3 == 0:
            params = replace(params, allowed_token_ids=tuple(rng.sample(range(vocab), 3000)))
        tokens = [rng.randrange(vocab) for _ in range(2000)]
        chosen.append((at, params, tokens))

    def rules() -> list[Row]:
        return [Row(at, LogitRules(p, tokens[:500], frozenset()), tokens) for at, p, tokens in chosen]

    words = torch.from_numpy(allowed_words(torch.randperm(vocab)[:90000].numpy(), vocab))[None]
    results = []
    for device in ("cpu", "cuda"):
        out = logits.to(device)
        rows.bar_tokens(out, torch.tensor([4], device=device), words.to(device))
        adjust(out, rules())
        results.append(out.cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("to_host", [True, False])
def test_blocks_to_and_from_pinned_memory(to_host: bool) -> None:
    pool = torch.randn(40, 2, 3, 2, 16, 64, device=CUDA).bfloat16()
    slots = torch.randn(50, 2, 3, 2, 16, 64).bfloat16().pin_memory()
    target, source = (slots, pool) if to_host else (pool, slots)
    ids = torch.stack([torch.randperm(40)[:30], torch.randperm(40)[:30]])
    expected = target.cpu().clone()
    expected[ids[0]] = source.cpu()[ids[1]]
    moved_ids = ids.to(CUDA)
    copy_blocks(target, moved_ids[0], source, moved_ids[1])
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rotate_and_store(dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    pool, batch = lay_out(Case(8, 2, 128, 64, None, (40, 3, 129), ((0, 5), (31, 64)), dtype))
    tokens = batch.positions.numel()
    qkv = torch.randn(tokens, 12, 128).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, 128)
    of_q, of_k = torch.randn(2, 128).to(dtype)
    results = []
    for device in (torch.device("cpu"), CUDA):
        own, step = moved(pool.clone(), batch, device)
        plan = AttentionPlan.build(step, own, {None}, 8)
        norm = HeadNorm(of_q.to(device), of_k.to(device), 1e-5) if normed else None
        angles = {"cos": cos.to(device), "sin": sin.to(device)}
        q = rotate_and_store(own, 1, qkv.to(device), plan, **angles, norm=norm)
        results.append((q.cpu(), own.cpu()))
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(EXPERTS_TOLERANCE), ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("tokens", [1, 7, 60, 200, 1000])
def test_experts(tokens: int, biased: bool, dtype: torch.dtype) -> None:
    from baton_kernels.cuda.experts import multiply

    torch.manual_seed(tokens)
    routing = Routing(4, renormalize=True)
    activation = Activation("clamped_swiglu", 7.0) if biased else SILU
    mixture = Mixture(576, 320, 32, routing, activation, biased)
    step = mixture.step(tokens, dtype, CUDA)
    out = multiply(*step, weighs_input=False)
    assert torch.equal(out, multiply(*step, weighs_input=False))
    exact = mixture.tensors(torch.float64, 1, CUDA)
    for wide, given in zip(numbers_of(exact), numbers_of(step[3]), strict=True):
        wide.copy_(given)
    expected = loop_over_experts(step[0].double(), *step[1:3], exact, weighs_input=False)
    tolerance = EXPERTS_TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def numbers_of(tensors: ExpertTensors) -> list[torch.Tensor]:
    every = (tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.down_bias)
    return [tensor for tensor in every if tensor is not None]


@pytest.mark.parametrize("tokens", [3, 40])
def test_captured_experts_serve_another_routing(tokens: int) -> None:
    from baton_kernels.cuda import experts, routing

    torch.manual_seed(0)
    mixture = Mixture(256, 128, 16, Routing(2, renormalize=True))
    x, _, _, tensors = mixture.step(tokens, torch.bfloat16, CUDA)
    logits = torch.randn(tokens, 16, device=CUDA)

    def step() -> tuple[torch.Tensor, ...]:
        chosen, weights = routing.route(logits, mixture.routing)
        return experts.multiply(x, chosen, weights, tensors, weighs_input=False), chosen, weights

    experts.warm_up(tensors, 2, weighs_input=False)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, chosen, weights = step()
    for favourite in (0, 15):
        logits.normal_()[:, favourite] = 20
        graph.replay()
        assert (chosen[:, 0] == favourite).all()
        expected = loop_over_experts(x, chosen, weights, tensors, weighs_input=False)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sparsemixer"])
@pytest.mark.parametrize(("count", "groups"), [(8, 1), (60, 1), (256, 8), (1024, 1)])
def test_experts_are_chosen(count: int, groups: int, scores: Scores) -> None:
    from baton_kernels.cuda.routing import route

    torch.manual_seed(count)
    rule = Routing(6, scores, True, 2.5, groups=groups, top_groups=groups // 2 or 1, jitter=0.01)
    logits, bias = torch.randn(500, count), torch.rand(count)
    chosen, weights = route(logits.to(CUDA), rule, bias.to(CUDA))
    expected, exact = reference_route(logits, rule, bias)
    # Numbers that float32 rounds alike may be taken in another order.
    same = torch.tensor(expected) == chosen.cpu()
    assert same.float().mean() > 0.999
    torch.testing.assert_close(weights.cpu().double(), exact, rtol=1e-4, atol=1e-5)
