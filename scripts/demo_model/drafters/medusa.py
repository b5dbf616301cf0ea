"""Trains the Medusa heads: each by cross-entropy with the token that it looks ahead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.speculation.medusa import MedusaConfig, MedusaHeads
from scripts.demo_model.drafters.files import write
from scripts.demo_model.drafters.loop import initialise, optimise
from scripts.demo_model.drafters.states import Batch, States

CONFIG: dict[str, Any] = {
    "speculative_method": "medusa",
    "hidden_size": 256,
    "vocab_size": 4096,
    "medusa_num_heads": 3,
    "medusa_num_layers": 1,
    "torch_dtype": "bfloat16",
}
EPOCHS, PEAK = 3, 4e-2


def train_medusa(model_dir: Path, states: States, seed: int, epochs: float) -> None:
    config = MedusaConfig(256, 4096, CONFIG["medusa_num_heads"], CONFIG["medusa_num_layers"])
    heads = MedusaHeads(config, torch.float32)
    initialise(heads, seed)

    def loss_of(batch: Batch) -> tuple[Tensor, str]:
        losses, rates = [], []
        for ahead, head in enumerate(heads.heads, start=1):
            # The LM head reads token t + 1 from the state of token t, head `ahead` the one so far after it.
            learned = batch.learned[:, 1 + ahead :] & batch.learned[:, 1:-ahead]
            wanted = batch.ids[:, 1 + ahead :][learned]
            logits = F.linear(head(batch.hidden[:, : -1 - ahead][learned]), states.embedding)
            losses.append(F.cross_entropy(logits, wanted))
            rates.append(f"{(logits.argmax(-1) == wanted).float().mean():.1%}")
        return torch.stack(
            losses
        ).sum(), f"loss {sum(loss.item() for loss in losses):.3f}  right {' '.join(rates)}"

    optimise("medusa", heads, states, loss_of, EPOCHS * epochs, PEAK, seed)
    write(model_dir / "medusa", CONFIG, heads.state_dict())
