"""Trains what drafts for Baton's demo model: a small draft model, Medusa heads and an EAGLE layer.

    python -m scripts.demo_model.drafters                # train all, ten minutes on one core, then check
    python -m scripts.demo_model.drafters --only medusa  # one of them
    python -m scripts.demo_model.drafters --check        # only measure those in --model

The demo model stays as it is. Everything is seeded, so the same machine and library versions give the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scripts.demo_model.drafters.check import check
from scripts.demo_model.drafters.draft import train_draft
from scripts.demo_model.drafters.eagle import train_eagle
from scripts.demo_model.drafters.medusa import train_medusa
from scripts.demo_model.drafters.states import load_states
from scripts.demo_model.train import OUT

METHODS = ("draft", "medusa", "eagle")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=OUT, help="the demo model's directory")
    parser.add_argument("--only", choices=METHODS, action="append", help="train this one; can be repeated")
    parser.add_argument("--passes", type=int, default=2, help="passes over the corpus to compute states of")
    parser.add_argument("--epochs", type=float, default=1.0, help="factor on the length of each training")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="only measure")
    parser.add_argument("--no-check", action="store_true", help="only train")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.check:
        wanted = args.only or METHODS
        if "draft" in wanted:
            train_draft(args.model, args.seed, args.epochs)
        if {"medusa", "eagle"} & set(wanted):
            states = load_states(args.model, args.passes, args.seed)
            if "medusa" in wanted:
                train_medusa(args.model, states, args.seed, args.epochs)
            if "eagle" in wanted:
                train_eagle(args.model, states, args.seed, args.epochs)
    if not args.no_check:
        check(args.model)


if __name__ == "__main__":
    main()
