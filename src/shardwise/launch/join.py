"""Joins a job whose ranks somebody else starts, one process each: torchrun, mpirun, `srun` with one task per GPU.

Rank 0 prepares the run; the others see its directory, or have a mirror of it on their node (nodes/mirror.py). Who
started the ranks also has the store at which they meet: whether strangers can reach that is not in our hands here.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cluster.describe.machine import Machine, this_machine
from shardwise.config.load import Loaded, load_config
from shardwise.errors import Exit, UserError
from shardwise.files import refused
from shardwise.launch.allocator import set_allocator
from shardwise.launch.local import sockets_at
from shardwise.launch.nodes.follower import Follower
from shardwise.launch.nodes.head import JobHead
from shardwise.launch.nodes.hello import check_same, config_digest, hello
from shardwise.launch.nodes.interfaces import (
    choose_interface,
    interfaces,
    is_routable,
    numbers_of,
    own_address,
    reachable,
)
from shardwise.launch.nodes.mirror import (
    Outbox,
    digest_of,
    fetch,
    files_to_read,
    open_mirror,
    piece_of,
    sees,
    send_written,
    shown,
    take_in,
)
from shardwise.launch.place import NodePlace, RankPlace, own_place
from shardwise.launch.start import PlannedRun, starting_line, write_run
from shardwise.private_names import check_private_names
from shardwise.run.build import corpus_of, model_spec
from shardwise.run.own_parts import OwnParts
from shardwise.run.ranks import Ranks, ranks_from_environment
from shardwise.run.rundir import RunDir
from shardwise.terminal import say

if TYPE_CHECKING:
    import torch

TIME_TO_REPORT_S = 1.0  # seconds; torchrun ends all ranks when one exits: the first one gets time to say why
FETCH_S = 60.0  # seconds for one piece of a file
LOOK_EVERY_S = 0.5

Prepare = Callable[[int, Machine], tuple[RunDir, PlannedRun]]
"""From the number of ranks and what all nodes have together to the run directory and the run, ready to start."""


def take_place(place: RankPlace) -> None:
    """Says where this process stands in torchrun's variables, which torch and run/ranks.py read."""
    if {"RANK", "LOCAL_RANK"} <= os.environ.keys():  # torchrun has
        return
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world),
        MASTER_ADDR=place.master,
        MASTER_PORT=str(place.port),
    )


def as_rank() -> bool:
    """Returns whether somebody has started this process, a Python program, as one rank of several, and takes its
    place. One process per node of several is refused: a program's functions cannot be sent to other nodes."""
    place = own_place(os.environ)
    if isinstance(place, NodePlace) and place.count > 1:
        raise UserError(
            f"{place.scheduler} started this program once on each of {place.count} nodes",
            why="a program has functions and data of its own, so each rank must run it; this is one process per node",
            fix="one task per GPU (srun --ntasks-per-node=8), or torchrun --nnodes in front of the program",
        )
    if isinstance(place, RankPlace):
        take_place(place)
    return isinstance(place, RankPlace)


def join(
    prepare: Prepare,
    loaded: Loaded,
    *,
    verify: bool = True,
    own: OwnParts | None = None,
    from_step: int | None = None,
) -> int:
    """Trains as one rank of a job that somebody else has started, and returns the exit code: rank 0 prepares, all agree
    on the run directory."""
    if (ranks := ranks_from_environment()).is_first:
        say(starting_line(ranks.world))
    set_allocator(loaded.config.speed.allocator, os.environ)
    os.environ.update(_sockets(loaded.config.comm.interface, ranks))
    import torch

    check_private_names()
    from shardwise.launch.worker import run_worker, start_process_group

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.local_rank) if use_cuda else torch.device("cpu")
    if ranks.world > 1:
        start_process_group(loaded.config.comm, device)
    error: UserError | None = None
    planned: PlannedRun | None = None
    announced: dict[str, Any] = {}
    with ExitStack() as held:
        hellos = _said_by_all(hello(ranks.rank, config_digest(loaded.config), 0), ranks, device)
        if ranks.is_first:
            try:
                check_same(hellos, "rank")
                run, planned = prepare(ranks.world, this_machine().times(ranks.nodes))
                held.enter_context(run.lock())
                write_run(run, planned)
                announced = {
                    "path": str(run.path.resolve()),
                    "sign": held.enter_context(shown(run)),
                    "files": files_to_read(run, from_step),
                    "digest": digest_of(run),
                    "text": planned.corpus.fingerprint,
                }
            except (UserError, OSError) as problem:
                error = problem if isinstance(problem, UserError) else refused(problem)
                announced = {"exit": int(error.code)}
        if ranks.world > 1:
            announced = json.loads(_share_text(json.dumps(announced) if ranks.is_first else "", device))
        if error is not None:
            raise error
        if "path" in announced:
            here = RunDir(Path(announced["path"]))
            if ranks.nodes > 1:
                _see_run(here, announced, ranks, device, loaded.config.comm.interface, held)
                _check_run(here, announced, ranks, device, reads_text=own is None)
            return run_worker(here, ranks, planned, from_step, verify=verify, own=own)
        time.sleep(TIME_TO_REPORT_S)
        return int(announced["exit"])


def _sockets(interface: str | None, ranks: Ranks) -> dict[str, str]:
    """Returns the variables that tell gloo and NCCL which interface to use: with several nodes the one towards rank 0,
    with one node the asked one or that of the address at which ranks meet. By themselves they look up this host's own
    name, which often means 127.0.1.1, or nothing."""
    master = os.environ.get("MASTER_ADDR", "")
    if ranks.nodes > 1:
        if not reachable([master]):
            raise _meets_itself(master)
        return sockets_at(choose_interface(interface, [master] if master else []).name)
    if interface is None and not any(is_routable(number) for number in numbers_of(master)):
        return {}
    return sockets_at(choose_interface(interface, [master]).name)


def _meets_itself(master: str) -> UserError:
    numbers = ", ".join(numbers_of(master)) or "an unknown name"
    own = next((found.address for found in interfaces() if is_routable(found.address)), "ADDRESS")
    return UserError(
        f"the ranks of this job were told to meet at {master or 'no address'} ({numbers})",
        why="that is another machine on each node: the first node does not know its own name, and torchrun believed it",
        fix=f"on each node torchrun --local-addr with its own address (here {own}); or --master-addr and --node-rank",
        code=Exit.HARDWARE,
    )


def _see_run(
    run: RunDir, announced: dict[str, Any], ranks: Ranks, device: torch.device, interface: str | None, held: ExitStack
) -> None:
    """Collective. Makes sure that every node has the run directory: the shared one, or a mirror of it."""
    shares = sees(run.path, announced["sign"])
    answers = _said_by_all({"shares": shares, "node": ranks.rank // ranks.local_world}, ranks, device)
    mirrors = sorted({said["node"] for said in answers.values() if not said["shares"]})
    if not mirrors:
        return
    way: dict[str, Any] = {}
    if ranks.is_first:
        say(f"nodes    {run.path} is not shared with node {', '.join(map(str, mirrors))}: mirrored there")
        address = own_address(interface, [os.environ.get("MASTER_ADDR", "")]).address
        secret = secrets.token_bytes(16)
        head = held.enter_context(JobHead(address, 0, ranks.nodes, secret))
        held.enter_context(_Serving(head, run, announced["files"], len(mirrors)))
        way = {"address": address, "port": head.port, "secret": secret.hex()}
    way = json.loads(_share_text(json.dumps(way) if ranks.is_first else "", device))
    problem = ""
    if ranks.local_rank == 0 and not shares:
        try:
            said = hello(ranks.rank // ranks.local_world, "", 0)
            found = held.enter_context(
                Follower([way["address"]], way["port"], bytes.fromhex(way["secret"]), said, FETCH_S)
            )
            open_mirror(run.path, f"{way['address']}:{run.path}", announced["files"])
            fetch(run.path, announced["files"], _asking(found))
            held.enter_context(_Sending(found, Outbox(run.path)))
        except (UserError, OSError) as error:
            problem = str(error)
    problems = [said["problem"] for said in _said_by_all({"problem": problem}, ranks, device).values()]
    if first := next(filter(None, problems), ""):
        raise UserError(
            "a node cannot mirror this run",
            why=" ".join(first.split()),
            fix="a run.dir on a shared file system, or another run.name",
        )


def _check_run(run: RunDir, announced: dict[str, Any], ranks: Ranks, device: torch.device, reads_text: bool) -> None:
    """Collective. Refuses ranks that would execute another config or plan than the first one, or train on another
    text; the text is read by one rank of each other node."""
    found = {"host": socket.gethostname(), "digest": digest_of(run), "text": announced["text"]}
    if reads_text and ranks.local_rank == 0 and not ranks.is_first:
        config = load_config(run.config).config
        found["text"] = corpus_of(config, model_spec(config.model), progress=False).fingerprint
    for rank, said in _said_by_all(found, ranks, device).items():
        if said["digest"] != announced["digest"]:
            raise UserError(
                f"rank {rank} ({said['host']}) has another config or plan in {run.path} than rank 0",
                why="ranks of one job must execute the same plan",
                fix="remove the directory on that node if it is an old mirror; else choose another run.name",
                code=Exit.HARDWARE,
            )
        if said["text"] != announced["text"]:
            raise UserError(
                f"the text on {said['host']} is not the one on the first node",
                why="data.source has other content or another tokenizer there",
                fix="the same files on every node, or a data.source on a shared file system",
            )


def _asking(follower: Follower) -> Callable[[str, int], bytes]:
    def ask(name: str, offset: int) -> bytes:
        follower.link.send("get", name=name, offset=offset)
        frame = follower.link.receive("piece", timeout=FETCH_S)
        return frame.data if frame else b""

    return ask


class _Serving:
    """Rank 0's thread that hands out files of the run and takes in what ranks of other nodes write."""

    def __init__(self, head: JobHead, run: RunDir, files: dict[str, int], num_mirrors: int):
        self.head, self.run, self.files, self.num_mirrors = head, run, files, num_mirrors
        self._left: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mirrors", daemon=True)

    def __enter__(self) -> _Serving:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Waits a moment for what other nodes have written last."""
        self._over.set()
        self._thread.join(10.0)

    def _serve(self) -> None:
        deadline = float("inf")
        while len(self._left) < self.num_mirrors and time.monotonic() < deadline:
            for index, link in list(self.head.links.items()):
                while (frame := link.receive("get", "written", "left", timeout=0.02)) is not None:
                    if frame.words["kind"] == "get":
                        name, offset = str(frame.words.get("name")), int(frame.words.get("offset", 0))
                        link.send("piece", piece_of(self.run, self.files, name, offset))
                    elif frame.words["kind"] == "written":
                        take_in(self.run, frame.words, frame.data)
                    else:
                        self._left.add(index)
                if link.lost:
                    self._left.add(index)
            if self._over.is_set() and deadline == float("inf"):
                deadline = time.monotonic() + 5.0
            time.sleep(0.05)


class _Sending:
    """The thread of a node's first rank that sends what its ranks write to rank 0."""

    def __init__(self, follower: Follower, outbox: Outbox):
        self.link, self.outbox = follower.link, outbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="mirror", daemon=True)

    def __enter__(self) -> _Sending:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _send(self) -> None:
        is_over = False
        while not is_over and not self.link.lost:
            is_over = self._over.wait(LOOK_EVERY_S)
            send_written(self.link, self.outbox, is_over)
        self.link.send("left")
        self.link.flush()


def _said_by_all(own: dict[str, Any], ranks: Ranks, device: torch.device) -> dict[int, dict[str, Any]]:
    """Collective. Returns what every rank says, by rank; sent as plain bytes: nothing is unpickled."""
    if ranks.world == 1:
        return {0: own}
    import torch
    import torch.distributed as dist

    data = json.dumps(own).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks.world)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    room = int(max(sizes))
    mine = torch.zeros(room, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(found, mine)
    texts = (bytes(part.tolist())[: int(size)] for part, size in zip(found, sizes, strict=True))
    return {rank: json.loads(text) for rank, text in enumerate(texts)}


def _share_text(text: str, device: torch.device) -> str:
    """Collective. Returns rank 0's text on every rank, sent as plain bytes: nothing is unpickled."""
    import torch
    import torch.distributed as dist

    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    if int(size) == 0:
        return ""
    body = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if data:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, 0)
    return bytes(body.tolist()).decode()
