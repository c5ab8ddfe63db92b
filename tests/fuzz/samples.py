"""What fuzzing begins with: one good object of each kind that we read, with most of what it can
say, and the texts that the repository shows to people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENDS = "portrange.alpha.kubernetes.io/port-end-"
UID = "0a1b2c3d-0000-4000-8000-0123456789ab"

MACHINE: dict[str, Any] = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachine",
    "metadata": {"name": "vm", "namespace": "shop", "labels": {"app": "web"}},
    "spec": {
        "template": {
            "metadata": {
                "labels": {"app": "web", "tier": "1"},
                "annotations": {
                    ENDS + "rtp": "10030",
                    "portranger.io/netns": "blue",
                    "portranger.io/interface": "eth0",
                    "portranger.io/guest": "10.0.2.2,fd10:0:2::2",
                    "portranger.io/address": "192.0.2.9",
                },
            },
            "spec": {
                "domain": {
                    "devices": {
                        "interfaces": [
                            {
                                "name": "default",
                                "masquerade": {},
                                "ports": [
                                    {"name": "ssh", "port": 22},
                                    {"name": "rtp", "protocol": "UDP", "port": 10000},
                                    {"protocol": "TCP", "port": 80, "end": 89},
                                ],
                            },
                            {"name": "other", "bridge": {}},
                        ]
                    }
                },
                "networks": [
                    {"name": "default", "pod": {"vmNetworkCIDR": "10.0.2.0/24"}},
                    {"name": "other", "multus": {"networkName": "shop/net"}},
                ],
            },
        }
    },
}
INSTANCE: dict[str, Any] = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "metadata": {
        "name": "vmi",
        "namespace": "shop",
        "uid": UID,
        "resourceVersion": "17",
        "labels": {"app": "web", "kubevirt.io/nodeName": "node"},
        "annotations": {"sidecar.istio.io/inject": "false"},
    },
    "spec": {
        "domain": {
            "devices": {
                "interfaces": [
                    {
                        "name": "default",
                        "masquerade": {},
                        "portRanges": [
                            {"start": 1000, "end": 1080},
                            {"start": 1000, "end": 1080, "protocol": "UDP"},
                        ],
                    }
                ]
            }
        },
        "networks": [{"name": "default", "pod": {}}],
    },
    "status": {
        "phase": "Running",
        "activePods": {UID: "node"},
        "nodeName": "node",
        "interfaces": [{"name": "default", "podInterfaceName": "eth0"}],
        "migrationState": {"sourceNode": "node", "targetNode": "other", "completed": False},
    },
}
ANNOTATED: dict[str, Any] = {
    "apiVersion": "kubevirt.io/v1",
    "kind": "VirtualMachineInstance",
    "metadata": {
        "name": "noted",
        "annotations": {"portranger.io/port-ranges": "1000-1080/tcp,1000-1080/udp,22"},
    },
    "spec": {
        "domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}},
        "networks": [{"name": "default", "pod": {}}],
    },
}
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "name": "phone",
        "namespace": "shop",
        "uid": UID,
        "resourceVersion": "3",
        "annotations": {ENDS + "rtp": "10040"},
    },
    "spec": {
        "type": "NodePort",
        "selector": {"app": "web"},
        "externalIPs": ["192.0.2.70"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
        "externalTrafficPolicy": "Local",
        "ports": [
            {"name": "sip", "port": 5060, "protocol": "UDP", "nodePort": 30060},
            {"name": "rtp", "port": 10000, "protocol": "UDP", "targetPort": 20000},
        ],
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.80", "ipMode": "VIP"}]}},
}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "client",
        "namespace": "shop",
        "uid": UID,
        "resourceVersion": "4",
        "labels": {"app": "client"},
        "annotations": {ENDS + "data": "2010"},
    },
    "spec": {
        "containers": [
            {"name": "main", "ports": [{"name": "data", "containerPort": 2000, "protocol": "TCP"}]}
        ],
        "hostNetwork": False,
    },
    "status": {
        "phase": "Running",
        "podIP": "10.244.0.9",
        "podIPs": [{"ip": "10.244.0.9"}, {"ip": "fd00::9"}],
    },
}
POLICY: dict[str, Any] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "shut", "namespace": "shop", "uid": UID, "resourceVersion": "5"},
    "spec": {
        "podSelector": {
            "matchLabels": {"app": "web"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["1", "2"]}],
        },
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [
                    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                    {
                        "namespaceSelector": {"matchLabels": {"team": "a"}},
                        "podSelector": {"matchLabels": {"app": "client"}},
                    },
                ],
                "ports": [{"protocol": "TCP", "port": 1000, "endPort": 1010}, {"port": "ssh"}],
            }
        ],
        "egress": [{"ports": [{"protocol": "UDP", "port": 53}]}, {"to": [{"podSelector": {}}]}],
    },
}
NAMESPACE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": "shop", "uid": UID, "resourceVersion": "6", "labels": {"team": "a"}},
}
SLICE: dict[str, Any] = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {
        "name": "phone-x",
        "namespace": "shop",
        "uid": UID,
        "resourceVersion": "7",
        "labels": {"kubernetes.io/service-name": "phone"},
    },
    "addressType": "IPv4",
    "ports": [
        {"name": "sip", "protocol": "UDP", "port": 5060},
        {"name": "rtp", "protocol": "UDP", "port": 20000},
    ],
    "endpoints": [
        {"addresses": ["10.244.0.9"], "conditions": {"ready": True}, "nodeName": "node"},
        {"addresses": ["10.244.1.9"], "conditions": {"terminating": True, "serving": True}},
    ],
}
DECLARED = [MACHINE, INSTANCE, ANNOTATED, SERVICE, POD, POLICY, NAMESPACE]
EVERYTHING: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": DECLARED}
TOLD = [*DECLARED, SLICE]


def shown_to_people() -> list[bytes]:
    """The examples, and the manifests of the golden cases."""
    names = ["examples/*.yaml", "examples/services/*.yaml", "tests/golden/*/manifest.yaml"]
    return [path.read_bytes() for name in names for path in sorted(ROOT.glob(name))]
