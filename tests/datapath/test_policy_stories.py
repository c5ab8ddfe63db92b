"""What policies are for, with packets: the three stories of KEP-2079, and that a policy cuts what it
is to cut and nothing that belongs to the namespace, to a reply or to an error."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from rules.model import FORWARDED, Family, Protocol
from tests.datapath.policing import (
    CLOSED,
    PHONE,
    STRANGER,
    Ask,
    Town,
    address,
    answered,
    at,
    machine,
    policed,
    policy,
    served,
    wired,
)
from tests.datapath.publishing import AT, FROM, RANGE, TCP, UDP, serving
from tests.datapath.traffic import pinged
from tests.nodes import KINDS, asked, service_manifest, socket_in
from tests.spaces import eventually, ip, portranger, process, run, within
from tests.spaces import ip as do_ip
