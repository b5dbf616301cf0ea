"""Asks the demo model its questions, and counts how often the answer is right."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from scripts.demo_model.text import Entry, chat

MUST = ("What is Baton?", "What is prefill?", "What is paged attention?", "Why split prefill and decode?")
Turns = list[tuple[str, str]]  # (question, answer)
ENDLESS = " [does not end]"
PLAIN = (
    "Paged attention is",
    "The KV cache holds",
    "Baton serves",
    "Continuous batching",
    "What is prefill?",
)
TEXTS = (
    "plain",
    " two  spaces\n\tand a tab",
    "naïve café, 東京, مرحبا, 👩‍🚀🏳️‍🌈",
    "\x00\x7f\ufeff\u2028",
    "<|im_end|>x",
)


def check(model_dir: Path, entries: list[Entry]) -> None:
    """Prints sample answers and the share of right ones; fails if the model is not usable."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    check_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    known = {question: entry.answer for entry in entries for question in entry.questions}
    typed = [(entry.questions[0], entry.answer) for entry in entries]
    # As a reader in a hurry types the last wording, which no template made.
    hurried = [(entry.questions[-1].lower().rstrip("?.!"), entry.answer) for entry in entries]
    unseen = [(question, entry.answer) for entry in entries for question in entry.held_out]
    assert not known.keys() & {question for question, _ in unseen}
    recall(model, tokenizer, list(known.items()))
    score(model, tokenizer, "trained wordings", typed[::4])
    score(model, tokenizer, "trained wordings, lower case, no mark", hurried[::4])
    score(model, tokenizer, "held-out wordings", unseen, show=len(unseen))
    score(model, tokenizer, "third question of a chat", typed[::4], show=3, before=typed[1:3])
    for prompt in PLAIN:
        print(f"  {prompt}|{complete(model, tokenizer, [prompt])[0]}")
    rounded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    score(rounded, tokenizer, "trained wordings in bfloat16", typed[::8])
    for question in MUST:
        for version in (model, rounded):
            answer = reply(version, tokenizer, [question])[0]
            assert answer == known[question], f"{question} in {version.dtype}: {answer}"
    print("the four questions that must be right are right, in float32 and bfloat16")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer gives back any text, and its template gives the form used in training."""
    for text in (*TEXTS, *map(chr, range(0x300)), *map(chr, range(0x4E00, 0x4F00))):
        assert tokenizer.decode(tokenizer.encode(text)) == text, repr(text)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    wanted = "".join(text for text, _ in chat([("Hi", "|")], "Be brief.")).partition("|<|im_end|>")[0]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == wanted


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    pairs: Turns,
    show: int = 10,
    before: Turns | None = None,
) -> None:
    """Prints how many greedy answers are exact, and how many nearly so, and shows `show` of them."""
    answers: list[str] = []
    for at in range(0, len(pairs), 32):
        answers += reply(model, tokenizer, [question for question, _ in pairs[at : at + 32]], before)
    ratios = [
        SequenceMatcher(None, got, want, autojunk=False).ratio()
        for got, (_, want) in zip(answers, pairs, strict=True)
    ]
    exact, near = (sum(ratio >= limit for ratio in ratios) / len(pairs) for limit in (1, 0.8))
    endless = sum(answer.endswith(ENDLESS) for answer in answers)
    print(f"{name}: {len(pairs)} asked, {exact:.1%} exact, {near:.1%} exact or near, {endless} do not end")
    for at in range(0, len(pairs), max(1, len(pairs) // show)):
        print(f"  {'right' if ratios[at] == 1 else 'WRONG'}: {pairs[at][0]} -> {answers[at]}")


@torch.inference_mode()
def recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Turns) -> None:
    """Prints the share of all answers whose every token is the likeliest one, and the mean loss.

    One pass per answer says what greedy decoding would give, so all wordings can be tried.
    """
    exact, loss, tokens = 0, 0.0, 0
    for question, answer in pairs:
        prompt, wanted = (tokenizer.encode(text) for text, _ in chat([(question, answer)]))
        logits = model(torch.tensor([prompt + wanted])).logits[0, len(prompt) - 1 : -1]
        target = torch.tensor(wanted)
        exact += int((logits.argmax(-1) == target).all())
        loss += float(cross_entropy(logits, target, reduction="sum"))
        tokens += len(wanted)
    share, mean = exact / len(pairs), loss / tokens
    print(f"all {len(pairs)} trained wordings: {share:.1%} exact, loss {mean:.4f} per token")


def reply(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    before: Turns | None = None,
) -> list[str]:
    """Greedy answers of the assistant, each to one question after the turns `before`."""
    past = [
        {"role": role, "content": text}
        for turn in before or []
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    chats = [[*past, {"role": "user", "content": question}] for question in questions]
    return complete(
        model,
        tokenizer,
        [
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            for messages in chats
        ],
    )


@torch.inference_mode()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """Greedy continuations; one that does not end within 400 tokens is marked."""
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    )
    generate: Any = model.generate
    output = generate(**inputs, max_new_tokens=400, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    ends = set(model.generation_config.eos_token_id)
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    return [
        text if ends & set(row.tolist()) else text + ENDLESS for text, row in zip(texts, output, strict=True)
    ]
