"""Medusa (https://arxiv.org/abs/2401.10774): heads that look further ahead from one hidden state.

The LM head reads the next token from the final hidden state of a token. Head i = 1, 2, ... reads the i-th
token after that from the same state. As drafts that is a chain: the likeliest token of each head. Unlike the
paper's, the heads share the model's LM head, so that a head is a few small matrices and no vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.json_fields import Fields, read_object
from baton.models.layers import Linear
from baton.models.loader import fill_all
from baton.speculation.drafter import TokenSequence
from baton.speculation.fit import check_fit


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """The config.json of a set of heads."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int
    """Residual blocks in each head."""

    @classmethod
    def from_dir(cls, path: Path) -> MedusaConfig:
        """Reads config.json. ModelError names the file, the field, its value and what is allowed."""
        file = path / "config.json"
        fields = Fields(read_object(file), str(file))
        if fields.text("speculative_method") != "medusa":
            raise fields.error("speculative_method", '"medusa"')
        return cls(
            hidden_size=fields.integer("hidden_size"),
            vocab_size=fields.integer("vocab_size"),
            num_heads=fields.integer("medusa_num_heads"),
            num_layers=fields.integer("medusa_num_layers", 1),
        )


class ResidualBlock(nn.Module):
    """A block that computes x + silu(W x + b)."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear(size, size, dtype, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Residual blocks, then a projection: alone, the blocks could only add to the state, which stands for the
    next token already."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.Sequential(*(ResidualBlock(size, dtype) for _ in range(config.num_layers)))
        self.out = Linear(size, size, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape."""
        ahead: Tensor = self.out(self.blocks(hidden))
        return ahead


class MedusaHeads(nn.Module):
    """Final hidden states [R, hidden_size] -> the LM head's input for each token ahead, [R, heads,
    hidden_size]."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(config, dtype) for _ in range(config.num_heads))

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """``count``: the number of leading heads to compute; None: all."""
        return torch.stack([head(hidden) for head in self.heads[:count]], dim=1)


def load_medusa(path: Path, target: CausalLM, device: torch.device) -> MedusaHeads:
    """The heads in the directory ``path``, in the type of the model that they were trained for. ModelError (a
    ValueError) if they are not whole or not for this model."""
    config = MedusaConfig.from_dir(path)
    check_fit(path, target, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    with torch.device(device):
        heads = MedusaHeads(config, target.dtype)
    fill_all(heads, path, owner="medusa")
    return heads.eval()


class _Seen(NamedTuple):
    """The final hidden state [hidden_size] of the last of ``length`` leading tokens."""

    length: int
    hidden: Tensor


class MedusaDrafter:
    """Drafts from the final hidden state of the last token that was computed and kept.

    The drafter keeps that state of the ``capacity`` sequences that were computed last, and needs nothing
    else: a sequence that it has not seen (it just came by handoff) gets drafts from its next step on.
    """

    wants_hidden = True

    def __init__(self, heads: MedusaHeads, target: CausalLM, capacity: int) -> None:
        self.heads = heads
        self.target = target
        self.capacity = capacity
        self._seen: OrderedDict[TokenSequence, _Seen] = OrderedDict()

    @torch.inference_mode()
    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        ready = [at for at, seq in enumerate(sequences) if limits[at] > 0 and self._is_ready(seq)]
        if not ready:
            return drafts
        hidden = torch.stack([self._seen[sequences[at]].hidden for at in ready])
        ahead = self.heads(hidden, max(limits[at] for at in ready))
        tokens = self.target.logits(ahead.flatten(0, 1)).argmax(-1).view(ahead.shape[:2])
        for at, row in zip(ready, tokens.tolist(), strict=True):
            drafts[at] = row[: limits[at]]
        return drafts

    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        # A copy: a view would keep the states of the whole step.
        self._seen[sequence] = _Seen(first + len(hidden), hidden[-1].clone())
        self._seen.move_to_end(sequence)
        if len(self._seen) > self.capacity:
            self._seen.popitem(last=False)

    def forget(self, sequence: TokenSequence) -> None:
        self._seen.pop(sequence, None)

    @property
    def num_sequences(self) -> int:
        """The number of sequences with state."""
        return len(self._seen)

    def _is_ready(self, seq: TokenSequence) -> bool:
        seen = self._seen.get(seq)
        return seen is not None and seen.length == seq.num_tokens - 1
