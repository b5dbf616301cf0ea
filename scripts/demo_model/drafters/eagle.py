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
UNROLL = 3
"""Rounds in which the layer goes on with its own predictions, as it does when it drafts (training-time test,
https://arxiv.org/abs/2503.01840, with plain attention among the rows of a round)."""
REGRESSION = 0.5
"""Weight of the distance between hidden states beside the cross-entropy."""
EPOCHS, PEAK = 2.5, 2e-2


def train_eagle(model_dir: Path, states: States, seed: int, epochs: float) -> None:
    layer = EagleLayer(ModelConfig.from_dict(CONFIG, where="eagle"), torch.float32)
    initialise(layer, seed)

    def loss_of(batch: Batch) -> tuple[Tensor, str]:
        total, rates = torch.zeros(()), []
        given = hidden = batch.hidden[:, :-1]
        embedded = F.embedding(batch.ids[:, 1:], states.embedding)
        positions = torch.arange(given.shape[1]).expand(given.shape[:2])
        # Row p predicts the state of token p + 1, from which token p + 2 is read.
        learned = batch.learned[:, 2:] & batch.learned[:, 1:-1]
        wanted, tokens = batch.hidden[:, 1:-1][learned], batch.ids[:, 2:][learned]
        for _ in range(UNROLL):
            predicted = layer(embedded, given, positions, causal)
            given = torch.cat((hidden[:, :1], predicted[:, :-1]), dim=1)
            logits = F.linear(predicted[:, :-1][learned], states.embedding)
            total = total + F.cross_entropy(logits, tokens)
            total = total + REGRESSION * F.smooth_l1_loss(predicted[:, :-1][learned], wanted)
            rates.append(f"{(logits.argmax(-1) == tokens).float().mean():.1%}")
        return total, f"loss {total.item():.3f}  right {' '.join(rates)}"

    optimise("eagle", layer, states, loss_of, EPOCHS * epochs, PEAK, seed)
    write(model_dir / "eagle", CONFIG, layer.state_dict())
