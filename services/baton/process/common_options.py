"""Options that several services have, and the panels under which help lists options.

A configuration takes one of these as the type of its field and adds the default.
"""

from __future__ import annotations

from typing import Annotated

from baton.process.fields import Option
from baton.process.options import LOG_LEVELS, check_filled, check_host

MODEL = "Model"
MEMORY = "Memory and batching"
SPECULATION = "Speculative decoding"
PARALLELISM = "Parallelism"
PLACEMENT = "Placement"
NETWORK = "Network"
DISCOVERY = "Discovery"
LIMITS = "Limits"
SECURITY = "Security"
TRACES = "Traces"
TARGETS = "Targets"
PROCESS = "Process"

ModelName = Annotated[
    str,
    Option(
        "'demo' (the small model that comes with Baton), a Hugging Face model directory, or a hub id.",
        MODEL,
        check=check_filled,
    ),
]
Host = Annotated[
    str,
    Option(
        "Address to listen on, such as 10.0.0.7 or fd00::7; 0.0.0.0: all of IPv4, :: of both families.",
        NETWORK,
        check=check_host,
    ),
]
AdvertisedHost = Annotated[
    str | None,
    Option(
        "Host that the router and other workers call. Default: --host, or this machine's name.",
        NETWORK,
        check=check_host,
    ),
]
MetricsPort = Annotated[
    int, Option("HTTP port of /metrics; 0 picks one, -1 serves none.", NETWORK, least=-1, most=65535)
]
VllmMetricNames = Annotated[
    bool,
    Option(
        "Export metrics under vLLM's names (vllm:*) as well, for dashboards that were made for it.", NETWORK
    ),
]
ClusterKey = Annotated[
    str,
    Option(
        "Secret by which services know each other: 16 bytes or more, the same for all. Without it they "
        "serve this machine alone. "
        "Better given in the environment, where no process list shows it.",
        NETWORK,
        env="BATON_CLUSTER_KEY",
        show_default=False,
        secret=True,
    ),
]
ClusterKeyPrevious = Annotated[
    str,
    Option(
        "The cluster key before this one, which is accepted as well while services of both run; left out "
        "again when none has it as its own. Better given in the environment, too.",
        NETWORK,
        env="BATON_CLUSTER_KEY_PREVIOUS",
        show_default=False,
        secret=True,
    ),
]
WorkerTlsCertfile = Annotated[
    str | None,
    Option(
        "Certificate chain (PEM) of this service for mTLS between router and workers, and between "
        "workers, KV blocks over tcp included. Read again for each connection.",
        SECURITY,
        metavar="FILE",
    ),
]
WorkerTlsKeyfile = Annotated[str | None, Option("Its private key (PEM).", SECURITY, metavar="FILE")]
WorkerTlsCaCerts = Annotated[
    str | None, Option("Who signs the certificates of all services (PEM).", SECURITY, metavar="FILE")
]
WorkerTlsServerName = Annotated[
    str | None,
    Option(
        "The name that workers' certificates have. Default: the host they are called by.",
        SECURITY,
        metavar="NAME",
    ),
]
LogLevel = Annotated[str, Option("debug, info, warning or error.", PROCESS, choices=LOG_LEVELS)]
