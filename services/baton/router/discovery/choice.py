"""From the configuration of a router to its way of knowing the workers."""

from __future__ import annotations

from baton.router.config import RouterConfig
from baton.router.discovery.api_server import ApiServer, checked, own_namespace
from baton.router.discovery.endpoint import Discovery
from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.router.discovery.static import StaticDiscovery
from baton.telemetry.discovery import DiscoveryCounts


async def discovery_for(config: RouterConfig, counts: DiscoveryCounts) -> Discovery:
    """What ``--discovery`` names; ``counts`` are told what it does.

    Raises StartError when there are no credentials. Whether the API server answers is seen later: a router
    that starts while it is away must come up when it is back.
    """
    if config.discovery == "static":
        return StaticDiscovery(config.workers)
    connect = await checked(config.kubeconfig, config.kubernetes_context)
    namespace = config.kubernetes_namespace or own_namespace() or "default"
    api = ApiServer(connect, namespace, config.kubernetes_selector)
    return KubernetesDiscovery(api, config.kubernetes_port, counts)
