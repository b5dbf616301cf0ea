"""Log-probabilities in the shapes of OpenAI's completions and chat completions, and of vLLM's prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from baton.core.logprobs import Logprobs
from baton.router.api.job import Job
from baton.text.choice import Delta, DeltaDetails
from baton.text.tokenizer import Tokenizer

LEAST = -9999.0
"""The value that JSON has in place of minus infinity, as in OpenAI's API."""

THREAD_ABOVE = 1024
"""The number of prompt tokens above which a prompt is formatted in a thread, so that other streams go on
meanwhile."""

Fields = dict[str, list[object]]


class DeltaLogprobs(NamedTuple):
    """The log-probabilities that an answer tells with a delta."""

    logprobs: Fields | None = None
    """Lists by their names in the choice's ``logprobs``; None if the client did not ask."""
    prompt: list[object] | None = None
    """vLLM's ``prompt_logprobs``: for each prompt token except the first, tokens by id. None unless the
    client asked and the delta is the first."""


NOTHING = DeltaLogprobs()


class LogprobsView:
    """Formats the log-probabilities in a job's deltas.

    A token is shown as its text. If its bytes are no text by themselves (a part of a character), they are
    spelled as OpenAI does: ``\\xf0\\x9f`` in a chat, ``bytes:\\xf0\\x9f`` in a completion.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job, *, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._chat = chat

    async def of(self, index: int, delta: Delta) -> DeltaLogprobs:
        """Return what ``delta`` tells of choice ``index``."""
        details = delta.details
        if details is None:
            return NOTHING
        if details.prompt_logprobs is not None and len(details.prompt_logprobs) > THREAD_ABOVE:
            return await asyncio.to_thread(self._told, index, delta, details)
        return self._told(index, delta, details)

    def _told(self, index: int, delta: Delta, details: DeltaDetails) -> DeltaLogprobs:
        return DeltaLogprobs(
            self._fields(index, delta, details), self._prompt(index, details.prompt_logprobs)
        )

    def _fields(self, index: int, delta: Delta, details: DeltaDetails) -> Fields | None:
        if self._job.params.logprobs is None:
            return None
        told = details.logprobs or Logprobs(0)  # an answer that is an echo alone has none
        if self._chat:
            return {"content": self._content(delta.token_ids, told)}
        fields: Fields = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        prompt = index // self._job.n
        if self._job.echoes and details.prompt_logprobs is not None:
            ids, offsets = self._job.prompts[prompt], self._job.echoes[prompt].offsets
            self._add(fields, ids[:1], offsets[:1], None)
            self._add(fields, ids[1:], offsets[1:], details.prompt_logprobs)
        self._add(fields, delta.token_ids, details.offsets, told)
        return fields

    def _prompt(self, index: int, told: Logprobs | None) -> list[object] | None:
        most = self._job.prompt_logprobs
        if most is None or told is None:
            return None
        ids = self._job.prompts[index // self._job.n]
        return [None, *(self._ranked(told, at, token, most) for at, token in enumerate(ids[1:]))]

    def _add(
        self, fields: Fields, token_ids: Sequence[int], offsets: Sequence[int], told: Logprobs | None
    ) -> None:
        """Append tokens to a completion's lists; without ``told`` their log-probabilities are null."""
        most = self._job.params.logprobs or 0
        fields["text_offset"] += offsets
        for at, token in enumerate(token_ids):
            shown = self._shown(token)
            fields["tokens"].append(shown)
            if told is None:
                fields["token_logprobs"].append(None)
                fields["top_logprobs"].append(None)
                continue
            logprob = max(told.chosen[at], LEAST)
            top = {shown: logprob}
            for other, value in told.top_of(at, most):
                top.setdefault(self._shown(other), max(value, LEAST))
            fields["token_logprobs"].append(logprob)
            fields["top_logprobs"].append(top)

    def _content(self, token_ids: Sequence[int], told: Logprobs) -> list[object]:
        most = self._job.params.logprobs or 0
        return [
            {
                **self._entry(token, told.chosen[at]),
                "top_logprobs": [self._entry(other, value) for other, value in told.top_of(at, most)],
            }
            for at, token in enumerate(token_ids)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        return {
            "token": self._shown(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _ranked(self, told: Logprobs, at: int, token: int, most: int) -> dict[str, object]:
        ranked = {token: (told.chosen[at], told.ranks[at])}
        for rank, (other, value) in enumerate(told.top_of(at, most), start=1):
            ranked[other] = (value, rank)
        return {
            str(id_): {
                "logprob": max(logprob, LEAST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(id_).decode(errors="replace"),
            }
            for id_, (logprob, rank) in ranked.items()
        }

    def _shown(self, token: int) -> str:
        if self._job.tokens_as_ids:
            return f"token_id:{token}"
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return ("" if self._chat else "bytes:") + "".join(f"\\x{byte:02x}" for byte in spelled)
