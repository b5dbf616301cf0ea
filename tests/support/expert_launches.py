"""The launches of a mixture's experts on CUDA, without a device: which of them would compile a kernel.

    python -m tests.support.expert_launches TOKENS

TOKENS: a list of numbers of tokens, as JSON. Experts are warmed up as on a device, and multiplied for each of
these, with tensors anywhere in memory. Prints a line of JSON: the launches after the warm-up, what these
would have compiled, and how often the warm-up compiled each kernel.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

from baton_kernels.cuda.expert_shapes import ExpertShape
from baton_kernels.cuda.experts import multiply, warm_up
from baton_kernels.cuda.routing import route
from loadtest.mixtures import MIXTURES
from tests.support.serving_launches import DEVICE, recording


def main() -> None:
    counts: list[int] = json.loads(sys.argv[1])
    mixture = MIXTURES["gpt-oss-20b"]
    tensors = mixture.tensors(torch.bfloat16, 2, torch.device("cpu"))
    shape = ExpertShape.of(tensors, DEVICE)
    top_k = mixture.routing.top_k
    most = max(counts) + 1
    x = torch.zeros(most, mixture.hidden, dtype=torch.bfloat16)
    chosen = torch.zeros(most, top_k, dtype=torch.int32)
    weights = torch.zeros(most, top_k)
    logits = torch.zeros(most, mixture.experts, dtype=torch.bfloat16)
    with recording() as recorder:
        warm_up(tensors, top_k, False, shape)
        route(logits, mixture.routing)
        warm, launches = set(recorder.compiled), recorder.launches
        for number, tokens in enumerate(counts):
            own = slice(number % 2, number % 2 + tokens)
            route(logits[own], mixture.routing)
            multiply(x[own], chosen[own], weights[own], tensors, False, shape)
    told = {
        "late": sorted(recorder.compiled - warm),
        "launches": recorder.launches - launches,
        "builds": Counter(key.split()[0] for key in warm),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
