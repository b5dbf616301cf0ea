"""Errors of a chat by the names that another protocol has for the chat's fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.router.api.errors import RequestError
from baton.router.api.prepared import PreparedJob

_MESSAGE = re.compile(
    r"messages\[(?P<message>\d+)\](?P<call>\.tool_calls\[(?P<index>\d+)\]\.function)?(?![A-Za-z_])"
)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a chat's fields in another protocol."""

    fields: Sequence[tuple[str, str]]
    """The beginnings of fields, as regular expressions, and their names; the first that matches counts."""
    places: Sequence[str] = ()
    """The field that each message came from."""
    calls: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The field that each call came from, by the indices of its message and of the call."""

    def of(self, param: str) -> str:
        """Return the name of the field ``param``; ``param`` itself if it has no other."""
        found = _MESSAGE.match(param)
        if found is not None:
            message = int(found["message"])
            call = self.calls.get((message, int(found["index"]))) if found["call"] else None
            if call is not None:
                return call + param[found.end() :]
            if message < len(self.places):
                return self.places[message] + param[param.index("]") + 1 :]
        for ours, theirs in self.fields:
            named, count = re.subn(rf"^{ours}(?![A-Za-z_])", theirs, param, count=1)
            if count:
                return named
        return param


def rename(job: PreparedJob, names: Names) -> None:
    """Rename the fields in ``job``, so that later errors have the other ``names`` too."""
    job.grammars = [(names.of(param), output) for param, output in job.grammars]
    job.prompt_param = names.of(job.prompt_param)
    job.max_tokens_param = names.of(job.max_tokens_param)


@contextmanager
def renaming(names: Names) -> Iterator[None]:
    """Rename the fields in errors that are raised inside."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error, names) from None


def _renamed(error: RequestError, names: Names) -> RequestError:
    if error.param is None:
        return error
    param = names.of(error.param)
    if param == error.param:
        return error
    return RequestError(error.message.replace(error.param, param), param=param, code=error.code)
