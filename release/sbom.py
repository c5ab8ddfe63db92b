"""The bill of materials: `make sbom` writes it, in the form of CycloneDX 1.6.

It lists what an installed portranger consists of, from the locks and the metadata beside the code,
and the libraries of the operating system that it loads. These have no version here: it is that of
the machine. Written twice it is the same, so its serial number is one of its content.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from release.components import PROJECT, Component, components, names

Json = Any

ROOT = Path(__file__).parents[1]
NEEDED = "required"
WHERE_IT_IS_USED = "optional"

SYSTEM: Mapping[str, tuple[str, str, str]] = {
    "libnftables1": ("GPL-2.0-only", NEEDED, "pip-nftables"),
    "libxtables12": ("GPL-2.0-only", WHERE_IT_IS_USED, "python-iptables"),
    "libip4tc2": ("GPL-2.0-only", WHERE_IT_IS_USED, "python-iptables"),
    "libip6tc2": ("GPL-2.0-only", WHERE_IT_IS_USED, "python-iptables"),
    "python3": ("PSF-2.0", NEEDED, PROJECT),
}
"""What is loaded from the operating system, by the name of Debian's package: its licence, whether
it is always needed, and what loads it."""


EMBEDDED: Mapping[str, tuple[str, str]] = {"pyyaml": ("libyaml", "MIT")}
"""What a wheel has inside it from elsewhere, and its licence."""


def bill(paths: Sequence[str], parts: Sequence[str], time: int) -> str:
    """The document about the environment at these paths, of which these parts are told."""
    listed = components(paths, parts)
    content = {
        "metadata": {
            "timestamp": datetime.fromtimestamp(time, UTC).isoformat(),
            "component": {**ours(), "bom-ref": PROJECT},
        },
        "components": [*map(python_package, listed), *map(system_package, sorted(SYSTEM))],
        "dependencies": graph(listed),
    }
    text = json.dumps(content, sort_keys=True)
    head = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, text).urn,
        "version": 1,
    }
    return json.dumps({**head, **content}, indent=2) + "\n"


def ours() -> Json:
    """What the document is about."""
    told = project()
    return {
        "type": "application",
        "name": PROJECT,
        "version": told["version"],
        "description": told["description"],
        "licenses": [{"expression": told["license"]}],
        "purl": f"pkg:pypi/{PROJECT}@{told['version']}",
    }


def python_package(one: Component) -> Json:
    """A locked distribution. Any of its files may be the one that is installed, so the hashes are
    those of its files, and none is its own."""
    purl = f"pkg:pypi/{one.name}@{one.version}"
    digests = [{"alg": "SHA-256", "content": digest} for digest in one.hashes]
    return {
        "type": "library",
        "bom-ref": one.name,
        "name": one.name,
        "version": one.version,
        "scope": NEEDED if one.part == "runtime" else WHERE_IT_IS_USED,
        "licenses": [{"expression": one.licence}],
        "purl": purl,
        "externalReferences": [
            {"type": "distribution", "url": purl, "comment": "any of its files", "hashes": digests}
        ],
        **embedded(one.name),
    }


def embedded(name: str) -> Json:
    """What is inside the wheels of a distribution; its authors do not tell the version there."""
    if name not in EMBEDDED:
        return {}
    inner, licence = EMBEDDED[name]
    return {
        "components": [
            {"type": "library", "name": inner, "licenses": [{"expression": licence}]},
        ]
    }


def system_package(name: str) -> Json:
    """What the machine has to have."""
    licence, scope, _ = SYSTEM[name]
    return {
        "type": "platform" if name == "python3" else "library",
        "bom-ref": name,
        "name": name,
        "scope": scope,
        "licenses": [{"expression": licence}],
        "purl": f"pkg:deb/debian/{name}",
    }


def graph(listed: Sequence[Component]) -> Json:
    """Who needs whom."""
    loaded = {name: {one for one, (_, _, by) in SYSTEM.items() if by == name} for name in by_whom()}
    needs = {one.name: {*one.needs, *loaded.get(one.name, ())} for one in listed}
    needs[PROJECT] = {*names(asked_for()), *loaded[PROJECT]}
    needs |= {name: set() for name in SYSTEM}
    return [{"ref": name, "dependsOn": sorted(needs[name])} for name in sorted(needs)]


def asked_for() -> list[str]:
    """What the project itself requires, and its iptables backend."""
    return [*project()["dependencies"], *project()["optional-dependencies"]["iptables"]]


def project() -> Json:
    """What the project says of itself."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def by_whom() -> set[str]:
    """All that load something of the operating system."""
    return {by for _, _, by in SYSTEM.values()}


def main(target: Path) -> None:
    """Write the document about the environment that this runs in."""
    place = str(distribution("click").locate_file(""))
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = ("build", "runtime", "iptables")
    target.write_text(bill([place], parts, int(os.environ["SOURCE_DATE_EPOCH"])))
    sys.stdout.write(f"make: wrote {target}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
