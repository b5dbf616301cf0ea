"""The demo model's final hidden states over its corpus, computed once."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.demo_model.text import documents, load_entries, load_prose
from scripts.demo_model.train import HERE, IGNORE, encode

PADDED_TOKENS = 2048
"""In a batch, padding included."""


@dataclass(frozen=True)
class Batch:
    """Documents of similar length, padded on the right."""

    ids: Tensor
    """[B, T]"""
    learned: Tensor
    """[B, T] bool: tokens that the assistant or a text says, and that are therefore to be drafted."""
    hidden: Tensor
    """[B, T, hidden_size]: the final hidden states."""


@dataclass(frozen=True)
class States:
    """What the heads are trained on."""

    batches: list[Batch]
    embedding: Tensor
    """[vocab_size, hidden_size]; the LM head too."""


@torch.no_grad()
def load_states(model_dir: Path, passes: int, seed: int) -> States:
    """Runs the frozen model over ``passes`` passes of the corpus, each in other wordings."""
    began = time.monotonic()
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    entries, prose = load_entries(HERE / "corpus"), load_prose(HERE / "corpus")
    rng = random.Random(seed)
    rows = [encode(doc, tokenizer) for _ in range(passes) for doc in documents(entries, prose, rng)]
    rows.sort(key=lambda row: len(row[0]))
    batches, at = [], len(rows)
    while at:
        size = max(1, PADDED_TOKENS // len(rows[at - 1][0]))
        batches.append(_batch(model, rows[max(0, at - size) : at]))
        at = max(0, at - size)
    rng.shuffle(batches)
    tokens = sum(int(batch.learned.sum()) for batch in batches)
    print(
        f"states of {len(rows)} documents, {tokens} learned tokens, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return States(batches, model.state_dict()["model.embed_tokens.weight"])


def _batch(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (tokens, labels) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        learned[row, : len(labels)] = torch.tensor(labels) != IGNORE
    return Batch(ids, learned, model.model(input_ids=ids, use_cache=False).last_hidden_state)
