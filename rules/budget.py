"""What published ranges may cost: an element for each endpoint, or for each port of each where the
target ports are others; and time to give endpoints their shares. Without a limit, one Service could
take all the memory of every agent, or hold it up."""

from collections.abc import Iterable

from rules.model import Pending
from rules.publish import CELLS, Face
from rules.services import Endpoint
from rules.values import replace

MOST_OF_A_FACE = 1 << 16
MOST_ENDPOINTS = 1000  # of a face
STICKY = CELLS // 8  # more for each where clients keep theirs, for the numbers of its share
MOST = 1 << 17  # 2 KiB each, while they are written
WAY_OUT = "a range costs least where its target ports are the node ports"


def affordable(faces: Iterable[Face]) -> tuple[list[Face], list[Pending], list[str]]:
    """Who comes first is served first: the faces with as many endpoints as there is room for, those
    for which there is none, and what a person should know of that."""
    kept: list[Face] = []
    refused: list[Pending] = []
    notes: list[str] = []
    spent = 0
    for face in faces:
        room = min(MOST_OF_A_FACE, MOST - spent)
        given: list[Endpoint] = []
        sticky = face.service.affinity is not None and len(face.endpoints) > 1
        for one in face.endpoints[:MOST_ENDPOINTS]:
            cost = 1 if one.port == face.ports.first else len(face.ports)
            cost += STICKY if sticky else 0
            if cost <= room:
                given.append(one)
                room, spent = room - cost, spent + cost
        if len(given) == len(face.endpoints):
            kept.append(face)
            continue
        told = f"{len(face.endpoints)} endpoints for each port of {face.ports} are too many"
        if given:
            kept.append(replace(face, endpoints=tuple(given)))
            full = len(given) == MOST_ENDPOINTS
            why = f"no port has more than {MOST_ENDPOINTS}" if full else WAY_OUT
            words = f"{told}: {len(given)} of {len(face.endpoints)} get flows; {why}"
            notes.append(f"{face.name}: {words}")
        else:
            refused.append(Pending(face.name, f"{face} cannot be published: {told}; {WAY_OUT}"))
    return kept, refused, notes
