"""The processes behind ranks.py: the template, which forks ranks and reaps them, and the rank, which runs jobs.

Invariant: the template runs no job and starts no thread, so what is forked from it is always the same clean state:
torch and shardwise imported, nothing used. It ends when the pool's end of its socket closes, and its ranks end with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

STACK_SIGNAL = signal.SIGUSR2
LOST_PEER = ("closed by peer", "reset by peer", "Connection refused", "Broken pipe", "Connection closed")
"""What gloo says when another rank has gone."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    number: int
    world: int
    timeout: float
    path: list[str]
    cwd: str
    module: str
    name: str
    payload: bytes  # packed (args, kwargs)


@dataclass(frozen=True)
class Trouble:
    weight: int  # 0 died, 1 raised, 2 only lost a peer: the smallest explains the others
    at: float  # on the clock that all processes share
    headline: str
    text: str


def pack(value: Any) -> bytes:
    """A pickle that holds the bytes of tensors. torch's own way would pass a file descriptor for each tensor."""
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a {type(value).__name__} cannot leave its process: send its full_tensor() or to_local()")
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
        is_parameter = isinstance(value, torch.nn.Parameter)
        return _unpack_tensor, (pickle.PickleBuffer(data), plain.dtype, plain.shape, is_parameter, value.requires_grad)


def _unpack_tensor(data: bytearray, dtype: Any, shape: Any, is_parameter: bool, requires_grad: bool) -> Any:
    import torch

    plain = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(plain, requires_grad) if is_parameter else plain.requires_grad_(requires_grad)


def be_template(control_fd: str, folder: str) -> None:
    import pytest  # noqa: F401  test modules need it
    import torch._dynamo  # every optimizer does
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    import shardwise.launch.worker  # and with it what it imports: once here, not in every rank
    import shardwise.run.block_times

    torch.set_num_threads(1)
    shardwise.run.block_times.BUDGET_S = 0.0  # a run of milliseconds: three turns are timed, not a second of them
    gc.collect()
    gc.freeze()  # the hundred thousands of objects of these modules are not walked again after each job
    control, alive = socket.socket(fileno=int(control_fd)), set()
    control.send(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1000, 1)
        if not request:
            break
        tag, verb, *words = request.decode().split()
        if verb == "fork":
            starter, pid = os.getpid(), os.fork()
            if pid == 0:
                control.close()
                _be_rank(descriptors[0], starter, folder, *words)
            os.close(descriptors[0])
            alive.add(pid)
            control.send(f"{tag} {pid}".encode())
        elif verb == "import":
            for name in words:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
            control.send(f"{tag} done".encode())
        else:
            pids = [int(word) for word in words]
            alive -= set(pids)
            control.send(" ".join([tag, *map(str, _kill(pids))]).encode())
    _kill(alive)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(pids: Iterable[int]) -> list[int]:
    """Kill ranks with what they have started; the exit codes. A rank that is dead but not yet reaped keeps its code."""
    pids = list(pids)
    for pid in pids:
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _be_rank(channel_fd: int, starter: int, folder: str, number: str, port: str) -> NoReturn:
    """Takes jobs until the channel closes. Never returns into the template's code."""
    try:
        os.setpgid(0, 0)
        with suppress(AttributeError):  # Linux: die with the template even when that was killed
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:
            os._exit(1)
        descriptor = os.open(f"{folder}/{number}.output", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        stack_file = open(f"{folder}/{number}.stack", "ab", buffering=0)  # noqa: SIM115  open as long as this process lives
        faulthandler.enable(stack_file)
        faulthandler.register(STACK_SIGNAL, stack_file, all_threads=True)
        os.set_inheritable(channel_fd, False)
        channel = Connection(channel_fd)  # held here: the pool takes its end for the death of the process
        _take_jobs(channel, int(number), int(port))
    except EOFError:  # the pool has closed
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _take_jobs(channel: Connection, rank: int, port: int) -> NoReturn:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    while True:
        job: Job = pickle.loads(channel.recv_bytes())
        try:
            with warnings.catch_warnings():
                result = _run(job, rank, dist.PrefixStore(f"job{job.number}", store))
        except BaseException as error:
            # First the report, then the end of this process: peers that wait for it learn of it, and complain later.
            channel.send_bytes(pickle.dumps(_trouble_of(error)))
            os._exit(1)
        channel.send_bytes(result)
        del result
        channel.recv_bytes()  # all the others are done too
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _forget()
        channel.send_bytes(pickle.dumps("clean"))


def _run(job: Job, rank: int, store: Any) -> bytes:
    import numpy as np
    import torch
    import torch.distributed as dist

    sys.path[:] = job.path
    os.chdir(job.cwd)
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.world)))
    function: Any = importlib.import_module(job.module)
    for name in job.name.split("."):
        function = getattr(function, name)
    args, kwargs = pickle.loads(job.payload)
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    limit = timedelta(seconds=job.timeout + 60)  # the pool decides what a hang is, not gloo
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
    return pack(function(*args, **kwargs))


def _trouble_of(error: BaseException) -> Trouble:
    """As text, because not every exception survives a pickle; without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    headline = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    lost_peer = isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in LOST_PEER)
    return Trouble(2 if lost_peer else 1, time.monotonic(), headline, text)


def _forget() -> None:
    """What torch keeps beyond a process group. Meshes of one shape compare equal, so caches would hand out dead
    ones."""
    import torch
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor import _random, debug

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    for held in vars(_mesh_resources).values():
        held.clear()
    _random._rng_tracker = None
    for name in dir(debug):  # two caches; what clears them has other names in other versions of torch
        if name.startswith("_clear_"):
            getattr(debug, name)()
    for cache in _caches_of_torch():
        cache.cache_clear()
    gc.collect()


@functools.cache
def _caches_of_torch() -> list[Any]:
    """The memoised functions of torch.distributed, some of which have a mesh among their arguments."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]
    memoised = type(_caches_of_torch)
    return [value for module in modules for value in vars(module).values() if type(value) is memoised]
