"""Hosts that are network namespaces of this machine, with links that tc shapes; needs root, and `ip` and `tc`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

#: What a host calls its network device: for GLOO_SOCKET_IFNAME.
DEVICE = "wire0"
#: What of a link is left for data: 1448 bytes of every frame, which tc counts as 1514.
PAYLOAD = 1448 / 1514


def ip(*words: str) -> None:
    """Runs ip, or tc in a namespace."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, megabits: int, burst_bytes: int = 1 << 18) -> Iterator[list[list[str]]]:
    """So many network namespaces on one switch; yields the command prefixes that enter them.

    Each sends at most `megabits` (10^6 bits) a second, and receives at the same time; `burst_bytes` that follow a pause
    are not held back.
    """
    switch = f"pycomm{os.getpid()}switch"
    names = [f"pycomm{os.getpid()}host{i}" for i in range(count)]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            peer = ["peer", "name", f"port{i}", "netns", switch]
            ip("link", "add", DEVICE, "netns", name, "type", "veth", *peer)
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            rate = ["rate", f"{megabits}mbit", "burst", str(burst_bytes), "latency", "50ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *rate)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
