"""Trains the EAGLE layer: to predict the model's next hidden state, and the token that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.config import ModelConfig
from baton.speculation.eagle import EagleLayer, causal
from scripts.demo_model.drafters.files import write
from scripts.demo_model.drafters.loop import initialise, optimise
from scripts.demo_model.drafters.states import Batch, States
from scripts.demo_model.train import CONFIG as MODEL

CONFIG: dict[str, Any] = {
    **MODEL,
    "speculative_method": "eagle",
    "num_hidden_layers": 1,
    "intermediate_size": 256,
}
NOISE = 0.3
"""Standard deviation of what is added to the hidden states that go in, as a share of theirs: when it drafts,
the layer goes on with its own predictions, which are off by as much (section 4.3 of the paper has noise
for the same reason)."""
REGRESSION = 1.0
"""Weight of the distance between hidden states beside the cross-entropy."""
EPOCHS, PEAK = 4, 1e-2


def train_eagle(model_dir: Path, states: States, seed: int, epochs: float) -> None:
    layer = EagleLayer(ModelConfig.from_dict(CONFIG, where="eagle"), torch.float32)
    initialise(layer, seed)
    generator = torch.Generator().manual_seed(seed)

    def loss_of(batch: Batch) -> tuple[Tensor, str]:
        given, wanted = batch.hidden[:, :-1], batch.hidden[:, 1:]
        noise = torch.empty_like(given).normal_(std=NOISE * float(given.std()), generator=generator)
        embedded = F.embedding(batch.ids[:, 1:], states.embedding)
        positions = torch.arange(given.shape[1]).expand(given.shape[:2])
        predicted = layer(embedded, given + noise, positions, causal)
        # Row p predicts the state of token p + 1, from which token p + 2 is read.
        learned = batch.learned[:, 2:] & batch.learned[:, 1:-1]
        predicted, wanted, tokens = predicted[:, :-1][learned], wanted[:, :-1][learned], batch.ids[:, 2:][learned]
        logits = F.linear(predicted, states.embedding)
        distance = F.smooth_l1_loss(predicted, wanted)
        entropy = F.cross_entropy(logits, tokens)
        right = (logits.argmax(-1) == tokens).float().mean()
        note = f"distance {distance.item():.3f}  entropy {entropy.item():.3f}  right {right:.1%}"
        return REGRESSION * distance + entropy, note

    optimise("eagle", layer, states, loss_of, EPOCHS * epochs, PEAK, seed)
    write(model_dir / "eagle", CONFIG, layer.state_dict())
