"""Measures what drafts for the demo model: how many tokens a step of the demo model yields with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.speculation.config import Method
from baton.text.tokenizer import Tokenizer
from scripts.demo_model.text import chat, load_entries
from scripts.demo_model.train import HERE

DRAFTERS: tuple[tuple[Method, int], ...] = (
    ("draft", 3),
    ("draft", 5),
    ("medusa", 3),
    ("eagle", 3),
    ("eagle", 5),
)
"""With the most tokens that are drafted for a step."""
MAX_TOKENS = 120


class Measured(NamedTuple):
    answers: list[list[int]]
    length: float
    """Mean accepted length: tokens per verification, the one behind the drafts included."""
    drafting_ms: float
    """For each verification."""


def check(model_dir: Path) -> None:
    """Prints a table. Fails if a drafter changes an answer."""
    entries = load_entries(HERE / "corpus")
    known = [entry.questions[0] for entry in entries[::8]]
    unseen = [question for entry in entries for question in entry.held_out]
    plain = {temperature: measure(model_dir, "none", 1, known, temperature) for temperature in (0.0, 1.0)}
    print(f"mean accepted length of {len(known)} answers to known questions, of {len(unseen)} to held-out")
    print("wordings, and of those to the known questions drawn at temperature 1")
    print("method  drafts    MB  known  held-out  drawn  ms/draft")
    for method, drafts in DRAFTERS:
        greedy, drawn = (measure(model_dir, method, drafts, known, at) for at in plain)
        for temperature, answered in zip(plain, (greedy, drawn), strict=True):
            assert answered.answers == plain[temperature].answers, f"{method} changes answers"
        other = measure(model_dir, method, drafts, unseen, 0.0)
        size = sum(file.stat().st_size for file in (model_dir / method).iterdir()) / 1e6
        print(
            f"{method:7} {drafts:6}  {size:4.2f}  {greedy.length:5.2f}  {other.length:8.2f}"
            f"  {drawn.length:5.2f}  {greedy.drafting_ms:8.1f}",
            flush=True,
        )


def measure(
    model_dir: Path, method: Method, drafts: int, questions: Iterable[str], temperature: float
) -> Measured:
    """The answers to the questions, eight at a time, in float32."""
    engine = Engine.from_config(
        EngineConfig(
            model=model_dir,
            dtype="float32",
            num_blocks=256,
            max_num_seqs=8,
            speculative_method=method,
            num_speculative_tokens=drafts,
        )
    )
    tokenizer = Tokenizer.from_dir(model_dir)
    sequences = []
    for seed, question in enumerate(questions):
        params = ResolvedSampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed)
        prompt = tokenizer.encode(chat([(question, "")])[0][0])
        sequences.append(Sequence(str(seed), 1, prompt, params))
        engine.add(sequences[-1])
    while engine.has_work:
        engine.step()
    stats = engine.stats().speculation
    steps = max(1, stats.verifications)
    answers = [list(seq.output_ids) for seq in sequences]
    return Measured(answers, 1 + stats.accepted_tokens / steps, 1000 * stats.drafting_seconds / steps)
