"""From the key that a request brings to who asks, the same for every protocol."""

from __future__ import annotations

from collections.abc import Callable

from baton.router.api.errors import ApiError, shown
from baton.router.security.client import Client
from baton.router.shared.limits import Tenant

_BEARER = "bearer "


class Authentication:
    """``find`` tells whom a key stands for; None: there are no keys, and everybody is ``tenant``."""

    def __init__(self, find: Callable[[str], Client | None] | None, tenant: Tenant) -> None:
        self._find = find
        self._everybody = Client(tenant=tenant)

    @property
    def required(self) -> bool:
        return self._find is not None

    def client(self, authorization: str | None, api_key: str | None = None) -> Client:
        """Who sends these headers: ``authorization: Bearer KEY``, or ``x-api-key: KEY`` where that is not
        given. Raises ApiError (401), which quotes nothing of them."""
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
        """Who is to be answered. Raises ApiError (401) when nobody is known where keys are needed."""
        if client is not None:
            return client
        if self.required:
            raise _unauthenticated("An API key is needed.")
        return self._everybody


def not_allowed(name: str) -> ApiError:
    """What a client is told of a model that its key is not for: who may not ask it need not hear of it."""
    return ApiError(
        404,
        f"The model {shown(name)} does not exist, or this key may not ask it.",
        param="model",
        code="model_not_found",
    )


def _unauthenticated(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
