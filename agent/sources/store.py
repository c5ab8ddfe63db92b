"""What outlives the daemon: the last good text of each file or object, who was given which node
ports, and which namespaces are still to be cleared. Where it cannot be written or read, we go on
without it and say so. What could not be written is tried again with back-off, all of it in one go.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

from agent.backoff import Backoff
from agent.sources.meaning import Enough, Progress
from rules.model import Protocol
from rules.node_ports import Held, Holder
from rules.ports import PortRange

FORMAT = 1
ASIDE = ".corrupt"
LEAVING = "leaving.json"
NODE_PORTS = "node-ports.json"
TEXTS = "last-good"

WRITES = Backoff(first=1.0, longest=60.0)  # of rounds, in each of which everything is tried
QUIET = 600.0  # seconds after which trouble that goes on is told again

Made = TypeVar("Made")
Warn = Callable[[str], None]


class Store:
    """A directory that only we write to, a small file for each manifest."""

    def __init__(
        self, directory: str, warn: Warn, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = Path(directory)
        self._records: dict[str, object] = {}  # as stored by this run
        self._unwritten: dict[str, object] = {}  # contents of records that could not be written
        self._texts = Path(directory, TEXTS)
        self._names = Path(directory, LEAVING)
        self._node_ports = Path(directory, NODE_PORTS)
        self._given: list[list[object]] | None = None  # as stored by this run
        self._warn, self._clock = warn, clock
        self._troubles: dict[Path, str] = {}  # why each is not written
        self._tried: dict[Path, tuple[str, int]] = {}  # what of it failed, and in which round
        self._round, self._rounds = 0, WRITES
        self._reported = -math.inf
        self.leaving: frozenset[str] = frozenset()  # namespaces that are still to be cleared

    @property
    def trouble(self) -> str:
        """Why something is not written that should be; one for all, with their number."""
        reasons = list(self._troubles.values())  # at once: a look at the node writes in a thread
        why = reasons[0] if reasons else ""
        return f"{why} ({len(reasons)} files)" if len(reasons) > 1 else why

    @property
    def due(self) -> float:
        """When what could not be written is to be tried again."""
        return self._rounds.until if self._tried else math.inf

    def waits(self, file: str) -> bool:
        """Whether the file was tried in vain, and it is not time to try again."""
        return self._is_tried(self._path(file))

    def _is_tried(self, path: Path) -> bool:
        if path not in self._tried:
            return False
        if self._rounds.due(self._clock()):
            self._begin_round()
        return self._tried[path][1] == self._round

    def _begin_round(self) -> None:
        self._round += 1
        self._rounds = self._rounds.struck(self._clock())

    def report(self) -> None:
        """Say what cannot be written, in one line now and then; to be called after a round."""
        now = self._clock()
        if self._tried and self._rounds.due(now):
            self._begin_round()  # nobody had anything to write: then not at once again
        if not self._troubles:
            self._reported = -math.inf
        elif now - self._reported >= QUIET:
            self._reported = now
            self._warn(f"{self.trouble}; what is not written cannot be used after a restart")

    def load(self) -> dict[str, str]:
        """The last good texts that an earlier run left, by file; what is corrupt is set aside."""
        texts: dict[str, str] = {}
        for path in self._files():
            record = self._read(path)
            if isinstance(record, dict) and path == self._path(str(record.get("file"))):
                texts[str(record["file"])] = str(record.get("text"))
            elif record is not None:
                self._set_aside(path, "it is no record of ours")
        names = self._read(self._names)
        if isinstance(names, list):
            self.leaving = frozenset(map(str, names))
        return texts

    def keep(self, file: str, text: str) -> bool:
        """This is what the file means now; whether it could be written down. What failed is not
        tried again before it is time."""
        return self._write(self._path(file), {"file": file, "text": text})

    def drop(self, file: str) -> None:
        """The file is gone."""
        self._forget(self._path(file))
        try:
            self._path(file).unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"cannot remove what was stored of {file}: {error.strerror}")

    def leave(self, names: Iterable[str]) -> None:
        """These namespaces are still to be cleared."""
        wanted = frozenset(names)
        if wanted != self.leaving:
            self.leaving = wanted if self._write(self._names, sorted(wanted)) else frozenset()

    def node_ports(self) -> list[Held]:
        """Who was given which node ports, as far as that is known."""
        record = self._read(self._node_ports)
        if record is None:
            self._given = None  # whatever we wrote is not there any more
        try:
            return [
                _held(*entry)
                for entry in record or ()  # type: ignore[attr-defined]
            ]
        except (TypeError, ValueError):
            self._given = None
            self._set_aside(self._node_ports, "it is no record of ours")
            return []

    @property
    def has_published(self) -> bool:
        """Whether an earlier run published anything on the node."""
        return self._node_ports.exists()

    def keep_node_ports(self, pairs: Iterable[Held]) -> None:
        """These were given; on the disk when this returns, so that nobody else gets them."""
        wanted: list[list[object]] = [
            [one.owner, one.port, one.protocol.value, ports.first, ports.last]
            for one, ports in pairs
        ]
        if wanted != self._given and self._write(self._node_ports, wanted, durable=True):
            self._given = wanted

    def forget_node_ports(self) -> None:
        """Nothing is published any more."""
        self._given = None
        self._forget(self._node_ports)
        try:
            self._node_ports.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"cannot remove {self._node_ports}: {error.strerror}")

    def record(self, name: str) -> object:
        """The content of a file of its own, also where it could not be written; None: there is none
        that can be read."""
        if name in self._unwritten:
            return self._unwritten[name]
        return self._read(self._directory / name)

    def keep_record(self, name: str, content: object) -> None:
        """This is its content; on the disk when this returns."""
        path = self._directory / name
        if self._records.get(name) == content:
            return
        written = self._write(path, content, durable=True)
        (self._records if written else self._unwritten)[name] = content
        (self._unwritten if written else self._records).pop(name, None)

    def drop_record(self, name: str) -> None:
        """It has none any more."""
        path = self._directory / name
        self._records.pop(name, None)
        self._unwritten.pop(name, None)
        self._forget(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"cannot remove {path}: {error.strerror}")

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self._texts.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn(f"cannot read {self._texts}: {error.strerror}")
            return []

    def _path(self, file: str) -> Path:
        return self._texts / f"{sha256(_bytes(file)).hexdigest()[:32]}.json"

    def _read(self, path: Path) -> object:
        """The content of a stored file; None where there is none that could be trusted."""
        try:
            stored = json.loads(path.read_bytes())
            content = stored["content"]
            if stored["format"] == FORMAT and stored["sha256"] == digest(content):
                return content
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot read {path}: {error.strerror}")
            return None
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        self._set_aside(path, "it is corrupt")
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        self._warn(f"setting {path} aside as {path.name}{ASIDE}: {why}")
        with contextlib.suppress(OSError):
            path.replace(f"{path}{ASIDE}")

    def _write(self, path: Path, content: object, *, durable: bool = False) -> bool:
        """Whole or not at all: into a new file, which then takes the name."""
        scratch = Path(f"{path}.new")
        seal = digest(content)
        if not durable and self._is_tried(path) and self._tried[path][0] == seal:
            return False
        record = {"format": FORMAT, "sha256": seal, "content": content}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with scratch.open("w", encoding="utf-8") as file:
                file.write(json.dumps(record))
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            scratch.replace(path)
            if durable:
                _sync(path.parent)
        except OSError as error:
            self._troubles[path] = f"cannot write {path}: {error.strerror}"
            if not durable:
                self._failed(path, seal)
            with contextlib.suppress(OSError):
                scratch.unlink()
            if not durable:  # who was given which ports stays true of all but the newest
                with contextlib.suppress(OSError):
                    path.unlink()  # what is no longer true is worse than nothing
            return False
        self._forget(path)
        return True

    def _failed(self, path: Path, seal: str) -> None:
        if self._rounds.due(self._clock()):
            self._begin_round()
        self._tried[path] = seal, self._round

    def _forget(self, path: Path) -> None:
        """It is written, or not wanted any more."""
        self._troubles.pop(path, None)
        self._tried.pop(path, None)
        if not self._tried:
            self._rounds = WRITES


class Texts(Generic[Made]):
    """The last good texts of what there is of one kind. Each is written from what it is made of,
    and only when that has changed."""

    def __init__(
        self, store: Store, earlier: Mapping[str, str], write: Callable[[Made], str]
    ) -> None:
        self._store, self._write = store, write
        self.earlier = dict(earlier)  # those of another run, until ours take their places
        self._made: dict[str, Made] = {}  # what ours are made of
        self._unwritten: dict[str, Made] = {}  # which could not be
        self._whole: Mapping[str, Made] | None = None  # all of which is stored

    def remember(self, wanted: Mapping[str, Made], beat: Progress, enough: Enough) -> bool:
        """Store what changed, and drop what is not wanted any more, until it is enough; whether
        that was all that can be done now."""
        if wanted is self._whole:
            return True
        known = self.earlier.keys() | self._made.keys() | self._unwritten.keys()
        for label in known - wanted.keys():
            self.earlier.pop(label, None)
            self._made.pop(label, None)
            self._unwritten.pop(label, None)
            self._store.drop(label)
        failed = False
        for label, made in wanted.items():
            if label in self._made and self._made[label] == made:
                continue
            self._made.pop(label, None)
            if self._unwritten.get(label) == made and self._store.waits(label):
                failed = True
                continue
            text = self._write(made)
            if self.earlier.pop(label, None) == text or self._store.keep(label, text):
                self._made[label] = made
                self._unwritten.pop(label, None)
                beat()
            else:
                self._unwritten[label] = made
                failed = True  # the next time
            if enough():
                return failed
        self._whole = None if failed else wanted
        return True


def _held(owner: object, port: object, protocol: object, first: object, last: object) -> Held:
    """One line of who was given what; raises for what we would not have written."""
    if not (isinstance(owner, str) and isinstance(port, str)):
        raise TypeError(owner)
    if type(first) is not int or type(last) is not int:
        raise TypeError(first)
    return Holder(owner, port, Protocol(protocol)), PortRange(first, last)


def _bytes(file: str) -> bytes:
    """A name that is no file's may have halves of characters in it that no file name has."""
    try:
        return file.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return file.encode(errors="surrogatepass")


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, not only what is in the files."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(content: object) -> str:
    """What seals a content: it tells what was cut off, not who wrote it."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
