"""The options that say where a ring's Services are in Kubernetes, which the router and the planner share."""

from __future__ import annotations

from typing import Annotated

from baton.process.common_options import DISCOVERY
from baton.process.fields import Option

KubernetesNamespace = Annotated[
    str | None,
    Option("Where the workers' Services are. Default: this pod's namespace, or default.", DISCOVERY),
]
KubernetesSelector = Annotated[str, Option("Label selector of the workers' EndpointSlices.", DISCOVERY)]
KubernetesPort = Annotated[str, Option("Name of the gRPC port in the workers' Services.", DISCOVERY)]
Kubeconfig = Annotated[
    str | None,
    Option(
        "Credentials for the API server. Default: this pod's service account; outside of a cluster "
        "$KUBECONFIG or ~/.kube/config.",
        DISCOVERY,
        metavar="PATH",
    ),
]
KubernetesContext = Annotated[
    str | None, Option("The context of the kubeconfig. Default: its current one.", DISCOVERY)
]
