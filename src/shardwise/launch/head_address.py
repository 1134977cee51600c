"""Chooses the addresses under which a job's head can be reached from its other nodes.

Invariant: this machine's loopback is never among them. Where no address is left the job is refused with everything that
was tried: a world of one on every node, each of which trains on its own, is the failure that this file is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from shardwise.errors import UserError
from shardwise.launch.nodes.interfaces import interface_towards, is_routable, numbers_of

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")


def is_loopback(address: str) -> bool:
    """Returns whether an address means the machine that uses it, whichever that is."""
    if address.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    with suppress(ValueError):
        number = ip_address(address.partition("%")[0])
        return number.is_loopback or number.is_unspecified
    return False


def given_heads(environ: Mapping[str, str], count: int, fix: str) -> tuple[str, ...]:
    """Returns the addresses of SHARDWISE_HEAD, several with commas between, for a job of `count` nodes. Names are not
    looked up: they may be known to the network only when all nodes have started."""
    named = [word.strip(" []") for word in environ.get("SHARDWISE_HEAD", "").split(",") if word.strip(" []")]
    heads = tuple(word for word in named if count == 1 or not is_loopback(word))
    if not heads:
        said = f"`{', '.join(named)}`" if named else "not set"
        raise UserError(
            f"SHARDWISE_HEAD is {said} in a job of {count} nodes",
            why="the other nodes must find node 0, and localhost is another machine on each of them",
            fix=fix,
        )
    return heads


def reachable_heads(candidates: Iterable[tuple[str, str]], is_head: bool, peers: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the (origin, address) pairs that lead from other nodes to the head, best first. Many systems
    give a machine's own name the address 127.0.1.1: on the head itself (`is_head`) its address on the way to `peers`
    counts in place of that."""
    found: list[str] = []
    tried: list[str] = []
    for origin, address in candidates:
        problem = _problem(address)
        if problem is None:
            found.append(address)
            continue
        tried.append(" ".join(filter(None, [origin, address, problem])))
        if is_head and address and "loopback" in problem:
            found += filter(None, [_own_address_towards(peers)])
    if not found:
        raise UserError(
            "no address leads to node 0 of this job",
            why=f"tried: {'; '.join(tried) or 'nothing, as no variable of the scheduler names a node'}",
            fix="export SHARDWISE_HEAD=ADDRESS in the script, an address of node 0 that the other nodes reach",
        )
    return tuple(dict.fromkeys(found))


def _problem(address: str) -> str | None:
    """Returns why an address leads no other node to the head, or None if it may."""
    if not address:
        return "is not known"
    if is_loopback(address):
        return "is loopback"
    numbers = numbers_of(address)
    if not numbers:
        return "does not resolve"
    return f"is loopback here ({', '.join(sorted(numbers))})" if all(map(is_loopback, numbers)) else None


def _own_address_towards(peers: Sequence[str]) -> str | None:
    """Returns this machine's address on the way to the first of `peers` that there is a way to."""
    for peer in peers:
        for number in numbers_of(peer):
            if (way := interface_towards(number)) is not None and is_routable(way.address):
                return way.address
    return None
