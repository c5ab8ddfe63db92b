"""What Services and Pods declare, as values: what is to be published on a node, and to where."""

from rules.model import Address, Family, Protocol, Word
from rules.ports import PortRange
from rules.values import Value


class ServicePort(Value, kw_only=True):
    """A port of a Service, or the range that it begins; wherever it leads, one to one."""

    name: str
    protocol: Protocol
    ports: PortRange
    target: PortRange | str  # of the endpoint; a name is looked up in its pod
    node_ports: PortRange | None = None
    ranged: bool = False  # whether an annotation says its end: what kube-proxy does not know

    def __post_init__(self) -> None:
        for other in (self.target, self.node_ports):
            if isinstance(other, PortRange) and len(other) != len(self.ports):
                raise ValueError(f"{self.ports} and {other} are not of one length")


class ServiceType(Word):
    """Where a Service is to be reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"
    EXTERNAL_NAME = "ExternalName"


class Service(Value, kw_only=True):
    """One Service."""

    namespace: str
    name: str
    type: ServiceType
    ports: tuple[ServicePort, ...]
    selector: tuple[tuple[str, str], ...] = ()  # labels of its endpoints, sorted; none: by hand
    headless: bool = False
    external: tuple[Address, ...] = ()  # externalIPs: whoever wrote them need not own them
    ingress: tuple[Address, ...] = ()  # given to it by a load balancer
    affinity: int | None = None  # for how many seconds a client keeps its endpoint
    allocates: bool = True  # whether it gets node ports that nobody wrote down
    families: tuple[Family, ...] = ()  # ipFamilies; none: all
    restricted: bool = False  # loadBalancerSourceRanges: its ingress is not for everybody
    local: bool = False  # externalTrafficPolicy: endpoints of this node only, and the true source
    origin: str = ""  # file:line, for messages

    def __str__(self) -> str:
        return f"Service/{self.namespace}/{self.name}"


class Endpoint(Value, kw_only=True):
    """Where one port of a Service leads, or the first of a range that it begins."""

    address: Address
    port: int
    local: bool = True  # on this node
    only: tuple[PortRange, ...] | None = None  # of its own ports, those that it takes; None: all


class Publication(Value, kw_only=True):
    """A Service, and what is behind it."""

    service: Service
    endpoints: tuple[tuple[Endpoint, ...], ...]  # of each of its ports
    pending: str = ""  # why its endpoints are not known; what is there for it stays

    def __post_init__(self) -> None:
        if len(self.endpoints) != len(self.service.ports):
            raise ValueError(f"{self.service} has not as many ports as lists of endpoints")


class PodPort(Value, kw_only=True):
    """A port that a container announces, or the range that it begins."""

    container: str
    name: str
    protocol: Protocol
    ports: PortRange
    host_ports: PortRange | None = None
    ranged: bool = False


class Pod(Value, kw_only=True):
    """One Pod, as far as its ports go, and where it is."""

    namespace: str
    name: str
    ports: tuple[PodPort, ...]
    labels: tuple[tuple[str, str], ...] = ()  # by which policies choose, sorted
    addresses: tuple[Address, ...] = ()  # that are its own, as long as it runs
    origin: str = ""

    def __str__(self) -> str:
        return f"Pod/{self.namespace}/{self.name}"
