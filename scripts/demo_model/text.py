"""Reads the corpus and turns it into training text: conversations and plain passages.

`corpus/*.md` holds entries and `corpus/prose/*.md` holds passages. An entry looks like this:

    ## Title
    T: a KV block          a term, from which common wordings are made (P: for a plural one)
    Q: How big is it?      a wording used in training, as many as you like
    H: What size has it?   a wording kept for the check, never trained on
    A: The answer, which may run over several lines. A backslash at the end of a line keeps the break.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

IM_START, IM_END, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"

# A conversation is a list of (text, learn) pieces: the loss counts only the pieces with learn set.
Pieces = list[tuple[str, bool]]

SINGULAR = (
    "What is {term}?",
    "What's {term}?",
    "Explain {term}.",
    "Define {term}.",
    "{Bare}?",
    "Tell me about {term}.",
    "Can you explain what {term} is?",
    "What does {bare} mean?",
    "What do you mean by {bare}?",
    "Please explain {term} to me.",
    "Describe {term}.",
    "What is meant by {term}?",
    "How would you define {term}?",
    "What exactly is {term}?",
)
PLURAL = (
    "What are {term}?",
    "Explain {term}.",
    "Define {term}.",
    "{Bare}?",
    "Tell me about {term}.",
    "Can you explain what {term} are?",
    "What does {bare} mean?",
    "What do you mean by {bare}?",
    "Please explain {term} to me.",
    "Describe {term}.",
    "What is meant by {term}?",
    "How would you define {term}?",
    "What exactly are {term}?",
)
LEADS = (
    "Please tell me: ",
    "Quick question: ",
    "I have a question. ",
    "Hi! ",
    "Hello, ",
    "So, ",
    "And ",
    "OK. ",
    "In Baton, ",
    "Tell me, ",
    "Now, ",
    "One more question: ",
    "I wonder: ",
)
TAILS = (
    " Please explain.",
    " Please.",
    " Thanks!",
    " Keep it short.",
    " I am new to this.",
    " Explain it simply.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Baton's demo model.",
    "You are the assistant of a serving system.",
    "Answer the question.",
    "You are a friendly assistant who knows LLM serving.",
    "Be brief.",
    "You answer in plain English.",
)
SMALL_WORDS = frozenset(
    (
        "a",
        "an",
        "are",
        "be",
        "by",
        "can",
        "do",
        "does",
        "for",
        "how",
        "in",
        "is",
        "it",
        "of",
        "that",
        "the",
        "to",
        "what",
    )
)


@dataclass
class Entry:
    """One fact: the wordings that ask for it, and the answer."""

    title: str
    questions: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answer: str = ""


def load_entries(corpus: Path) -> list[Entry]:
    """All entries of `corpus/*.md`, in order."""
    entries: list[Entry] = []
    for path in sorted(corpus.glob("*.md")):
        for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            entries.append(_parse(section, path.name))
    return entries


def load_prose(corpus: Path) -> list[str]:
    """All passages of `corpus/prose/*.md`: one per heading, with paragraphs unwrapped."""
    passages = []
    for path in sorted((corpus / "prose").glob("*.md")):
        for section in re.split(r"^## .*\n", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            paragraphs = re.split(r"\n\s*\n", section.strip())
            passages.append("\n\n".join(_unwrap(paragraph) for paragraph in paragraphs))
    return passages


def chat(turns: list[tuple[str, str]], system: str | None = None) -> Pieces:
    """A conversation in the form of the chat template, to be learned where the assistant speaks."""
    pieces: Pieces = []
    if system is not None:
        pieces.append((f"{IM_START}system\n{system}{IM_END}\n", False))
    for question, answer in turns:
        pieces.append((f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n", False))
        pieces.append((f"{answer}{IM_END}", True))
        pieces.append(("\n", False))
    return pieces[:-1]


def reword(question: str, rng: random.Random) -> str:
    """The same question as people type it: lower case, no full stop, a polite tail, a slip of a key."""
    body = question
    roll = rng.random()
    if roll < 0.12 and len(body) > 12:
        lead = rng.choice(LEADS)
        body = lead + (body if lead[-2] in ".!:" else body[0].lower() + body[1:])
    elif roll < 0.2 and len(body) > 12:
        body += rng.choice(TAILS)
    body = _thin(body, rng)
    if rng.random() < 0.06 and len(body) > 12:
        at = rng.randrange(1, len(body) - 1)
        body = body[:at] + body[at + 1 :] if rng.random() < 0.5 else body[:at] + body[at] + body[at:]
    if rng.random() < 0.3:
        body = body.lower()
    if rng.random() < 0.3:
        body = body.rstrip("?.!")
    return body


def documents(entries: list[Entry], prose: list[str], rng: random.Random) -> list[Pieces]:
    """One pass over the corpus: every answer in a chat alone, in a longer chat, and often as plain text.

    Openings are the cheap part: only the first words of an answer tell whether the question was understood,
    so many wordings are trained on these alone.
    """

    def ask(entry: Entry) -> tuple[str, str]:
        return reword(rng.choice(entry.questions), rng), entry.answer

    def system() -> str | None:
        return rng.choice(SYSTEMS) if rng.random() < 0.3 else None

    def shuffled() -> list[Entry]:
        return rng.sample(entries, len(entries))

    docs = [chat([ask(entry)], system()) for entry in shuffled()]
    docs += [_opening(*ask(entry), system(), rng) for _ in range(4) for entry in shuffled()]
    order = shuffled()
    while order:
        # Few turns are far more common than many, in training as in use.
        size = rng.choice((2, 2, 2, 3, 3, 4, 6, 9))
        docs.append(chat([ask(entry) for entry in order[:size]], system()))
        order = order[size:]
    order = shuffled()[: len(entries) // 2]
    while order:
        size = rng.choice((1, 1, 2, 3))
        docs.append(_plain("\n\n".join(entry.answer for entry in order[:size]), rng))
        # A page of questions and answers, for those who ask without the chat template.
        docs.append([(rng.choice(order[0].questions), False), ("\n\n" + order[0].answer + END, True)])
        order = order[size:]
    docs += [_plain(passage, rng) for passage in prose]
    return docs


def tokenizer_text(entries: list[Entry], prose: list[str]) -> list[str]:
    """Every sentence of the corpus, also in lower case, as the tokenizer should know both."""
    texts = [text for entry in entries for text in (*entry.questions, entry.answer)]
    texts += prose
    return texts + [text.lower() for text in texts]


def _thin(question: str, rng: random.Random) -> str:
    """Leaves out one word, or most of the small ones, so that the words with meaning come to decide."""
    words = question.split()
    roll = rng.random()
    if roll < 0.12 and len(words) > 4:
        del words[rng.randrange(len(words) - 1)]
    elif roll < 0.24:
        telling = [word for word in words if word.lower() not in SMALL_WORDS or rng.random() < 0.2]
        words = telling if len(telling) > 1 else words
    return " ".join(words)


def _opening(question: str, answer: str, system: str | None, rng: random.Random) -> Pieces:
    words = answer.split(" ")[: rng.randint(6, 12)]
    return [*chat([(question, "")], system)[:-1], (" ".join(words), True)]


def _plain(passage: str, rng: random.Random) -> Pieces:
    start = [(END, False)] if rng.random() < 0.5 else []
    return [*start, (passage + END, True)]


def _parse(section: str, where: str) -> Entry:
    title, _, body = section.partition("\n")
    head, _, answer = body.partition("\nA:")
    entry = Entry(title.strip(), answer=_unwrap(answer))
    for line in filter(None, head.splitlines()):
        kind, text = line[:2], line[2:].strip()
        if kind in ("T:", "P:"):
            bare = re.sub(r"^(a|an|the) ", "", text)
            forms = SINGULAR if kind == "T:" else PLURAL
            entry.questions += [form.format(term=text, bare=bare, Bare=_capital(bare)) for form in forms]
        elif kind == "Q:":
            entry.questions.append(text)
        elif kind == "H:":
            entry.held_out.append(text)
        else:
            raise ValueError(f"{where}: {title}: cannot read {line!r}")
    entry.questions = list(dict.fromkeys(entry.questions))
    if not entry.questions or not entry.answer:
        raise ValueError(f"{where}: {title}: an entry needs a question and an answer")
    return entry


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unwrap(text: str) -> str:
    """Joins wrapped lines; a line that ends in a backslash keeps its break."""
    return re.sub(r"\\\n", "\r", text).replace("\n", " ").replace("\r", "\n").strip()
