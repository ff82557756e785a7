"""Run a function on several gloo ranks of this machine and collect what each returns."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailure(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds every rank's account."""


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0, collective_timeout: float = 60.0
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes with a gloo process group.

    Processes are forked from a server that has imported the package already, so that a launch costs no imports.

    Args:
        function: a module-level function.
        world_size: number of ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds to wait for all ranks.
        collective_timeout: seconds after which a collective that not all ranks join fails.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: a rank raised, died or took too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["st_cached_extras.testing.tiny_models"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(child, rank, world_size, str(Path(folder) / "store"), collective_timeout, function, args),
                daemon=True,
            )
            process.start()
            child.close()
            ranks.append((process, parent))
        deadline = time.monotonic() + timeout
        answers = [_answer_of(parent, deadline) for _, parent in ranks]
        for process, _ in ranks:
            process.join(5)
            process.kill()
    if failures := [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]:
        raise RankFailure("\n".join(failures))
    return [answer for _, answer in answers]


def _answer_of(connection: Connection, deadline: float) -> tuple[bool, Any]:
    try:
        if connection.poll(max(0.0, deadline - time.monotonic())):
            return connection.recv()
    except EOFError:
        return False, "died without an answer"
    return False, "did not answer in time"


def _run_rank(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    collective_timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout),
        )
        connection.send((True, function(*args)))
    except Exception:
        connection.send((False, traceback.format_exc()))
