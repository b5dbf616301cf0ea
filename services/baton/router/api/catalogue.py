"""The models behind one router, by the names that clients use."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.api.menu import Menu, Offer, place_of
from baton.router.api.service import CompletionService
from baton.router.security.client import Client


class Catalogue:
    """The served models, each with a completion core of its own. The first is the default."""

    def __init__(self, services: Sequence[CompletionService]) -> None:
        """``services``: a single one may have no name; several have distinct ones. Raises ValueError."""
        if not services:
            raise ValueError("a catalogue needs at least one model")
        self.services = tuple(services)
        names = [name for service in services for name in service.names]
        if len(set(names)) < len(names):
            raise ValueError("two models have the same name")
        # All models share these: they are needed before it is known which model a request means.
        first = self.services[0]
        self.settings = first.settings
        self.authentication = first.authentication
        self.audit = first.audit
        self.traces = first.traces
        self.shared = first.shared
        self.elsewhere = first.elsewhere
        self.metrics = first.metrics

    def check_room(self, client: Client) -> None:
        """Raise ApiError for a request that would be refused whatever it asks, before it is read. With
        several models, the request has to be read first."""
        if len(self.services) == 1:
            self.services[0].check_room(client)

    def service(self, name: str | None) -> CompletionService:
        """Return the service of the model called ``name``; see `place_of` for what it raises."""
        names = [service.names for service in self.services]
        return self.services[place_of(name, names, keyed=self.authentication.required)]

    def menu(self, client: Client) -> Menu:
        """Return all models, and which of them ``client`` may ask, for the reader of its request."""
        offers = tuple(
            Offer(service.names, service.ring.model, service.serves(client)) for service in self.services
        )
        return Menu(offers, self.authentication.required)
