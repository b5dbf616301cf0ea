"""Trains Baton's demo model from the text in `corpus/`, and checks it.

    python -m scripts.demo_model.train              # train, about half an hour on two CPU cores, then check
    python -m scripts.demo_model.train --check      # only check the model in --out
    python -m scripts.demo_model.train --steps 60 --out some/dir --no-check      # a quick, half-trained one

The model is a small Llama in the usual Hugging Face files. It learns the corpus by heart, which is its
purpose: a model small enough to ship, whose answers are known and easy to recognise in a demo or a test.
Everything is seeded, so the same machine and library versions give the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.demo_model.check import check
from scripts.demo_model.muon import Muon
from scripts.demo_model.text import Pieces, documents, load_entries, load_prose, tokenizer_text
from scripts.demo_model.tokenizer import save_tokenizer, train_tokenizer

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "services" / "baton" / "demo_model"
IGNORE = -100

# Written as it stands to config.json, in the names that every Llama loader knows.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "torch_dtype": "bfloat16",
}
GENERATION = {"do_sample": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [3, 1]}

Batch = tuple[torch.Tensor, torch.Tensor]


def encode(pieces: Pieces, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and labels of one document; what is not to be learned has the label IGNORE."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learn in pieces:
        piece = tokenizer.encode(text).ids
        ids += piece
        labels += piece if learn else [IGNORE] * len(piece)
    return ids, labels


def collate(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Pads rows on the right. Attention is causal, so padding needs no mask, only ignored labels."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORE, dtype=torch.long)
    for row, (ids, wanted) in enumerate(rows):
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(wanted)] = torch.tensor(wanted)
    return inputs, labels


def batches(tokenizer: Tokenizer, tokens: int, seed: int) -> Iterator[Batch]:
    """Endless batches of about `tokens` tokens, each of documents of similar length."""
    rng = random.Random(seed)
    entries, prose = load_entries(HERE / "corpus"), load_prose(HERE / "corpus")
    while True:
        rows = [encode(pieces, tokenizer) for pieces in documents(entries, prose, rng)]
        # Jitter keeps neighbours by length from being the same every time.
        rows.sort(key=lambda row: len(row[0]) * rng.uniform(0.9, 1.1))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            width = max(len(ids) for ids, _ in [*groups[-1], row])
            if groups[-1] and width * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(collate, groups)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean loss over the learned tokens. Logits are computed only there, which saves a third of the work."""
    inputs, labels = batch
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    learn = wanted != IGNORE
    return cross_entropy(model.lm_head(hidden[learn]), wanted[learn])


def schedule(step: int, steps: int) -> float:
    """Learning rate as a share of its peak: a short warm-up, then a cosine down to 1 %."""
    warm = max(1, steps // 25)
    if step < warm:
        return (step + 1) / warm
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(tokenizer: Tokenizer, steps: int, tokens: int, peak: float, seed: int) -> LlamaForCausalLM:
    """Trains from scratch, and prints the mean loss of the last 25 steps on the way."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "torch_dtype": "float32"}))
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    muon = Muon(inside)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    source = batches(tokenizer, tokens, seed)
    recent: list[float] = []
    start, seen = time.monotonic(), 0
    for step in range(steps):
        rate = peak * schedule(step, steps)
        adam.param_groups[0]["lr"] = rate
        batch = next(source)
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(rate)
        adam.step()
        adam.zero_grad(set_to_none=True)
        recent = [*recent[-24:], loss.item()]
        seen += batch[0].numel()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            spent = time.monotonic() - start
            print(
                f"step {step + 1}/{steps}  loss {sum(recent) / len(recent):.4f}  "
                f"{seen / spent:.0f} tokens/s  {spent:.0f} s",
                flush=True,
            )
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the model directory. The head shares the embedding's weights, so it is not stored."""
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (out / "model.safetensors").write_bytes(to_safetensors(weights, metadata={"format": "pt"}))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, out, CONFIG["max_position_embeddings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="model directory to write, or to check")
    parser.add_argument("--check", action="store_true", help="only check the model in --out")
    parser.add_argument("--no-check", action="store_true", help="only train")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    entries, prose = load_entries(HERE / "corpus"), load_prose(HERE / "corpus")
    if not args.check:
        args.out.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(tokenizer_text(entries, prose), CONFIG["vocab_size"])
        wordings = sum(len(entry.questions) for entry in entries)
        print(
            f"{len(entries)} entries, {wordings} wordings, {len(prose)} passages, "
            f"{tokenizer.get_vocab_size()} tokens in the vocabulary"
        )
        model = train(tokenizer, args.steps, args.tokens, args.peak, args.seed)
        save(model, tokenizer, args.out)
    if not args.no_check:
        check(args.out, entries)


if __name__ == "__main__":
    main()
