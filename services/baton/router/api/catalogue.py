"""The models behind one router, by the names that clients use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from baton.router.api.authentication import Authentication
from baton.router.api.errors import ApiError, shown
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.audit import AuditLog
from baton.router.security.client import Client
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics

Handler = TypeVar("Handler")


class Catalogue:
    """The served models, each with a completion core of its own. The first is the default."""

    def __init__(self, services: Sequence[CompletionService]) -> None:
        """One service may go without a name; of several, each has its own."""
        if not services:
            raise ValueError("a catalogue needs at least one model")
        self.services = tuple(services)
        self._by_name = {name: service for service in services for name in service.names}
        if len(self._by_name) < sum(len(service.names) for service in services):
            raise ValueError("two models have the same name")

    @property
    def settings(self) -> ApiSettings:
        """Of what comes before it is known which model is meant: the same for all."""
        return self.services[0].settings

    @property
    def authentication(self) -> Authentication:
        """Who may ask: the same for all."""
        return self.services[0].authentication

    @property
    def audit(self) -> AuditLog | None:
        return self.services[0].audit

    @property
    def traces(self) -> Traces:
        """Of the requests to all of them."""
        return self.services[0].traces

    @property
    def metrics(self) -> RouterMetrics:
        return self.services[0].metrics

    def check_room(self, client: Client | None) -> None:
        """Raises ApiError for a request that would be refused whatever it asks, before it is read. Of several
        models, it has to be read first."""
        if len(self.services) == 1:
            self.services[0].check_room(client)

    def service(self, name: str | None) -> CompletionService:
        """The model that ``name`` is a name of; no name, or an empty one, means the first, as in vLLM.

        Raises ApiError (404) for a name that no model has. A model that is alone judges names itself.
        """
        if not name or len(self.services) == 1:
            return self.services[0]
        service = self._by_name.get(name)
        if service is None:
            known = ", ".join(shown(service.names[0]) for service in self.services)
            # Where there are keys, names are for those who may ask: /v1/models tells them.
            has = "" if self.authentication.required else f"; this server has {known}"
            raise ApiError(
                404,
                f"The model {shown(name)} does not exist{has}.",
                param="model",
                code="model_not_found",
            )
        return service

    def each(self, make: Callable[[CompletionService], Handler]) -> ByModel[Handler]:
        """What ``make`` makes of each model."""
        return ByModel(self, {service: make(service) for service in self.services})


class ByModel(Generic[Handler]):
    """One handler for each model."""

    def __init__(self, catalogue: Catalogue, handlers: dict[CompletionService, Handler]) -> None:
        self._catalogue = catalogue
        self._handlers = handlers

    def of(self, name: str | None) -> Handler:
        """That of the model ``name``; see `Catalogue.service` for what it raises."""
        return self._handlers[self._catalogue.service(name)]
