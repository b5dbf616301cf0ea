"""The job that the completion core runs: a checked request, and the tokens that it has used so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.core.priority import NO_PRIORITY, Priority
from baton.core.sampling_params import ResolvedSampling
from baton.router.api.audit import AuditRecord
from baton.router.api.prompts import Echo
from baton.router.dispatch.types import ModelInfo
from baton.router.security.client import Client
from baton.router.traces.origin import NOWHERE, Origin
from baton.text.choice import Delta
from baton.tools.answer import AnswerFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: prompts that fit, parameters in range. Choice ``p * n + i`` answers prompt ``p``.

    ``request_id`` is minted here, never a client's: workers know requests by it.
    """

    request_id: str
    endpoint: str
    started: float  # time.perf_counter() when the request arrived
    model: ModelInfo
    prompts: list[list[int]]
    params: ResolvedSampling
    priority: Priority = NO_PRIORITY
    n: int = 1
    record: AuditRecord | None = None
    """The request's record in the audit log."""
    cache_salt: bytes = b""
    """The salt of block hashes: cached blocks are shared among requests with the same salt; see
    `Client.cache_salt`."""
    seeded: bool = False  # whether the client gave the seed
    skip_special_tokens: bool = True
    echoes: Sequence[Echo] = ()
    """The text that the answers to each prompt begin with; empty: no prompt is echoed."""
    only_echo: bool = False
    """Whether the answer is the echo alone; the tokens generated beside it are dropped."""
    prompt_logprobs: int | None = None
    """The number that the client asked for; ``params`` may have more, for the echo."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""
    client: Client | None = None
    """The client; None: any client, where there are no keys."""
    origin: Origin = NOWHERE
    open_ended: bool = False
    """Whether the client left the length of the answers open: ``params`` then has all that the context has
    room for."""
    format: AnswerFormat | None = None
    """How an answer's text is split into reasoning, content and tool calls; None: all of it is content."""
    told_id: str = ""
    """The id that the answer tells: with the client's own, if the request has one; else ``request_id``."""
    ignored: Sequence[str] = ()
    """The fields of the request that are not acted on."""
    prompt_tokens: int = field(init=False)
    """Tokens of all prompts together."""
    choices: int = field(init=False)
    """The number of answers that the client gets."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "told_id", self.told_id or self.request_id)
        object.__setattr__(self, "prompt_tokens", sum(map(len, self.prompts)))
        object.__setattr__(self, "choices", self.n * len(self.prompts))


@dataclass(slots=True)
class Usage:
    """The tokens of one request so far. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, job: Job) -> Usage:
        return cls(job.prompt_tokens)

    def add(self, job: Job, index: int, delta: Delta) -> None:
        """Count the tokens that choice ``index`` got; the cached tokens of a prompt are those of its first
        choice."""
        self.completion_tokens += len(delta.token_ids)
        if index % job.n == 0:
            self.cached_tokens += delta.cached_tokens

    def before(self, delta: Delta) -> Usage:
        """Return the usage without the tokens of ``delta``, which was added last."""
        return replace(self, completion_tokens=self.completion_tokens - len(delta.token_ids))
