"""Values that the chart must render, and values that it must refuse."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

_GPU = {"gpu": {"enabled": True}}
_SIMULATED = {"workers": {"simulated": {"enabled": True}}}
_DOWNLOAD = {"model": {"name": "Qwen/Qwen3-8B", "download": {"enabled": True}}}
_ROLES = ("prefill", "decode")


def _roles(**values: Any) -> Values:
    return dict.fromkeys(_ROLES, values)


VALUE_SETS: dict[str, Values] = {
    "defaults": {},
    "names": {"fullnameOverride": "ring", "commonLabels": {"team": "a"}, "commonAnnotations": {"owner": "a"}},
    "devices of the doctor": {
        **_roles(**_GPU, rdma={"enabled": True, "resource": "rdma/ib"}),
        "test": {"doctor": {"devices": True, "resources": {"limits": {"memory": "1Gi"}}}},
    },
    "no doctor": {"test": {"doctor": {"enabled": False}}},
    "a long name": {"fullnameOverride": "a" * 80},
    "another chart name": {"nameOverride": "relay"},
    "pull secrets": {"imagePullSecrets": [{"name": "registry"}]},
    "image by digest": {
        "image": {"registry": "", "pullPolicy": "Always"},
        "router": {"image": {"digest": "sha256:" + "0" * 64}},
    },
    "image tags": {"image": {"tag": "1.2.3"}, "decode": {"image": {"tag": "1.2.4", "pullPolicy": "Never"}}},
    "both alone": {
        "prefill": {"enabled": False},
        "decode": {"enabled": False},
        "both": {"enabled": True, "replicas": 3},
    },
    "all roles": {"both": {"enabled": True}},
    "decode alone": {"prefill": {"enabled": False}},
    "static discovery": {"router": {"discovery": "static", "workers": ["10.0.0.1:9000", "10.0.0.2:9000"]}},
    "a router without workers here": {
        **_roles(enabled=False),
        "router": {"discovery": "static", "workers": ["worker.example:9000"]},
    },
    "GPUs": _roles(**_GPU),
    "MIG": _roles(gpu={"enabled": True, "resource": "nvidia.com/mig-3g.40gb", "toleration": False}),
    "tensor parallel": _roles(**_GPU, tensorParallelSize=4, pipelineParallelSize=2),
    "several nodes": {
        **_roles(**_GPU, tensorParallelSize=8, pipelineParallelSize=2, nodesPerWorker=2),
        "metrics": {"annotations": True},
        "networkPolicy": {"enabled": True, "nodeCIDRs": ["10.0.0.0/16"], "egress": {"enabled": True}},
    },
    "one role on several nodes": {
        "decode": {
            **_GPU,
            "tensorParallelSize": 16,
            "nodesPerWorker": 4,
            "replicas": 3,
            "pdb": {"minAvailable": 2},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "50%"}},
        }
    },
    "several nodes with mTLS and a download": {
        **_DOWNLOAD,
        "tls": {"workers": {"enabled": True, "existingSecret": "mtls"}},
        "decode": {"tensorParallelSize": 2, "nodesPerWorker": 2, "options": {"threads": 4}},
    },
    "several nodes and KEDA": _roles(
        tensorParallelSize=2, nodesPerWorker=2, autoscaling={"enabled": True}, pdb={"maxUnavailable": "25%"}
    ),
    "several nodes and HPA": _roles(
        tensorParallelSize=2, nodesPerWorker=2, autoscaling={"enabled": True, "type": "hpa"}
    ),
    "several nodes and a name of just that length": {
        "fullnameOverride": "a" * 40,
        **_roles(tensorParallelSize=2, nodesPerWorker=2),
    },
    "RDMA": _roles(**_GPU, rdma={"enabled": True, "resource": "rdma/ib", "count": 2}),
    "RDMA without capabilities": _roles(
        rdma={"enabled": True, "resource": "rdma/roce_gdr", "capabilities": []}
    ),
    "hub id": {
        "model": {"name": "Qwen/Qwen3-8B", "servedName": "qwen", "hubToken": {"existingSecret": "hub"}}
    },
    "download": _DOWNLOAD,
    "download with a token": {
        "model": {
            "name": "meta-llama/Llama-3.1-8B-Instruct",
            "download": {
                "enabled": True,
                "revision": "v1",
                "resources": {"limits": {"memory": "1Gi"}},
            },
            "hubToken": {"existingSecret": "hub", "key": "HF_TOKEN"},
            "cache": {"type": "pvc", "storageClass": "fast"},
        }
    },
    "download through a proxy": {
        **_DOWNLOAD,
        **{
            component: {
                "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
                "envFrom": [{"configMapRef": {"name": "hub"}}],
                "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
                "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/authority"}],
            }
            for component in ("router", *_ROLES)
        },
    },
    "claim that is there": {
        "model": {
            "name": "/models/llama",
            "cache": {"type": "pvc", "existingClaim": "models", "readOnly": True},
        }
    },
    "host path": {
        "model": {"name": "/models/llama", "cache": {"type": "hostPath", "hostPath": "/srv/models"}}
    },
    "cluster key": {"clusterKey": {"existingSecret": "key", "key": "the-key"}},
    "API keys": {"apiKeys": {"existingSecret": "keys"}, "test": {"apiKey": {"existingSecret": "mine"}}},
    "API keys inline": {
        "apiKeys": {"inline": {"keys": [{"name": "a", "hash": "sha256:" + "1" * 64, "tenant": "acme"}]}}
    },
    "bundled Redis": {"redis": {"mode": "bundled"}, "router": {"replicas": 3}},
    "bundled Redis with a password": {"redis": {"mode": "bundled", "existingSecret": "redis"}},
    "external Redis": {"redis": {"mode": "external", "url": "rediss://redis.data:6380/1"}},
    "external Redis with a password": {
        "redis": {"mode": "external", "url": "redis://redis/0", "existingSecret": "redis", "key": "secret"}
    },
    "router options": {
        "router": {
            "options": {
                "maxQueueWait": 30,
                "queueTokens": 8000000,
                "limitTokensPerMinute": 100000,
                "allowedOrigins": ["https://a.example", "https://b.example"],
                "allowCredentials": False,
                "logPrompts": False,
                "auditLog": "-",
                "auditLogRequired": True,
                "slowClientTimeout": 2.5,
                "maxBodyBytes": "16MiB",
                "disaggregation": "always",
            }
        }
    },
    "worker options": {
        "workers": {"options": {"blockSize": 64, "prefixCaching": True, "kvCacheMemory": 34359738368}},
        "decode": {"options": {"prefixCaching": False, "maxNumSeqs": 512, "threads": 4}},
        "prefill": {"options": {"chunkedPrefill": False, "enforceEager": True, "connector": "ucx"}},
    },
    "more arguments": {
        "router": {"extraArgs": ["--log-level", "debug"]},
        "prefill": {"extraArgs": ["--log-level=debug"]},
    },
    "no gRPC": {"router": {"ports": {"grpc": -1}}, "service": {"port": 8001}},
    "other ports": {
        "router": {"ports": {"http": 8080, "grpc": 8081}},
        "workers": {"ports": {"grpc": 7000, "metrics": 7001}},
        "service": {"port": 8080, "grpcPort": 8081},
    },
    "IPv6": {"router": {"host": "::"}},
    "long drain": {"decode": {"drainTimeoutSeconds": 3600, "preStopSeconds": 0}},
    "long start": _roles(startupSeconds=7203),
    "probes": {"router": {"probes": {"liveness": {"failureThreshold": 10, "initialDelaySeconds": 5}}}},
    "disruption budgets": {
        "router": {"pdb": {"minAvailable": "50%"}},
        "decode": {"pdb": {"minAvailable": 1}},
        "prefill": {"pdb": {"enabled": False}},
    },
    "recreate": {
        "router": {"strategy": {"type": "Recreate"}},
        "prefill": {"strategy": {"type": "Recreate"}},
        "decode": {"strategy": {"type": "Recreate", "rollingUpdate": None}},
    },
    "KEDA": {
        **_roles(autoscaling={"enabled": True}),
        "router": {"autoscaling": {"enabled": True, "behavior": {"scaleDown": {"selectPolicy": "Min"}}}},
    },
    "KEDA with authentication": {
        "autoscaling": {"prometheus": {"authenticationRef": "prometheus", "authModes": "bearer,tls"}},
        "decode": {"autoscaling": {"enabled": True, "minReplicas": 0, "query": "sum(up)", "target": 2}},
    },
    "HPA": _roles(autoscaling={"enabled": True, "type": "hpa", "minReplicas": 2, "maxReplicas": 9}),
    "HPA of both": {
        **_roles(enabled=False),
        "both": {"enabled": True, "autoscaling": {"enabled": True, "type": "hpa", "metric": "kv_use"}},
    },
    "planner": {
        **_roles(**_GPU, tensorParallelSize=2),
        "planner": {
            "enabled": True,
            "gpuBudget": 16,
            "options": {"minDecode": 2, "startSeconds": 90, "switching": False, "attainment": 0.995},
        },
        "networkPolicy": {"enabled": True, "egress": {"enabled": True}, "metricsFrom": [{"podSelector": {}}]},
        "tls": {"workers": {"enabled": True, "existingSecret": "workers-tls"}},
    },
    "planner with an authority": {
        "planner": {
            "enabled": True,
            "gpuBudget": 8,
            "prometheusUrl": "https://prometheus.example",
            "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/authority/ca.crt"}],
            "envFrom": [{"configMapRef": {"name": "more"}}],
            "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
            "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/authority"}],
        },
        "tls": {"workers": {"enabled": True, "existingSecret": "workers-tls"}},
    },
    "planner with scrapes at Prometheus' own pace": {
        "planner": {"enabled": True, "gpuBudget": 8},
        "metrics": {"podMonitor": {"enabled": True, "interval": None, "scrapeTimeout": "10s"}},
    },
    "planner with just enough scrapes": {
        "planner": {"enabled": True, "gpuBudget": 8},
        "metrics": {"podMonitor": {"enabled": True, "interval": "30s"}},
    },
    "planner of another's scrapes": {
        "planner": {"enabled": True, "gpuBudget": 8},
        "metrics": {"podMonitor": {"enabled": False, "interval": "1m"}},
    },
    "planner beside autoscalers": {
        **_roles(autoscaling={"enabled": True}),
        "planner": {"enabled": True, "gpuBudget": 8, "dryRun": True, "prometheusUrl": "https://prom"},
        "serviceAccount": {"create": False, "name": "baton"},
    },
    "where": _roles(
        nodeSelector={"pool": "gpu"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        affinity={"nodeAffinity": {}},
        topologySpreadConstraints=[],
        priorityClassName="high",
        runtimeClassName="nvidia",
        schedulerName="other",
    ),
    "spread": {
        "router": {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 2,
                    "topologyKey": "rack",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "router"}},
                }
            ]
        }
    },
    "extras": _roles(
        podLabels={"a": "b"},
        podAnnotations={"k8s.v1.cni.cncf.io/networks": "ib0"},
        extraEnv=[{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
        envFrom=[{"configMapRef": {"name": "more"}}],
        extraVolumes=[{"name": "more", "emptyDir": {}}],
        extraVolumeMounts=[{"name": "more", "mountPath": "/more"}],
        initContainers=[{"name": "first", "image": "busybox"}],
        extraContainers=[{"name": "beside", "image": "busybox"}],
        podSecurityContext={"runAsUser": 0, "runAsNonRoot": False},
    ),
    "accounts that are there": {
        "serviceAccount": {"create": False, "name": "baton"},
        "rbac": {"create": False},
    },
    "account annotations": {"serviceAccount": {"name": "baton", "annotations": {"iam": "role"}}},
    "load balancer": {
        "service": {
            "type": "LoadBalancer",
            "annotations": {"lb": "internal"},
            "loadBalancerSourceRanges": ["10.0.0.0/8"],
        }
    },
    "ingress": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            "hosts": [{"host": "llm.example", "path": "/v1", "pathType": "Prefix"}, {"host": "b.example"}],
            "tls": [{"secretName": "llm-tls", "hosts": ["llm.example"]}],
        }
    },
    "gateway": {
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "gw", "namespace": "infra"}],
            "hostnames": ["a.b"],
        },
        "grpcRoute": {"enabled": True, "parentRefs": [{"name": "gw", "sectionName": "grpc"}]},
    },
    "inference pool": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}}},
    "client TLS": {"tls": {"clients": {"enabled": True, "existingSecret": "tls"}}},
    "client TLS by cert-manager": {
        "tls": {
            "clients": {"enabled": True, "certManager": {"issuerName": "le", "dnsNames": ["llm.example"]}}
        }
    },
    "clients' certificates": {
        "tls": {"clients": {"enabled": True, "existingSecret": "tls", "clientAuth": "required"}},
        "metrics": {"podMonitor": {"clientCertificate": {"existingSecret": "prometheus-tls"}}},
    },
    "clients' certificates, both looked at": {
        "tls": {"clients": {"enabled": True, "existingSecret": "tls", "clientAuth": "required"}},
        "metrics": {
            "podMonitor": {
                "enabled": True,
                "routerKind": "ServiceMonitor",
                "clientCertificate": {
                    "existingSecret": "prometheus-tls",
                    "certKey": "cert",
                    "keyKey": "key",
                    "caKey": "ca.crt",
                    "serverName": "llm.example",
                },
            }
        },
    },
    "mTLS": {"tls": {"workers": {"enabled": True, "existingSecret": "mtls", "serverName": "worker.baton"}}},
    "mTLS by cert-manager": {
        "tls": {"workers": {"enabled": True, "certManager": {"issuerName": "internal"}}}
    },
    "network policies": {"networkPolicy": {"enabled": True}},
    "network policies of what nobody scrapes": {
        "networkPolicy": {"enabled": True, "clientsFrom": [{"podSelector": {}}]},
        "metrics": {"podMonitor": {"enabled": False}},
    },
    "network policies with all": {
        "redis": {"mode": "bundled"},
        "networkPolicy": {
            "enabled": True,
            "clientsFrom": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
            "metricsFrom": [{"namespaceSelector": {}}],
            "nodeCIDRs": ["10.0.0.0/16", "fd00::/64"],
            "egress": {"enabled": True, "extra": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]},
        },
    },
    "egress to workers by name and address": {
        "router": {
            "discovery": "static",
            "workers": ["10.0.0.1:9000", "[fd00::5]:9000", "worker.example:9007"],
        },
        "networkPolicy": {"enabled": True, "egress": {"enabled": True}},
    },
    "egress to a collector": {
        "router": {"options": {"otlpEndpoint": "http://collector.observability:4317"}},
        "networkPolicy": {"enabled": True, "egress": {"enabled": True, "hub": False}},
    },
    "egress to a collector at gRPC's own port": {
        "router": {"options": {"otlpEndpoint": "https://[fd00::1]/"}},
        "networkPolicy": {"enabled": True, "egress": {"enabled": True, "hub": False}},
    },
    "egress to an external Redis": {
        "redis": {"mode": "external", "url": "redis://redis.data:7000/0"},
        "networkPolicy": {"enabled": True, "egress": {"enabled": True, "hub": False}},
    },
    "monitors always": {
        "metrics": {
            "podMonitor": {"enabled": True, "labels": {"release": "prom"}},
            "prometheusRule": {"enabled": True},
        }
    },
    "monitors that look often": {
        "metrics": {"podMonitor": {"enabled": True, "interval": "5s"}},
    },
    "monitors that give up": {
        "metrics": {"podMonitor": {"enabled": True, "interval": "5s", "scrapeTimeout": "4999ms"}},
    },
    "monitors never": {
        "metrics": {"podMonitor": {"enabled": False}, "prometheusRule": {"enabled": False}},
    },
    "service monitor": {
        "metrics": {
            "podMonitor": {
                "enabled": True,
                "routerKind": "ServiceMonitor",
                "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
                "metricRelabelings": [{"action": "drop", "regex": "x", "sourceLabels": ["__name__"]}],
            }
        },
        "tls": {"clients": {"enabled": True, "existingSecret": "tls"}},
    },
    "scrape annotations": {"metrics": {"annotations": True, "dashboards": {"enabled": True}}},
    "simulated": _SIMULATED,
    "simulated with faults": {
        "workers": {
            "simulated": {
                "enabled": True,
                "profile": "instant",
                "faults": ["error_rate=0.1"],
                "revision": "b",
            },
            "options": {"numBlocks": 1000, "prefixCaching": False},
        }
    },
    "no test": {"test": {"enabled": False}},
    "extra objects": {
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-more", "namespace": "serving", "labels": {}},
            },
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: text, namespace: serving, labels: {}}",
        ]
    },
}

REFUSED: dict[str, tuple[Values, str]] = {
    # name -> values, and what helm must say
    "a misspelt key": ({"router": {"replica": 2}}, "router: Additional property replica is not allowed"),
    "an unknown key": ({"prefil": {}}, "Additional property prefil is not allowed"),
    "an unknown option": (
        {"router": {"options": {"maxQueue": 1}}},
        "router.options: Additional property maxQueue",
    ),
    "an option of workers for routers": (
        {"router": {"options": {"blockSize": 16}}},
        "blockSize is not allowed",
    ),
    "a wrong choice": ({"redis": {"mode": "cluster"}}, "redis.mode: redis.mode must be one of"),
    "a wrong connector": (
        {"workers": {"options": {"connector": "rdma"}}},
        'connector must be one of the following: "auto", "ucx", "nixl", "nccl", "gloo", "tcp"',
    ),
    "a string for a number": (
        {"decode": {"replicas": "2"}},
        "decode.replicas: Invalid type. Expected: integer",
    ),
    "a negative number": ({"decode": {"replicas": -1}}, "Must be greater than or equal to 0"),
    "a port that is none": ({"workers": {"ports": {"grpc": 70000}}}, "Must be less than or equal to 65535"),
    "a wrong redis scheme": ({"redis": {"mode": "external", "url": "http://r"}}, "redis.url: Does not match"),
    "a wrong digest": ({"router": {"image": {"digest": "sha256:1"}}}, "router.image.digest: Does not match"),
    "a wrong pull policy": ({"image": {"pullPolicy": "always"}}, "image.pullPolicy must be one of"),
    "no start": ({"prefill": {"startupSeconds": 0}}, "Must be greater than or equal to 5"),
    "no drain": ({"decode": {"drainTimeoutSeconds": 0}}, "Must be greater than or equal to 1"),
    "no nodes": (
        {"prefill": {"nodesPerWorker": 0}},
        "prefill.nodesPerWorker: Must be greater than or equal to 1",
    ),
    "more nodes than processes": (
        {"prefill": {"nodesPerWorker": 2}},
        "prefill.nodesPerWorker: 2 pods cannot share 1 processes",
    ),
    "nodes with parts of groups": (
        {"decode": {"tensorParallelSize": 2, "pipelineParallelSize": 3, "nodesPerWorker": 2}},
        "decode.nodesPerWorker: 3 processes in each of 2 pods would be neither whole",
    ),
    "nodes that are recreated": (
        {
            "decode": {
                "tensorParallelSize": 2,
                "nodesPerWorker": 2,
                "strategy": {"type": "Recreate", "rollingUpdate": None},
            }
        },
        "decode.strategy.type: a LeaderWorkerSet (nodesPerWorker 2) has only RollingUpdate, not Recreate",
    ),
    "a name that is too long for nodes": (
        {"fullnameOverride": "a" * 41, "prefill": {"tensorParallelSize": 2, "nodesPerWorker": 2}},
        "-prefill is too long for a LeaderWorkerSet (prefill.nodesPerWorker 2)",
    ),
    "simulated nodes": (
        {**_SIMULATED, "decode": {"tensorParallelSize": 2, "nodesPerWorker": 2}},
        "decode: simulated workers have no devices",
    ),
    "nodes that join at the port of metrics": (
        {"workers": {"ports": {"nodes": 9100}}},
        "workers.ports.nodes: 9100 is already another port",
    ),
    "a wrong GPU resource": (
        {"prefill": {"gpu": {"resource": "gpu"}}},
        "prefill.gpu.resource: Does not match",
    ),
    "a wrong quantity": ({"decode": {"shm": {"sizeLimit": "8 GB"}}}, "decode.shm.sizeLimit: Does not match"),
    "a wrong size": ({"workers": {"options": {"kvCacheMemory": "much"}}}, "kvCacheMemory"),
    "a wrong service": ({"service": {"type": "Headless"}}, "service.type must be one of"),
    "a wrong profile": ({"workers": {"simulated": {"profile": "70b"}}}, "profile: Does not match"),
    "a wrong fault": ({"workers": {"simulated": {"faults": ["die=1"]}}}, "faults.0: Does not match"),
    "a wrong model": ({"model": {"name": "a/b/c"}}, "model.name: Does not match"),
    "a wrong CIDR": ({"networkPolicy": {"nodeCIDRs": ["10.0.0.0"]}}, "nodeCIDRs.0: Does not match"),
    "a wrong duration": ({"metrics": {"podMonitor": {"interval": "15"}}}, "interval: Does not match"),
    "neither auto nor a bool": ({"metrics": {"podMonitor": {"enabled": "yes"}}}, "enabled must be one of"),
    "a number as a label": ({"commonLabels": {"a": 1}}, "commonLabels.a: Invalid type. Expected: string"),
    "a wrong strategy": ({"decode": {"strategy": {"type": "Rolling"}}}, "strategy.type must be one of"),
    "a wrong issuer": (
        {"tls": {"workers": {"certManager": {"issuerKind": "CA"}}}},
        "issuerKind must be one of",
    ),
    "too much patience": ({"router": {"options": {"redisTimeoutMs": 100}}}, "less than or equal to 45"),
    "a target of nothing": (
        {"decode": {"autoscaling": {"target": 0}}},
        "autoscaling.target: Must be greater than 0",
    ),
    # What the schema cannot say.
    "nobody": (_roles(enabled=False), "no workers: enable prefill and decode, or both"),
    "prefill alone": ({"decode": {"enabled": False}}, "prefill.enabled: nobody could answer"),
    "static without workers": ({"router": {"discovery": "static"}}, "router.workers: name at least one"),
    "one port for both": ({"router": {"ports": {"http": 8001}}}, "router.ports.grpc: 8001 is already"),
    "one port of the Service for both": (
        {"service": {"port": 8001}},
        "service.grpcPort: 8001 is already the HTTP port",
    ),
    "any port for gRPC": ({"router": {"ports": {"grpc": 0}}}, "router.ports.grpc: Must not validate"),
    "external without a URL": ({"redis": {"mode": "external"}}, "redis.url: needed with redis.mode=external"),
    "a URL that nobody uses": (
        {"redis": {"url": "redis://r"}},
        "redis.url: is for redis.mode=external, not none",
    ),
    "a download of the demo": ({"model": {"download": {"enabled": True}}}, "must be a hub id, not demo"),
    "a download with no place": (
        {"model": {"name": "a/b", "download": {"enabled": True}, "cache": {"type": "pvc", "readOnly": True}}},
        "model.cache.readOnly leaves no place",
    ),
    "a directory of no cache": ({"model": {"name": "/models/a"}}, "model.cache.type is none"),
    "a host path without a path": (
        {"model": {"cache": {"type": "hostPath"}}},
        "model.cache.hostPath: needed",
    ),
    "TLS without a certificate": (
        {"tls": {"clients": {"enabled": True}}},
        "tls.clients: name an existingSecret",
    ),
    "monitors that may not scrape": (
        {
            "networkPolicy": {"enabled": True, "clientsFrom": [{"podSelector": {}}]},
            "metrics": {"podMonitor": {"enabled": True}},
        },
        "networkPolicy.metricsFrom: name Prometheus",
    ),
    "annotations of what may not be scraped": (
        {
            "networkPolicy": {"enabled": True, "clientsFrom": [{"podSelector": {}}]},
            "metrics": {"annotations": True},
        },
        "networkPolicy.metricsFrom: name Prometheus",
    ),
    "a scrape that outlasts the interval": (
        {"metrics": {"podMonitor": {"interval": "1m", "scrapeTimeout": "61s"}}},
        "metrics.podMonitor.scrapeTimeout: 61s is longer than the interval, 1m",
    ),
    "routers that cannot be scraped": (
        {
            "tls": {"clients": {"enabled": True, "existingSecret": "tls", "clientAuth": "required"}},
            "metrics": {"podMonitor": {"enabled": True}},
        },
        "metrics.podMonitor.clientCertificate.existingSecret: needed with tls.clients.clientAuth=required",
    ),
    "routers that are scraped without a certificate": (
        {
            "tls": {"clients": {"enabled": True, "existingSecret": "tls", "clientAuth": "required"}},
            "metrics": {"annotations": True},
        },
        "metrics.annotations: who scrapes by them has no certificate",
    ),
    "a CA without a name": (
        {"metrics": {"podMonitor": {"clientCertificate": {"existingSecret": "a", "caKey": "ca.crt"}}}},
        "clientCertificate: give caKey and serverName together",
    ),
    "a CA of no Secret": (
        {"metrics": {"podMonitor": {"clientCertificate": {"caKey": "ca.crt", "serverName": "a"}}}},
        "clientCertificate.existingSecret: name the Secret that has caKey",
    ),
    "mTLS of simulated workers": (
        {**_SIMULATED, "tls": {"workers": {"enabled": True, "existingSecret": "a"}}},
        "simulated workers speak no mTLS",
    ),
    "GPUs of simulated workers": (
        {**_SIMULATED, "decode": _GPU},
        "decode: simulated workers have no devices",
    ),
    "an option that simulated workers lack": (
        {"workers": {"simulated": {"enabled": True}, "options": {"dtype": "float32"}}},
        "options.dtype: a simulated worker has no such option",
    ),
    "blocks twice": (
        {"workers": {"options": {"numBlocks": 10}}, "decode": {"options": {"kvCacheMemory": "1GiB"}}},
        "decode.options.numBlocks: cannot be given together with kvCacheMemory",
    ),
    "a CPU with GPUs": (
        {"decode": {**_GPU, "options": {"device": "cpu"}}},
        "decode.options.device: cpu, but decode.gpu.enabled",
    ),
    "RDMA without a name": (
        {"decode": {"rdma": {"enabled": True}}},
        "decode.rdma.resource: name the resource",
    ),
    "fewest above most": (
        {"decode": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "decode.autoscaling.minReplicas: 9 is more than maxReplicas, 4",
    ),
    "an HPA that ends all": (
        {"decode": {"autoscaling": {"enabled": True, "type": "hpa", "minReplicas": 0, "query": "sum(up)"}}},
        "decode.autoscaling.minReplicas: 0 needs type keda and a query of your own",
    ),
    "nobody left to ask for one": (
        {"prefill": {"autoscaling": {"enabled": True, "minReplicas": 0}}},
        "prefill.autoscaling.minReplicas: 0 needs type keda and a query of your own",
    ),
    "a planner without a budget": ({"planner": {"enabled": True}}, "planner.gpuBudget: say how many GPUs"),
    "a planner of too few scrapes": (
        {
            "planner": {"enabled": True, "gpuBudget": 8},
            "metrics": {"podMonitor": {"enabled": True, "interval": "31s"}},
        },
        "metrics.podMonitor.interval: 31s, and the planner needs two scrapes a minute",
    ),
    "a planner of one role": (
        {"prefill": {"enabled": False}, "planner": {"enabled": True, "gpuBudget": 8}},
        "planner.enabled: it needs prefill.enabled",
    ),
    "a planner of workers on several nodes": (
        {
            "decode": {"nodesPerWorker": 2, "tensorParallelSize": 2},
            "planner": {"enabled": True, "gpuBudget": 8},
        },
        "planner.enabled: cannot be given together with decode.nodesPerWorker > 1",
    ),
    "a planner and an autoscaler": (
        {"decode": {"autoscaling": {"enabled": True}}, "planner": {"enabled": True, "gpuBudget": 8}},
        "planner.enabled: cannot be given together with decode.autoscaling.enabled",
    ),
    "a planner's option that there is not": (
        {"planner": {"enabled": True, "gpuBudget": 8, "options": {"gpuBudget": 4}}},
        "gpuBudget",
    ),
    "a route to no gateway": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name at least one"),
    "an ingress of nothing": ({"ingress": {"enabled": True}}, "ingress.hosts: name at least one"),
    "a pool without a picker": ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
}
