"""Trains the draft model: a Llama far smaller than the demo model, on the same text."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.demo_model.drafters.files import write
from scripts.demo_model.muon import Muon
from scripts.demo_model.train import CONFIG as MODEL
from scripts.demo_model.train import batches, loss_of, schedule

CONFIG: dict[str, Any] = {
    **MODEL,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
STEPS, TOKENS, PEAK = 650, 2048, 6e-3
SHARED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def train_draft(model_dir: Path, seed: int, epochs: float) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "torch_dtype": "float32"}))
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    muon = Muon(inside, decay=0.0)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    source = batches(tokenizer, TOKENS, seed)
    steps, began, losses = max(1, int(STEPS * epochs)), time.monotonic(), []
    for step in range(steps):
        rate = PEAK * schedule(step, steps)
        adam.param_groups[0]["lr"] = rate
        loss = loss_of(model, next(source))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(rate)
        adam.step()
        adam.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            recent = losses[-50:]
            mean, spent = sum(recent) / len(recent), time.monotonic() - began
            print(f"draft: step {step + 1}/{steps}  loss {mean:.3f}  {spent:.0f} s", flush=True)
    save(model, model_dir)


def save(model: LlamaForCausalLM, model_dir: Path) -> None:
    """A model directory like any other, with the demo model's own tokenizer."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write(model_dir / "draft", CONFIG, weights)
    for name in SHARED:
        shutil.copyfile(model_dir / name, model_dir / "draft" / name)
