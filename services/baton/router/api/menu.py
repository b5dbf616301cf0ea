"""Which of the served models a request means, by the name that it gives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.request.limits import ModelInfo
from baton.router.api.authentication import not_allowed
from baton.router.api.errors import ApiError, shown


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """One served model, as one client may ask it."""

    names: tuple[str, ...]
    """What clients call it besides its own name."""
    model: ModelInfo | None
    """None until a worker has told what it serves."""
    allowed: bool
    """Whether the client may ask it."""


class Menu(msgspec.Struct, frozen=True, array_like=True):
    """All served models, as one client may ask them. The first is the default."""

    offers: tuple[Offer, ...]
    keyed: bool
    """Names are only for those who may ask."""

    def choose(self, name: str | None) -> tuple[int, ModelInfo]:
        """The model called ``name``, and its place; see `place_of` and `called` for what it raises."""
        place = place_of(name, [offer.names for offer in self.offers], keyed=self.keyed)
        offer = self.offers[place]
        return place, called(name, offer.model, offer.names, allowed=offer.allowed)


def place_of(name: str | None, names: Sequence[Sequence[str]], *, keyed: bool) -> int:
    """The place of the model that ``name`` is one of the ``names`` of; no name, or an empty one, means the
    first, as in vLLM.

    Raises ApiError (404) for a name that no model has. A model that is alone judges names itself.
    """
    if not name or len(names) == 1:
        return 0
    for place, own in enumerate(names):
        if name in own:
            return place
    known = ", ".join(shown(own[0]) for own in names)
    # Where there are keys, names are for those who may ask: /v1/models tells them.
    has = "" if keyed else f"; this server has {known}"
    raise ApiError(
        404, f"The model {shown(name)} does not exist{has}.", param="model", code="model_not_found"
    )


def called(name: str | None, model: ModelInfo | None, names: Sequence[str], *, allowed: bool) -> ModelInfo:
    """``model``, which no ``name`` means too. Raises ApiError when ``name`` is another one's, the client may
    not ask it, or no worker is there yet."""
    if model is None:
        raise ApiError(503, "No worker has told which model it serves yet.", code="not_ready")
    if not allowed:
        raise not_allowed(name or model.name)
    if name and name not in (model.name, *names):
        raise ApiError(
            404,
            f"The model {shown(name)} does not exist; this server has {shown(model.name)}.",
            param="model",
            code="model_not_found",
        )
    return model
