"""Reads what mpirun says to the processes that it starts: Open MPI, and Hydra of MPICH and Intel MPI.

One process per node is a node, which starts its ranks itself; more than one are ranks. What an MPI library would have
to be asked for, where rank 0 is, comes from the scheduler whose job this is, or from the person.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from shardwise.launch.head_address import reachable_heads
from shardwise.launch.place import (
    THIS_MACHINE,
    NodePlace,
    RankPlace,
    port_of_job,
    position,
    secret_of_job,
    whole_number,
)
from shardwise.launch.schedulers import lsf, pbs, slurm

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Rank, world, local rank and local world. srun sets PMI_RANK too, but not the local ones."""

JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
"""Variables that are the same in all processes of a job."""


def detect(environ: Mapping[str, str]) -> NodePlace | RankPlace | None:
    """Returns the place of a process of mpirun."""
    names = next((names for names in (OPEN_MPI, HYDRA) if set(names) <= set(environ)), None)
    if names is None:
        return None
    rank, world = position(environ, names[0], names[1])
    local_rank, local_world = position(environ, names[2], names[3])
    job = next((environ[name] for name in JOBS if environ.get(name)), "mpirun")
    heads = _heads(environ) if local_world < world else (THIS_MACHINE,)
    port = whole_number(environ, "MASTER_PORT", port_of_job(environ, job))
    if local_world > 1:
        return RankPlace("mpirun", job, rank, world, local_rank, local_world, heads[0], port)
    return NodePlace("mpirun", job, rank, world, heads, port, secret_file=secret_of_job(environ))


def _heads(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns addresses of the node of rank 0, which is the first of the job."""
    named = [(name, environ[name]) for name in ("SHARDWISE_HEAD", "MASTER_ADDR") if environ.get(name)]
    nodes = slurm.nodes(environ) or lsf.nodes(environ) or pbs.nodes(environ)
    own = socket.gethostname().split(".")[0]
    is_head = bool(nodes) and nodes[0].split(".")[0] == own
    return reachable_heads([*named, *(("the job's first node", name) for name in nodes[:1])], is_head, nodes[1:])
