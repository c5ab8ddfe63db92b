"""What is written down of the node beside its node ports: in which network namespace Services are
published, and which ports are reserved there on their behalf. An agent that is started anew, maybe
in another network, can then take back what it did, and nothing else."""

from agent.kernel import sysctl
from rules.ports import PortRange
from rules.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent.sources.store import Store

BOOT = "kernel.random.boot_id"
RECORD = "node.json"


class NodeRecord(Value, kw_only=True):
    """Valid in the namespace that has this identity, until the machine is booted again."""

    identity: tuple[int, int]
    reserved: tuple[PortRange, ...] = ()


def recorded(store: "Store") -> NodeRecord | None:
    """What is written down; None: nothing that holds now."""
    content = store.record(RECORD)
    try:
        device, inode = content["identity"]  # type: ignore[index]
        if content["boot"] != _boot():  # type: ignore[index]
            return None
        ranges = content["reserved"]  # type: ignore[index]
        reserved = tuple(PortRange(int(first), int(last)) for first, last in ranges)
        return NodeRecord(identity=(int(device), int(inode)), reserved=reserved)
    except (KeyError, TypeError, ValueError):
        return None


def reserved_in(store: "Store", identity: object) -> tuple[PortRange, ...]:
    """Our share of the reserved ports of that namespace."""
    record = recorded(store)
    return record.reserved if record and record.identity == identity else ()


def record(store: "Store", identity: object, reserved: tuple[PortRange, ...]) -> None:
    """Write it down, before anything is done."""
    if isinstance(identity, tuple):
        ranges = [[one.first, one.last] for one in reserved]
        content = {"identity": [*identity], "boot": _boot(), "reserved": ranges}
        store.keep_record(RECORD, content)


def forget(store: "Store") -> None:
    """Nothing is published any more."""
    store.drop_record(RECORD)


def _boot() -> str:
    return sysctl.read([BOOT]).get(BOOT, "")
