"""First packets of flows, ready to be sent, and what sending them costs."""

import ctypes
import os
import socket
import struct
import time
from typing import ClassVar

from rules.model import Protocol

SLICES = 10  # rounds until flows are forgotten, which takes longer than a round


class _Piece(ctypes.Structure):
    """As struct iovec."""

    _fields_: ClassVar = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Header(ctypes.Structure):
    """As struct msghdr."""

    _fields_: ClassVar = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class _Message(ctypes.Structure):
    """As struct mmsghdr."""

    _fields_: ClassVar = [("header", _Header), ("sent", ctypes.c_uint)]


class Packets:
    """Frames that are ready to be sent, each the first of a flow: its source port is its own. They
    are sent in slices."""

    def __init__(self, protocol: Protocol, to: str, port: int, each: int) -> None:
        count = each * SLICES
        frames = b"".join(_frame(protocol, to, 10_000 + n, port) for n in range(count))
        size = len(frames) // count
        self._each = each
        self._memory = ctypes.create_string_buffer(frames, len(frames))
        self._pieces, self._messages = (_Piece * count)(), (_Message * count)()
        for number, (piece, message) in enumerate(zip(self._pieces, self._messages, strict=True)):
            piece.base, piece.length = ctypes.addressof(self._memory) + number * size, size
            message.header.pieces, message.header.piece_count = ctypes.addressof(piece), 1

    def send(self, through: socket.socket, part: int) -> float:
        """Send a slice; the microseconds of processor time for each of its packets."""
        begin, sent = time.process_time_ns(), 0
        while sent < self._each:
            where = ctypes.byref(self._messages[part * self._each + sent])
            done = _libc.sendmmsg(through.fileno(), where, self._each - sent, 0)
            if done <= 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            sent += done
        return (time.process_time_ns() - begin) / 1000 / self._each


_libc = ctypes.CDLL(None, use_errno=True)


def _frame(protocol: Protocol, to: str, source_port: int, port: int) -> bytes:
    source, target = (socket.inet_aton(address) for address in ("192.0.2.1", to))
    ports = struct.pack(">HH", source_port, port)
    if protocol is Protocol.UDP:
        number, segment = socket.IPPROTO_UDP, ports + struct.pack(">HHI", 12, 0, 0)
    else:
        rest = struct.pack(">IIBBHHH", 1, 0, 5 << 4, 2, 0xFFFF, 0, 0)
        number = socket.IPPROTO_TCP
        pseudo = source + target + struct.pack(">HH", number, len(ports + rest))
        check = _checksum(pseudo + ports + rest)
        segment = ports + rest[:12] + check + rest[14:]
    size = 20 + len(segment)
    header = struct.pack(">BBHHHBBH", 0x45, 0, size, 0, 0, 64, number, 0) + source + target
    header = header[:10] + _checksum(header) + header[12:]
    return bytes.fromhex("020000000002 020000000001 0800") + header + segment


def _checksum(data: bytes) -> bytes:
    """Of the Internet: RFC 1071."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF)
