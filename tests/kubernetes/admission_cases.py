"""Good and bad manifests, and what `validate` says of each: one table for it and for the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rules.values import Value

Json = Any
VM, VMI = "VirtualMachine", "VirtualMachineInstance"
KINDS = (VMI, VM)
RANGES = "portranger.io/port-ranges"
END = "portrange.alpha.kubernetes.io/port-end-"
MASQUERADE: Json = {"masquerade": {}}
BRIDGE: Json = {"bridge": {}}


class Case(Value, kw_only=True):
    """What a machine declares, and the codes of its problems; of a good one there are none."""

    name: str
    codes: tuple[str, ...] = ()
    interfaces: Json = ()
    annotations: Json = ()  # of the machine: of a VirtualMachine, those of its template; None: null
    own: Json = ()  # those of a VirtualMachine itself
    lax: bool = False  # whether the policy leaves it to KubeVirt, or to the agent

    def manifest(self, kind: str, name: str = "web") -> Json:
        """It, as one of the two kinds."""
        interfaces = [{"name": f"net{n}"} | one for n, one in enumerate(self.interfaces)]
        networks = [{"name": one["name"], "multus": {"networkName": "n"}} for one in interfaces]
        networks[:1] = [{"name": one["name"], "pod": {}} for one in networks[:1]]
        metadata = {"annotations": None if self.annotations is None else dict(self.annotations)}
        spec = {"domain": {"devices": {"interfaces": interfaces}}, "networks": networks}
        made: Json = {"apiVersion": "kubevirt.io/v1", "kind": kind, "metadata": {"name": name}}
        if kind == VM:
            made["metadata"] |= {"annotations": dict(self.own)}
            return made | {"spec": {"template": {"metadata": metadata, "spec": spec}}}
        made["metadata"] |= metadata
        return made | {"spec": spec}


def declares(name: str, *codes: str, binding: Json = MASQUERADE, **keys: Json) -> Case:
    """A machine with one interface that has these keys."""
    return Case(name=name, codes=codes, interfaces=(binding | keys,))


def ranges(name: str, *codes: str, items: Iterable[Json], binding: Json = MASQUERADE) -> Case:
    """A machine with these portRanges."""
    return declares(name, *codes, binding=binding, portRanges=list(items))


def ports(
    name: str, *codes: str, items: Iterable[Json], ends: Mapping[str, Json] | None = None
) -> Case:
    """A machine with these ports, and annotations that say where some of them end."""
    annotations = {f"{END}{port}": text for port, text in (ends or {}).items()}
    interface = MASQUERADE | {"ports": list(items)}
    return Case(name=name, codes=codes, interfaces=(interface,), annotations=annotations)


def says(name: str, *codes: str, text: Json, beside: Json = MASQUERADE) -> Case:
    """A machine whose annotation says that."""
    return Case(name=name, codes=codes, interfaces=(beside,), annotations={RANGES: text})


def lax(case: Case) -> Case:
    """The same, which the policy lets pass."""
    return Case(
        name=case.name,
        codes=case.codes,
        interfaces=case.interfaces,
        annotations=case.annotations,
        own=case.own,
        lax=True,
    )


def span(start: Json, end: Json, **keys: Json) -> Json:
    return {"start": start, "end": end} | keys


def row(count: int, step: int = 1) -> list[Json]:
    """That many ranges in order, with gaps; or in another order, if they are not taken in turn."""
    return [span(10 * n + 1, 10 * n + 5) for n in (k * step % count for k in range(count))]


def text(spans: Iterable[Json]) -> str:
    """The same as an annotation."""
    return ",".join(f"{one['start']}-{one['end']}" for one in spans)


WEB: Json = {"name": "web", "port": 80}
GOOD = (
    declares("nothing is declared"),
    Case(name="no interface is written"),
    ranges("a range", items=[span(1000, 8000)]),
    ranges("a range of one port", items=[span(22, 22)]),
    ranges("all ports", items=[span(1, 65535), span(1, 65535, protocol="UDP")]),
    ranges("ranges that touch", items=[span(1, 9), span(10, 19), span(20, 29)]),
    ranges("ranges that are not in order", items=[span(20, 29), span(1, 9), span(10, 19)]),
    ranges("ranges of two protocols", items=[span(1, 9), span(5, 15, protocol="UDP")]),
    ranges("an empty protocol", items=[span(1, 9, protocol=""), span(10, 19, protocol="TCP")]),
    ports("empty names", items=[{"name": "", "port": 1, "end": 2}, {"name": "", "port": 3}]),
    Case(
        name="ranges on another network",
        interfaces=(MASQUERADE, BRIDGE | {"portRanges": [span(1, 9)]}),
    ),
    ranges("no ranges", items=[]),
    declares("no ranges, but ports", portRanges=[], ports=[WEB]),
    ports("a port with an end", items=[{"port": 80, "end": 90}]),
    ports("a named port that ends where it starts", items=[WEB | {"end": 80}]),
    ports("a port twice", items=[{"port": 80}, {"port": 80}, {"port": 90, "end": 99}]),
    ports("an annotated end", items=[WEB, {"port": 100}], ends={"web": "99"}),
    ports("an annotated end at the start", items=[WEB], ends={"web": "80"}),
    ports(
        "names of all kinds",
        items=[
            *({"name": name, "port": 1} for name in ("a", "1-b", "x-1-2", "x" * 15)),
            {"port": 2, "end": 3},
        ],
    ),
    says("an annotation", text="1000-8000/tcp,1000-8000/udp,22"),
    says("an annotation with spaces and capitals", text=" 22 , 53/UDP,\t80-90/Tcp "),
    says("a port twice in an annotation", text="22,22,22/udp"),
    says("an annotation that is not in order", text="90-99,1-9,22,10-19,5-6/udp"),
    says("an annotation beside no ports", text="22", beside=MASQUERADE | {"ports": []}),
    says("as many ranges in order as are looked at", text=text(row(256))),
    says("as many ranges in any order as are looked at", text=text(row(64, 7))),
    ranges("as many portRanges as are looked at", items=row(256)),
    ports(
        "as many ends as are looked at",
        items=[{"name": f"p{n}", "port": 10 * n + 1} for n in range(256)],
        ends={f"p{n}": str(10 * n + 9) for n in range(256)},
    ),
    Case(
        name="ports on the other interface",
        interfaces=(MASQUERADE, BRIDGE | {"ports": [WEB]}),
        annotations={RANGES: "22"},
    ),
    Case(
        name="annotations of others",
        interfaces=(MASQUERADE,),
        annotations={"portrange.example.com/port-ranges": "x", "kubevirt.io/netns": "y"},
    ),
)
BAD = (
    ranges("port 0", "port-out-of-range", items=[span(0, 10)]),
    ranges("port 65536", "port-out-of-range", items=[span(65000, 65536)]),
    ranges("a negative port", "port-out-of-range", items=[span(-1, 10)]),
    ranges("an end before the start", "end-before-start", items=[span(9000, 80)]),
    ranges("no end", "missing", items=[{"start": 9000}]),
    ranges("no start", "missing", items=[{"end": 9000}]),
    ranges("a start in quotes", "not-an-integer", items=[span("80", 90)]),
    ranges("half a port", "not-an-integer", items=[span(80.5, 90)]),
    ranges("an end that is null", "not-an-integer", items=[span(80, None)]),
    ranges("a protocol in small letters", "bad-protocol", items=[span(1, 2, protocol="udp")]),
    ranges("another protocol", "bad-protocol", items=[span(1, 2, protocol="SCTP")]),
    ranges("a key too many", "unknown-key", items=[span(1, 2, target=5)]),
    ranges("an overlap", "overlap", items=[span(1, 10), span(10, 20)]),
    ranges(
        "an overlap with an empty protocol",
        "overlap",
        items=[span(1, 10), span(10, 20, protocol="")],
    ),
    ranges("a range twice", "overlap", items=[span(1, 10), span(1, 10)]),
    ranges("a range of one port twice", "overlap", items=[span(7, 7), span(7, 7)]),
    ranges("a range in another", "overlap", items=[span(1, 100), span(5, 6)]),
    ranges("a range around another", "overlap", items=[span(5, 6), span(1, 100)]),
    ranges(
        "overlaps in both protocols",
        *("overlap", "overlap"),
        items=[span(s, s + 9, protocol=p) for s in (1, 5) for p in ("TCP", "UDP")],
    ),
    ranges("an overlap at the end of many", "overlap", items=[*row(255), span(2545, 2550)]),
    ranges("an overlap in disorder", "overlap", items=[*row(63, 5), span(5, 6)]),
    ranges(
        "several problems",
        *("port-out-of-range", "bad-protocol", "end-before-start", "missing", "missing"),
        items=[span(0, 1), span(1, 2, protocol="tcp"), span(9, 8), {}],
    ),
    ranges("ranges on a bridge", "ranges-need-masquerade", items=[span(1, 2)], binding=BRIDGE),
    ranges(
        "bad ranges on a bridge",
        *("port-out-of-range", "bad-protocol"),
        items=[span(1, 65536), span(1, 2, protocol="tcp")],
        binding=BRIDGE,
    ),
    declares("both lists", "ports-and-ranges", ports=[WEB], portRanges=[span(1, 2)]),
    ports("a port end before its start", "end-before-start", items=[{"port": 80, "end": 79}]),
    ports("a port end beyond", "port-out-of-range", items=[{"port": 80, "end": 99999}]),
    ports("a name on a range", "name-on-range", items=[WEB | {"end": 90}]),
    ports("a port in a range", "overlap", items=[{"port": 80, "end": 90}, {"port": 85}]),
    ports(
        "a port in a later range",
        "overlap",
        items=[{"port": 50}, {"port": 90, "end": 99}, {"port": 45, "end": 55}],
    ),
    ports(
        "bad ports beside a range",
        *("port-out-of-range", "bad-port-name", "bad-protocol", "duplicate-port-name"),
        "bad-port-name",
        items=[
            *(WEB, WEB | {"port": 81}, {"port": 0}, {"name": "A", "port": 82}),
            *(
                {"port": 5, "end": 6},
                {"port": 83, "protocol": "tcp"},
                {"name": "x" * 16, "port": 84},
            ),
        ],
    ),
    declares(
        "an end on a bridge",
        "ranges-need-masquerade",
        binding=BRIDGE,
        ports=[{"port": 80, "end": 80}],
    ),
    ports("an end for no port", "no-such-port", items=[WEB], ends={"ssh": "30"}),
    ports("an end below the port", "end-before-start", items=[WEB], ends={"web": "79"}),
    ports("an end that is no number", "not-an-integer", items=[WEB], ends={"web": "90.."}),
    ports("an end with a zero before it", "not-an-integer", items=[WEB], ends={"web": "090"}),
    ports("an empty end", "not-an-integer", items=[WEB], ends={"web": ""}),
    ports("an end of 0", "port-out-of-range", items=[WEB], ends={"web": "0"}),
    ports(
        "an end beyond",
        "port-out-of-range",
        items=[WEB, {"port": 90}, {"port": 70}],
        ends={"web": "65536"},
    ),
    ports("a very long end", "port-out-of-range", items=[WEB], ends={"web": "9" * 40}),
    ports("two ends", "end-and-annotation", items=[WEB | {"end": 80}], ends={"web": "90"}),
    ports("an end over the next", "overlap", items=[WEB, {"port": 90}], ends={"web": "90"}),
    Case(
        name="an end for a port on a bridge",
        codes=("ranges-need-masquerade",),
        interfaces=(BRIDGE | {"ports": [WEB]},),
        annotations={f"{END}web": "90"},
    ),
    Case(
        name="an end without interface",
        codes=("no-such-port",),
        annotations={f"{END}web": "90"},
    ),
    says("an empty annotation", "bad-annotation", text=""),
    says("an empty item", "bad-annotation", text="22,,23"),
    says("a word", "bad-annotation", text="ssh"),
    says("a negative item", "bad-annotation", text="-5"),
    says("an open range", "bad-annotation", text="1000-"),
    says("two dashes", "bad-annotation", text="1-2-3"),
    says("spaces in an item", "bad-annotation", text="1 - 2"),
    says("a zero before it", "bad-annotation", text="080"),
    says("no protocol after the slash", "bad-protocol", text="80/"),
    says("another protocol in the annotation", "bad-protocol", text="80/sctp"),
    says("two protocols", "bad-protocol", text="80/tcp/udp"),
    says("item 0", "port-out-of-range", text="0"),
    says("an item beyond", "port-out-of-range", text="1-65536"),
    says("a very long item", "port-out-of-range", text="1-" + "9" * 70),
    says("an item that ends below its start", "end-before-start", text="9000-80/udp"),
    says("items that overlap", "overlap", text="1-10,5-20"),
    says("an item in another", "overlap", text="1-10,7,9/udp"),
    says("an item overlaps at the end of many", "overlap", text=text(row(255)) + ",2545-2549"),
    says("an item overlaps in disorder", "overlap", text=text(row(63, 5)) + ",5-6"),
    says(
        "annotation and ports",
        "annotation-and-spec",
        text="1",
        beside=MASQUERADE | {"ports": [WEB]},
    ),
    says(
        "annotation and portRanges",
        "annotation-and-spec",
        text="1",
        beside=MASQUERADE | {"portRanges": [span(1, 2)]},
    ),
    says("an annotation without masquerade", "ranges-need-masquerade", text="22", beside=BRIDGE),
    Case(
        name="an annotation without interface",
        codes=("ranges-need-masquerade",),
        annotations={RANGES: "22"},
    ),
    *(
        Case(
            name=f"the annotation {key}, which is for bare metal",
            codes=("tenant-annotation",),
            interfaces=(MASQUERADE,),
            annotations={f"portranger.io/{key}": said},
        )
        for key, said in {
            "netns": "/proc/1/ns/net",
            "interface": "eth0",
            "guest": "10.0.2.2",
            "address": "192.0.2.7",
        }.items()
    ),
    *(
        Case(
            name=f"the unknown annotation {key}",
            codes=("unknown-key",),
            interfaces=(MASQUERADE,),
            annotations={key: "22"},
        )
        for key in ("portranger.io/port-range", "portranger.io/x", f"{END[:-1]}", f"{END[:-2]}")
    ),
)
LAX = (
    ports("bad ports without a range", "port-out-of-range", items=[{"port": 70000}]),
    ranges("no binding", "binding", items=[span(1, 2)], binding={}),
    says("an annotation, and no binding", "binding", text="22", beside={}),
    declares("a misspelt list", "unknown-key", portRange=[span(1, 2)]),
    declares(
        "a list in the wrong place", "unknown-key", binding={"masquerade": {"portRanges": []}}
    ),
    Case(
        name="a misspelt group",
        codes=("unknown-key",),
        interfaces=(MASQUERADE,),
        annotations={"portrange.io/port-ranges": "22"},
    ),
    says("more items than are looked at", "overlap", text=text(row(256)) + ",5"),
    says("more disorder than is looked at", "overlap", text=text(row(64, 7)) + ",5"),
    ranges("more portRanges than are looked at", "overlap", items=[*row(256), span(5, 6)]),
)
OF_A_VM = (
    Case(name="an annotation of the VM itself", interfaces=(MASQUERADE,), own={RANGES: "22"}),
    Case(
        name="the template's annotation stands",
        interfaces=(MASQUERADE,),
        annotations={RANGES: "22"},
        own={RANGES: "bad"},
    ),
    Case(
        name="the template's end stands",
        interfaces=(MASQUERADE | {"ports": [WEB]},),
        annotations={f"{END}web": "90"},
        own={f"{END}web": "70"},
    ),
    Case(
        name="a bad annotation of the VM itself",
        codes=("end-before-start",),
        interfaces=(MASQUERADE,),
        own={RANGES: "22-1"},
    ),
    Case(
        name="a bad annotation of the template before a good one",
        codes=("bad-annotation",),
        interfaces=(MASQUERADE,),
        annotations={RANGES: "bad"},
        own={RANGES: "22"},
    ),
    Case(
        name="an end in the VM's own annotations",
        codes=("overlap",),
        interfaces=(MASQUERADE | {"ports": [WEB, {"port": 90}]},),
        own={f"{END}web": "95"},
    ),
    Case(
        name="an annotation for bare metal on the VM itself",
        codes=("tenant-annotation",),
        interfaces=(MASQUERADE,),
        own={"portranger.io/netns": "blue"},
    ),
    Case(
        name="the template's annotations are null",
        interfaces=(MASQUERADE,),
        annotations=None,
        own={RANGES: "22"},
    ),
    Case(
        name="the template's annotations are null beside a bad range",
        codes=("end-before-start",),
        interfaces=(MASQUERADE | {"portRanges": [span(9, 1)]},),
        annotations=None,
    ),
    Case(
        name="the template's annotation is a number",
        codes=("not-a-string",),
        interfaces=(MASQUERADE,),
        annotations={RANGES: 22},
    ),
)
CASES = (*GOOD, *BAD, *map(lax, LAX))
TABLE = (*((kind, case) for case in CASES for kind in KINDS), *((VM, case) for case in OF_A_VM))
