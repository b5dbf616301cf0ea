"""The rules by which mixtures choose experts. Imports no torch: a model's config is read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scores = Literal["softmax", "sigmoid", "sparsemixer"]
SCORES: tuple[Scores, ...] = get_args(Scores)


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a family chooses experts and weighs them.

    Scores are the softmax or the sigmoid of the logits. A bias, where the checkpoint has one, is added to
    them for the choice alone. With groups, only the ``top_groups`` groups of the largest sums of their
    ``group_best`` best scores are chosen from. Choosing by logits and a softmax over the chosen (gpt-oss,
    Granite) is the softmax over all, renormalized.
    """

    top_k: int
    scores: Scores = "softmax"
    renormalize: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    least_sum: float = 1e-20
    """The sum by which they are divided at least."""
    scale: float = 1.0
    """A factor of the weights, after renormalizing."""
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    """Best scores of a group whose sum stands for it: 1 or 2."""
    jitter: float = 0.0
    """sparsemixer (Phi-3.5-MoE) only: twice this share below the best logit, an expert is left out of the
    softmax that gives the weight."""
    weighs_input: bool = False
    """Whether weights multiply an expert's input (Llama 4), not its output."""

    def check(self, experts: int) -> None:
        """Checks that ``top_k`` of so many experts can be chosen. ValueError if not."""
        if experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups of {experts} experts")
        if self.group_best not in (1, 2):
            raise ValueError(f"group_best is {self.group_best}; allowed: 1, 2")
        allowed = experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= allowed:
            raise ValueError(f"top_k is {self.top_k}; allowed with {allowed} experts: 1 to {allowed}")
