"""The training loop that the heads share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from scripts.demo_model.drafters.states import Batch, States
from scripts.demo_model.muon import Muon
from scripts.demo_model.train import schedule

Loss = Callable[[Batch], tuple[Tensor, str]]
"""The loss over a batch, and what to print about it."""


def initialise(module: torch.nn.Module, seed: int) -> None:
    """Norms at 1, biases at 0, matrices at random, and all of them trainable."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
        with torch.no_grad():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


def optimise(
    name: str, module: torch.nn.Module, states: States, loss_of: Loss, epochs: float, peak: float, seed: int
) -> None:
    """``epochs`` passes over the states with Muon for matrices and AdamW for the rest."""
    muon = Muon([p for p in module.parameters() if p.dim() == 2], decay=0.0)
    adam = torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2], weight_decay=0.0)
    rng = random.Random(seed)
    steps = max(1, int(epochs * len(states.batches)))
    order: list[Batch] = []
    began = time.monotonic()
    for step in range(steps):
        if not order:
            order = rng.sample(states.batches, len(states.batches))
        rate = peak * schedule(step, steps)
        adam.param_groups[0]["lr"] = rate
        loss, note = loss_of(order.pop())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        muon.step(rate)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            spent = time.monotonic() - began
            print(f"{name}: step {step + 1}/{steps}  {note}  {spent:.0f} s", flush=True)
