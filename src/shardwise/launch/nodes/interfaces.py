"""Finds the address and the network interface by which this node talks to the other nodes of a job.

A name server often says that a node's own name means 127.0.1.1, or knows no such name at all; ranks that believe it
wait for each other for ever, or each trains a world of its own. Invariant: with several nodes no address that leaves
this file is a loopback address, and where there is none the error names what was tried. Linux only: elsewhere jobs of
several nodes are refused.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import Exit, UserError

GET_ADDRESS = 0x8915  # SIOCGIFADDR
IPV6_TABLE = Path("/proc/net/if_inet6")
ANY_PORT = 9  # of a UDP socket that is connected, which sends nothing


@dataclass(frozen=True)
class Interface:
    """A network interface of this node, and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def interfaces() -> list[Interface]:
    """Returns this node's interfaces with their addresses, IPv4 first; one without an address is left out."""
    names = [name for _, name in socket.if_nameindex()]
    found = [Interface(name, address) for name in names if (address := _ipv4_of(name))]
    return found + _ipv6_interfaces()


def is_routable(address: str) -> bool:
    """Returns whether other nodes may reach an address: it is a number, and neither loopback nor valid on one link
    only."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (number.is_loopback or number.is_link_local or number.is_unspecified)


def numbers_of(name: str) -> list[str]:
    """Returns the addresses that a host's name means here; empty where nobody knows it."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def reachable(heads: Sequence[str]) -> list[str]:
    """Returns the numbers of the head's addresses that another node may reach, in their order."""
    return list(dict.fromkeys(number for head in heads for number in numbers_of(head) if is_routable(number)))


def interface_towards(address: str) -> Interface | None:
    """Returns the interface by which packets leave for an address; None where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))  # nothing is sent: the system only chooses a way
        source = probe.getsockname()[0]
        return next((found for found in interfaces() if _same(found.address, source)), None)
    return None


def choose_interface(asked: str | None, heads: Sequence[str]) -> Interface:
    """Returns the interface of this node for a job of several nodes: the one that `comm.interface` names, else the one
    towards the head. `asked` may list several names, of which each node has one, or be a network such as
    10.0.0.0/16."""
    own = [found for found in interfaces() if is_routable(found.address)]
    if asked is not None:
        return _asked_for(asked, own)
    for address in reachable(heads):
        towards = interface_towards(address)
        if towards is not None and is_routable(towards.address):
            return towards
    raise UserError(
        f"{socket.gethostname()} has no address at which other nodes could reach it, or does not know the head's",
        why=f"tried for the head: {_tried(heads)}; interfaces here: {_listed(interfaces())}",
        fix="comm.interface=NAME, or SHARDWISE_HEAD=ADDRESS with the address of the first node",
        code=Exit.HARDWARE,
    )


def own_address(asked: str | None, heads: Sequence[str]) -> Interface:
    """Returns the address at which this node, the head, is to be found: one of those at which the other nodes look for
    it, whatever interface the ranks use; else the first one of `comm.interface`."""
    own = [found for found in interfaces() if is_routable(found.address)]
    known = [found for head in reachable(heads) for found in own if _same(found.address, head)]
    return known[0] if known else choose_interface(asked, heads)


def local_interface(asked: str | None) -> str | None:
    """Returns the name of the interface that `comm.interface` means on this node, for ranks that all run here; None
    where it asks for none."""
    return None if asked is None else _asked_for(asked, interfaces()).name


def _asked_for(asked: str, own: Sequence[Interface]) -> Interface:
    words = [word.strip() for word in asked.split(",") if word.strip()]
    for word in words:
        for found in own:
            if found.name == word or _is_within(found.address, word):
                return found
    raise UserError(
        f"comm.interface = {asked}: {socket.gethostname()} has no such interface with an address of its own",
        why=f"interfaces here: {_listed(interfaces())}",
        fix="name one of them, one per kind of node (`eth0,ens3`), or their network (`10.0.0.0/16`)",
    )


def _is_within(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _same(one: str, other: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    return False


def _tried(heads: Sequence[str]) -> str:
    said = [f"{head} ({', '.join(numbers_of(head)) or 'nobody knows it'})" for head in heads]
    return ", ".join(said) or "nothing, the scheduler does not say where it is"


def _listed(found: Sequence[Interface]) -> str:
    return ", ".join(map(str, found)) or "none"


def _ipv4_of(name: str) -> str | None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _ipv6_interfaces() -> list[Interface]:
    try:
        lines = IPV6_TABLE.read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [Interface(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows if len(row) == 6]
