"""Two processes that do the same jobs together, for as long as a test module runs."""

from __future__ import annotations

import os
import queue
import socket
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 25
START_SECONDS = 120  # to import torch on a busy machine


def serve(rank: int, size: int, port: int, jobs: Any, results: Any) -> None:
    """Do what comes, as one rank of a process group."""
    torch.set_num_threads(1)
    start, bound = timedelta(seconds=START_SECONDS), timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, start)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=bound)
    results.put((rank, "ready", None))
    try:
        for job, args in iter(jobs.get, None):
            results.put((rank, job(rank, *args), None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        time.sleep(1)  # until that is told
        os._exit(1)  # the others wait for us in vain


class Pair:
    """The processes; one that fails makes the test fail, and ends both; then there are new ones."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(self.size)]
        port = free_port()
        self.processes = [
            context.Process(
                target=serve, args=(rank, self.size, port, jobs, self._results), daemon=True
            )
            for rank, jobs in enumerate(self._jobs)
        ]
        self.closed = False
        for process in self.processes:
            process.start()
        self._collect("the start", START_SECONDS)

    def run(self, job: Any, *args: Any) -> list[Any]:
        """The results of all ranks."""
        if self.closed:
            self._start()
        for jobs in self._jobs:
            jobs.put((job, args))
        return self._collect(job.__name__, SECONDS)

    def _collect(self, what: str, seconds: float) -> list[Any]:
        obtained: dict[int, Any] = {}
        while len(obtained) < self.size:
            try:
                rank, result, error = self._results.get(timeout=seconds)
            except queue.Empty:
                self.close()
                raise TimeoutError(f"{what} has not come back") from None
            if error is not None:
                self.close()
                raise RuntimeError(f"rank {rank}: {error}")
            obtained[rank] = result
        return [obtained[rank] for rank in sorted(obtained)]

    def close(self) -> None:
        """End them."""
        self.closed = True
        for jobs in self._jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def free_port() -> int:
    with socket.socket() as obtained:
        obtained.bind(("127.0.0.1", 0))
        port: int = obtained.getsockname()[1]
    return port
