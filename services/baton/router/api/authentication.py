"""Authentication: from the key of a request to its client, the same for every protocol."""

from __future__ import annotations

from collections.abc import Callable

from baton.router.api.errors import ApiError, shown
from baton.router.security.client import Client
from baton.router.shared.limits import Tenant

_BEARER = "bearer "


class Authentication:
    """Finds the clients that keys belong to. ``find`` returns a key's client; None: there are no keys, and
    every client belongs to ``tenant``."""

    def __init__(self, find: Callable[[str], Client | None] | None, tenant: Tenant) -> None:
        self._find = find
        self._everybody = Client(tenant=tenant)

    @property
    def required(self) -> bool:
        return self._find is not None

    def client(self, authorization: str | None, api_key: str | None = None) -> Client:
        """Return the client that sends these headers: ``authorization: Bearer KEY``, or else ``x-api-key:
        KEY``. Raises ApiError (401), which quotes neither header."""
        if self._find is None:
            return self._everybody
        if authorization is not None:
            if authorization[: len(_BEARER)].lower() != _BEARER:
                raise _unauthenticated("The authorization header must be: Bearer, a space, and the API key.")
            key = authorization[len(_BEARER) :].strip()
        elif api_key is not None:
            key = api_key.strip()
        else:
            raise _unauthenticated(
                "An API key is needed, in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        client = self._find(key)
        if client is None:
            raise _unauthenticated("The API key is not known here.")
        return client

    def answerable(self, client: Client | None) -> Client:
        """Return the client to answer: ``client``, or the common one if there are no keys. Raises ApiError
        (401) if keys are needed and ``client`` is None."""
        if client is not None:
            return client
        if self.required:
            raise _unauthenticated("An API key is needed.")
        return self._everybody


def not_allowed(name: str) -> ApiError:
    """Return the error for a model that the client's key is not for: it does not reveal whether the model
    exists."""
    return ApiError(
        404,
        f"The model {shown(name)} does not exist, or this key may not ask it.",
        param="model",
        code="model_not_found",
    )


def _unauthenticated(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
