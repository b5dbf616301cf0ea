"""The choice of the served model that a request means, by the name it gives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.request.limits import ModelInfo
from baton.router.api.authentication import not_allowed
from baton.router.api.errors import ApiError, shown


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """One served model, as one client may ask it."""

    names: tuple[str, ...]
    """The names that clients use besides the model's own name."""
    model: ModelInfo | None
    """The model; None until a worker has said what it serves."""
    allowed: bool
    """Whether the client may ask the model."""


class Menu(msgspec.Struct, frozen=True, array_like=True):
    """All served models, as one client may ask them. The first is the default."""

    offers: tuple[Offer, ...]
    keyed: bool
    """Whether there are keys, so that names are only told to clients that may ask."""

    def choose(self, name: str | None) -> tuple[int, ModelInfo]:
        """Return the place of the model called ``name``, and the model; see `place_of` and `called` for what
        they raise."""
        place = place_of(name, [offer.names for offer in self.offers], keyed=self.keyed)
        offer = self.offers[place]
        return place, called(name, offer.model, offer.names, allowed=offer.allowed)


def place_of(name: str | None, names: Sequence[Sequence[str]], *, keyed: bool) -> int:
    """Return the place of the model that has ``name`` among its ``names``. No name, or an empty one, means
    the first model, as in vLLM.

    Raises ApiError (404) for a name that no model has. If there is a single model, `called` checks the name.
    """
    if not name or len(names) == 1:
        return 0
    for place, own in enumerate(names):
        if name in own:
            return place
    known = ", ".join(shown(own[0]) for own in names)
    # Where there are keys, names are only told to clients that may ask, at /v1/models.
    has = "" if keyed else f"; this server has {known}"
    raise ApiError(
        404, f"The model {shown(name)} does not exist{has}.", param="model", code="model_not_found"
    )


def called(name: str | None, model: ModelInfo | None, names: Sequence[str], *, allowed: bool) -> ModelInfo:
    """Return ``model``, which a missing ``name`` means too. Raises ApiError if ``name`` is another model's,
    the client may not ask the model, or no worker is there yet."""
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
