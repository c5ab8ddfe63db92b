"""What published ranges may cost. A range whose target ports are others takes an element for each
port and endpoint: without a limit, one Service could take all the memory of every agent."""

from collections.abc import Iterable

from rules.model import Pending
from rules.publish import Face
from rules.values import replace

MOST_OF_A_FACE = 1 << 16
MOST = 1 << 17  # 2 KiB each, while they are written
WAY_OUT = "target ports that are the node ports cost nothing"


def affordable(faces: Iterable[Face]) -> tuple[list[Face], list[Pending], list[str]]:
    """Who comes first is served first: the faces with as many endpoints as there is room for, those
    for which there is none, and what a person should know of that."""
    kept: list[Face] = []
    refused: list[Pending] = []
    notes: list[str] = []
    spent = 0
    for face in faces:
        shifted = [one for one in face.endpoints if one.port != face.ports.first]
        room = min(MOST_OF_A_FACE, MOST - spent) // len(face.ports)
        spent += min(room, len(shifted)) * len(face.ports)
        if room >= len(shifted):
            kept.append(face)
            continue
        given = [one for one in face.endpoints if one not in shifted[room:]]
        told = f"{len(shifted)} endpoints with other ports than {face.ports} are too many"
        if given:
            kept.append(replace(face, endpoints=tuple(given)))
            words = f"{told}: {len(given)} of {len(face.endpoints)} get flows; {WAY_OUT}"
            notes.append(f"{face.name}: {words}")
        else:
            refused.append(Pending(face.name, f"{face} cannot be published: {told}; {WAY_OUT}"))
    return kept, refused, notes
