"""Waiting until every packet that was on its way has passed.

Packets go through rules and maps inside read-side sections of RCU. When a grace period has ended,
none is left that came before it began: what older rules asked for can go.
"""

import ctypes
import platform
import time

CALLS = {"x86_64": 324, "i686": 375, "armv7l": 389, "ppc64le": 365, "s390x": 356}
GENERIC = 283  # on all newer machines, such as aarch64 and riscv64
GLOBAL = 1  # MEMBARRIER_CMD_GLOBAL: the kernel calls synchronize_rcu()
PAUSE = 0.1  # seconds; a packet takes microseconds, and a grace period rarely 50 ms


def wait_for_packets() -> None:
    """For a grace period: 8 to 16 ms with 250 ticks a second. Kernels with processors that have no
    tick (nohz_full) refuse to be asked, and so do some sandboxes; then a pause stands for it."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(CALLS.get(platform.machine(), GENERIC), GLOBAL, 0, 0) != 0:
        time.sleep(PAUSE)
