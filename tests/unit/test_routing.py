"""The choice of experts: each family's formula, in its own words, and the kernel against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton_kernels.cpu import experts as cpu_experts
from baton_kernels.cpu import linear
from baton_kernels.routing import plainly_route, route
from baton_kernels.routing_rule import SCORES, Routing
from tests.support.covering import covering
from tests.support.threads import in_threads

TOKENS, HIDDEN, EXPERTS = 40, 24, 12
Route = Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor] | None]
ROUTES: dict[str, Route] = {"kernel": cpu_experts.route, "plain": plainly_route}


@dataclass(frozen=True)
class Family:
    """A family's router in transformers, and the rule that stands for it."""

    module: str
    router: str
    config: str
    routing: Routing
    options: Mapping[str, object] = field(default_factory=dict)
    logits_first: bool = True
    """Whether the router returns (logits, weights, experts)."""


RENORMALIZED = Routing(3, renormalize=True)
GROUPED = Routing(3, "sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2)
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
FAMILIES = {
    "mixtral": Family("mixtral", "MixtralTopKRouter", "MixtralConfig", RENORMALIZED),
    "qwen2_moe": Family("qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeConfig", Routing(3)),
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig", RENORMALIZED, {"norm_topk_prob": True}
    ),
    "deepseek_v2": Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        Routing(3, scale=2.5, groups=4, top_groups=2, group_best=1),
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "num_attention_heads": 4},
    ),
    "mistral4": Family(
        "mistral4",
        "Mistral4TopkRouter",
        "Mistral4Config",
        Routing(3, renormalize=True, scale=2.5, groups=4, top_groups=2),
        DEEPSEEK,
    ),
    "olmoe": Family("olmoe", "OlmoeTopKRouter", "OlmoeConfig", Routing(3)),
    "glm4_moe": Family("glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig", GROUPED, DEEPSEEK),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config", GROUPED, DEEPSEEK),
    "minimax_m2": Family(
        "minimax_m2", "MiniMaxM2TopKRouter", "MiniMaxM2Config", Routing(3, "sigmoid", renormalize=True)
    ),
    "hy_v3": Family(
        "hy_v3",
        "HYV3TopKRouter",
        "HYV3Config",
        Routing(3, "sigmoid", renormalize=True, scale=1.5),
        {"router_scaling_factor": 1.5},
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan_v1_moe", "HunYuanMoEV1Gate", "HunYuanMoEV1Config", RENORMALIZED, {"moe_topk": 3}
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        "Ernie4_5_MoeConfig",
        Routing(3, renormalize=True, least_sum=0.6),
        {"moe_norm_min": 0.6, "moe_k": 3},
    ),
    "gpt_oss": Family("gpt_oss", "GptOssTopKRouter", "GptOssConfig", RENORMALIZED),
    "granitemoe": Family("granitemoe", "GraniteMoeTopKRouter", "GraniteMoeConfig", RENORMALIZED),
    "llama4": Family("llama4", "Llama4Router", "Llama4TextConfig", Routing(3, "sigmoid"), logits_first=False),
    "phimoe": Family(
        "phimoe",
        "PhimoeTopKRouter",
        "PhimoeConfig",
        Routing(2, "sparsemixer", jitter=0.05),
        {"router_jitter_noise": 0.05, "num_experts_per_tok": 2},
    ),
}


def router_of(family: Family) -> nn.Module:
    """The family's router with random weights."""
    package = f"transformers.models.{family.module}"
    options = {
        "hidden_size": HIDDEN,
        "num_local_experts": EXPERTS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        **family.options,
    }
    config = getattr(import_module(f"{package}.configuration_{family.module}"), family.config)(**options)
    router = cast(
        nn.Module, getattr(import_module(f"{package}.modeling_{family.module}"), family.router)(config)
    )
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(std=0.3)
    return router.eval()


def expected(family: Family, router: nn.Module, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The experts that the router chooses, and their weights."""
    if family.logits_first:
        takes_bias = family.module in ("minimax_m2", "hy_v3")
        _, weights, experts = router(x, bias) if takes_bias else router(x)
        return experts, weights
    scores, _ = router(x)
    weights, experts = scores.topk(family.routing.top_k, dim=-1)
    return experts, weights


def bias_of(router: nn.Module) -> Tensor | None:
    """The router's own correction bias."""
    named = {**dict(router.named_parameters()), **dict(router.named_buffers())}
    return next((t.flatten() for name, t in named.items() if "correction_bias" in name), None)


def by_expert(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of the experts of each token."""
    ordered, order = experts.long().sort(-1)
    return ordered, weights.gather(-1, order)


@pytest.mark.parametrize("how", ROUTES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_router(name: str, how: str) -> None:
    torch.manual_seed(1)
    family = FAMILIES[name]
    router = router_of(family)
    x, bias = torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS) * 0.3
    with torch.no_grad():
        theirs = expected(family, router, x, bias)
        linear_of = router.wg if name == "hunyuan_v1_moe" else router
        own_bias = getattr(linear_of, "bias", None)
        logits = F.linear(x, cast(Tensor, linear_of.weight), own_bias)
        correction = bias if name in ("minimax_m2", "hy_v3") else bias_of(router)
        ours = ROUTES[how](logits, family.routing, correction)
    assert ours is not None
    assert ours[0].dtype == torch.int32 and ours[1].dtype == torch.float32
    for mine, wanted in zip(by_expert(*ours), by_expert(*theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


CASES = covering(
    {
        "tokens": [0, 1, 17, 40],
        "experts": [4, 12, 60, 132],
        "top_k": [1, 2, 4],
        "groups": [(1, 1), (2, 1), (4, 3)],
        "scores": SCORES,
        "renormalize": [False, True],
        "biased": [False, True],
        "dtype": [torch.float32, torch.bfloat16],
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_chooses_as_plain_torch_does(case: dict[str, object]) -> None:
    torch.manual_seed(0)
    experts, (groups, top_groups) = cast(int, case["experts"]), cast(tuple[int, int], case["groups"])
    top_k = min(cast(int, case["top_k"]), experts // groups * top_groups)
    scores = SCORES[SCORES.index(case["scores"])]
    routing = Routing(
        top_k,
        scores,
        renormalize=bool(case["renormalize"]),
        scale=1.5,
        groups=groups,
        top_groups=top_groups,
        group_best=1 if scores == "softmax" else 2,
        jitter=0.1,
    )
    # Each logit at a distance from others, also in bfloat16: the choice does not hang on rounding.
    tokens = cast(int, case["tokens"])
    order = (
        torch.stack([torch.randperm(experts) for _ in range(tokens)]) if tokens else torch.empty(0, experts)
    )
    logits = (order.float() - experts / 2) / (16 if experts > 16 else 2)
    logits = logits.to(cast(torch.dtype, case["dtype"]))
    bias = torch.randn(experts) * 0.2 if case["biased"] else None
    ours, theirs = route(logits, routing, bias), plainly_route(logits, routing, bias)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)
    with in_threads(3):
        again = route(logits, routing, bias)
    assert all(torch.equal(one, other) for one, other in zip(again, ours, strict=True))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("how", ROUTES)
def test_scores_that_round_to_the_same_keep_the_order_of_their_logits(scores: str, how: str) -> None:
    """Sigmoids of 30 and more are 1 in float32, and so is the largest softmax, with zeros behind it."""
    logits = torch.tensor([[30.0, 500.0, 40.0, 31.0, 200.0]])
    routing = Routing(4, SCORES[SCORES.index(scores)])
    chosen = ROUTES[how](logits, routing, None)
    assert chosen is not None
    assert chosen[0].tolist() == [[1, 4, 2, 3]]


def test_the_kernel_takes_the_first_of_equal_experts() -> None:
    chosen = cpu_experts.route(torch.zeros(2, 12), Routing(4, "sigmoid"), None)
    assert chosen is not None
    assert chosen[0].tolist() == [[0, 1, 2, 3]] * 2


def test_numbers_that_are_none_choose_different_experts_all_the_same() -> None:
    logits = torch.full((20, 12), torch.nan)
    logits[:, 3] = 1
    for routing in (Routing(5), GROUPED, Routing(2, "sparsemixer")):
        for row in route(logits, routing)[0].tolist():
            assert len(set(row)) == routing.top_k
            assert set(row) <= set(range(12))


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing(13), "top_k is 13; allowed with 12 experts: 1 to 12"),
        (Routing(0), "top_k is 0"),
        (Routing(7, groups=4, top_groups=2), "top_k is 7; allowed with 6 experts"),
        (Routing(1, groups=5), "1 of 5 groups of 12 experts"),
        (Routing(1, groups=4, top_groups=5), "5 of 4 groups"),
        (Routing(1, groups=4, group_best=3), "group_best is 3; allowed: 1, 2"),
    ],
)
def test_what_cannot_be_chosen_is_refused(routing: Routing, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        route(torch.randn(2, 12), routing)


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="for 12 experts"):
        route(torch.randn(2, 12), Routing(2), torch.randn(11))


@pytest.mark.parametrize("experts", [cpu_experts.MOST_EXPERTS, cpu_experts.MOST_EXPERTS + 1])
def test_more_experts_than_the_kernel_takes(experts: int) -> None:
    logits = torch.randn(3, experts, generator=torch.Generator().manual_seed(0))
    assert (cpu_experts.route(logits, Routing(8), None) is None) == (experts > cpu_experts.MOST_EXPERTS)
    assert torch.equal(route(logits, Routing(8))[0], plainly_route(logits, Routing(8))[0])
    many = Routing(cpu_experts.MOST_CHOSEN + 1)
    assert cpu_experts.route(logits, many, None) is None
    assert torch.equal(route(logits, many)[0], plainly_route(logits, many)[0])


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "native", lambda: None)
    logits = torch.randn(5, 12)
    assert cpu_experts.route(logits, Routing(2), None) is None
    assert torch.equal(route(logits, Routing(2))[0], plainly_route(logits, Routing(2))[0])
