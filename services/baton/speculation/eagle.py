"""EAGLE (https://arxiv.org/abs/2401.15077): one decoder layer that goes on with the model's hidden states.

Row p of the layer takes the embedding of token p + 1 and the final hidden state of token p, and predicts the
final hidden state of token p + 1. The model's LM head reads token p + 2 from that, and so on: the layer
drafts autoregressively on its own predictions, with attention to the rows before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RopeConfig
from baton.models.json_fields import Fields, read_object
from baton.models.layers import MLP, Linear, RMSNorm
from baton.models.loader import fill_all
from baton.models.quantization.plain import PLAIN
from baton.models.rope import cos_and_signed_sin, inverse_frequencies
from baton.parallel.collectives import Parallel
from baton.process.options import ModelError
from baton.speculation.drafter import TokenSequence
from baton.speculation.fit import check_fit
from baton.speculation.kv_ring import KvRing
from baton_kernels.rotary import rotate

WINDOW = 256
"""Positions of each sequence that a row sees, its own included. Drafts need nearby tokens, and with a bound a
sequence takes the same memory however long it grows."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of queries [B, heads, n, dim], keys and values [B, kv_heads, n, dim] of the new rows -> [B,
heads, n, dim]."""


class EagleLayer(nn.Module):
    """Fuses token and hidden state, each behind a norm; the rest is a Llama layer, and a norm behind it."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        size, eps = config.hidden_size, config.norm_eps
        frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        # A token's embedding may be a twentieth of a hidden state in size: unless both are brought to one
        # size, the layer hardly sees which token it goes on with.
        self.embedding_norm = RMSNorm(size, eps, dtype)
        self.hidden_norm = RMSNorm(size, eps, dtype)
        self.fuse = Linear(2 * size, size, dtype)
        self.input_layernorm = RMSNorm(size, eps, dtype)
        self.qkv_proj = Linear(size, {"q_proj": query, "k_proj": key, "v_proj": key}, dtype)
        self.o_proj = Linear(query, size, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.mlp = MLP(config, dtype, Parallel.alone(config), PLAIN)
        self.norm = RMSNorm(size, eps, dtype)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """embedded (of the tokens after the rows) and hidden [B, n, hidden_size], positions [B, n] -> the
        predicted hidden states of the tokens after the rows [B, n, hidden_size]."""
        x = self.fuse(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        x = x + self._attention(self.input_layernorm(x), positions, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        predicted: Tensor = self.norm(x)
        return predicted

    def _attention(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = cos_and_signed_sin(positions.unsqueeze(-1) * self.frequencies)
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        qk = rotate(heads[:, :, : -self.kv_heads], cos.unsqueeze(2), sin.unsqueeze(2)).transpose(1, 2)
        v = heads[:, :, -self.kv_heads :].transpose(1, 2)
        out = attend(qk[:, : -self.kv_heads], qk[:, -self.kv_heads :], v)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention among the new rows alone, each to the rows before it: how the layer is trained."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def load_eagle(path: Path, target: CausalLM, device: torch.device) -> tuple[EagleLayer, ModelConfig]:
    """The layer in the directory ``path``, in the type of the model that it was trained for. ModelError (a
    ValueError) if it is not whole or not for this model."""
    config = eagle_config(path)
    check_fit(path, target, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    with torch.device(device):
        layer = EagleLayer(config, target.dtype)
    fill_all(layer, path, owner="eagle")
    return layer.eval(), config


def eagle_config(path: Path) -> ModelConfig:
    """The config of the layer: config.json of a Llama of one layer, with ``speculative_method`` "eagle"."""
    file = path / "config.json"
    fields = Fields(read_object(file), str(file))
    if fields.text("speculative_method") != "eagle":
        raise fields.error("speculative_method", '"eagle"')
    config = ModelConfig.from_dir(path)
    if config.num_layers != 1:
        raise fields.error("num_hidden_layers", "1")
    if config.architecture != "LlamaForCausalLM" or config.rope != RopeConfig(theta=config.rope.theta):
        raise ModelError(f"{file}: allowed: a LlamaForCausalLM with plain rotary positions")
    if config.qkv_bias or config.o_bias:
        raise fields.error("attention_bias", "false")
    return config


@dataclass(slots=True)
class _Seen:
    """The state that is kept of a sequence."""

    slot: int
    """The sequence's slot in the ring."""
    first: int
    """Position of the first of ``rows``. All rows seen before it are in the ring."""
    rows: Tensor
    """[n, hidden_size]: final hidden states to be computed with the next draft. The last one stays here then,
    as the next draft may come before another token."""

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)


class EagleDrafter:
    """Drafts from the hidden states that it has seen of a sequence, with KV of its own.

    The drafter keeps the last ``window`` positions of the ``capacity`` sequences that were computed last. Of
    tokens that it has not seen (the prompt of a sequence that came by handoff, or of the prefix cache) it has
    no rows: it drafts with the rows from then on.
    """

    wants_hidden = True

    def __init__(
        self, layer: EagleLayer, config: ModelConfig, target: CausalLM, capacity: int, window: int = WINDOW
    ) -> None:
        self.layer = layer
        self.target = target
        self.window = window
        device = layer.norm.weight.device
        self.ring = KvRing(capacity, config.num_kv_heads, window, config.head_dim, target.dtype, device)
        self._seen: OrderedDict[TokenSequence, _Seen] = OrderedDict()
        self._free = list(range(capacity))

    @torch.inference_mode()
    def draft(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        ready = [at for at, seq in enumerate(sequences) if limits[at] > 0 and self._is_ready(seq)]
        if not ready:
            return drafts
        tokens = self._draft([sequences[at] for at in ready], max(limits[at] for at in ready))
        for at, row in zip(ready, tokens.tolist(), strict=True):
            drafts[at] = row[: limits[at]]
        return drafts

    @torch.inference_mode()
    def observe(self, sequence: TokenSequence, first: int, hidden: Tensor) -> None:
        seen = self._seen.get(sequence) or self._enter(sequence, first, hidden[:0])
        self._seen.move_to_end(sequence)
        if first > seen.stop:  # something in between was not seen here; the waiting rows go with it
            self.ring.drop_from(seen.slot, seen.first)
            seen.first, seen.rows = first, hidden[:0]
        # Rows that a preempted sequence computes again are known.
        rows = torch.cat((seen.rows, hidden[seen.stop - first :]))[-self.window :]
        seen.first, seen.rows = max(seen.stop, first + len(hidden)) - len(rows), rows

    def forget(self, sequence: TokenSequence) -> None:
        seen = self._seen.pop(sequence, None)
        if seen is not None:
            self._free.append(seen.slot)

    @property
    def num_sequences(self) -> int:
        """The number of sequences with state."""
        return len(self._seen)

    def _enter(self, sequence: TokenSequence, first: int, none: Tensor) -> _Seen:
        if not self._free:
            _, oldest = self._seen.popitem(last=False)
            self._free.append(oldest.slot)
        slot = self._free.pop()
        self.ring.drop_from(slot, 0)
        self._seen[sequence] = _Seen(slot, first, none)
        return self._seen[sequence]

    def _is_ready(self, seq: TokenSequence) -> bool:
        seen = self._seen.get(seq)
        return seen is not None and seen.stop == seq.num_tokens - 1

    def _draft(self, sequences: list[TokenSequence], count: int) -> Tensor:
        """[B, count] tokens that may follow the last ones."""
        slots = torch.tensor([self._seen[seq].slot for seq in sequences], device=self.ring.device)
        token_ids, hidden, positions = self._rows(sequences)
        drafts: list[Tensor] = []
        while True:
            # Without a default, the closure would see the positions of a later round.
            def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor = positions) -> Tensor:
                self.ring.write(slots, at, k, v)
                return self.ring.attend(slots, at, q)

            predicted = self.layer(self.target.embed(token_ids), hidden, positions, attend)
            hidden = predicted[:, -1:]
            token_ids = self.target.logits(hidden.squeeze(1)).argmax(-1, keepdim=True)
            drafts.append(token_ids)
            if len(drafts) == count:
                return torch.cat(drafts, dim=1)
            positions = positions[:, -1:] + 1

    def _rows(self, sequences: list[TokenSequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens after [B, n], hidden states [B, n, hidden_size] and positions [B, n] of the waiting rows.
        Where a sequence has fewer than others, its last row is repeated, which writes the same again."""
        seen = [self._seen[seq] for seq in sequences]
        lengths = np.array([len(each.rows) for each in seen])
        local = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        starts = np.cumsum(lengths) - lengths
        positions = local + np.array([each.first for each in seen])[:, None]
        tokens = np.stack(
            [
                np.frombuffer(seq.token_ids, np.int64)[at + 1]
                for seq, at in zip(sequences, positions, strict=True)
            ]
        )
        device = self.ring.device
        rows = torch.from_numpy(local + starts[:, None]).to(device)
        hidden = torch.cat([each.rows for each in seen])[rows]
        for each in seen:
            # A copy: a view would keep all rows.
            each.first, each.rows = each.stop - 1, each.rows[-1:].clone()
        return torch.from_numpy(tokens).to(device), hidden, torch.from_numpy(positions).to(device)
