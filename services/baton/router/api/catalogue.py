"""The models behind one router, by the names that clients use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from baton.router.api.authentication import Authentication
from baton.router.api.elsewhere import ElsewhereReader
from baton.router.api.menu import Menu, Offer, place_of
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
        names = [name for service in services for name in service.names]
        if len(set(names)) < len(names):
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
    def elsewhere(self) -> ElsewhereReader | None:
        """Where large bodies are read: the same for all."""
        return self.services[0].elsewhere

    @property
    def metrics(self) -> RouterMetrics:
        return self.services[0].metrics

    def check_room(self, client: Client | None) -> None:
        """Raises ApiError for a request that would be refused whatever it asks, before it is read. Of several
        models, it has to be read first."""
        if len(self.services) == 1:
            self.services[0].check_room(client)

    def service(self, name: str | None) -> CompletionService:
        """The model that ``name`` is a name of; see `place_of` for what it raises."""
        names = [service.names for service in self.services]
        return self.services[place_of(name, names, keyed=self.authentication.required)]

    def menu(self, client: Client | None) -> Menu:
        """The models as ``client`` may ask them, for whoever reads its request."""
        offers = tuple(
            Offer(service.names, service.ring.model, service.serves(client)) for service in self.services
        )
        return Menu(offers, self.authentication.required)

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
