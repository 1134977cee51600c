"""Reads what torchrun says to the ranks that it starts, and what people set by hand who start ranks one by one."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.launch.place import RankPlace, position, whole_number


def detect(environ: Mapping[str, str]) -> RankPlace | None:
    """Returns the place of a rank of torchrun. Its variables set by hand count too if LOCAL_RANK is among them: without
    it they may be those of a whole pod, as Kubeflow sets them."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None and "LOCAL_RANK" not in environ:
        return None
    rank, world = position(environ, "RANK", "WORLD_SIZE")
    return RankPlace(
        scheduler="torchrun" if run is not None else "by hand",
        job=run or f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}",
        rank=rank,
        world=world,
        local_rank=whole_number(environ, "LOCAL_RANK", rank),
        local_world=whole_number(environ, "LOCAL_WORLD_SIZE", world),
        master=environ.get("MASTER_ADDR", ""),
        port=whole_number(environ, "MASTER_PORT", 0),
    )
