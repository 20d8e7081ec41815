"""The work on a list of runs, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from torchrls.lab.experiments.data import DataError, Store
from torchrls.lab.experiments.machine import describe
from torchrls.lab.experiments.records import Record, RecordError
from torchrls.lab.experiments.runs import Recordable
from torchrls.lab.experiments.training import Epoch, Training

#: The least seconds between two events of a run, except for the ends of epochs.
TELL_SECONDS = 0.25
#: The seconds that workers have to finish a batch before they are killed.
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Order:
    """The runs to be carried out, and how.

    Args:
        runs: the runs.
        root: the folder of the records.
        epochs: the number of epochs of each run.
        data: the folder of the data; see :class:`torchrls.lab.experiments.data.Store`.
        device: the device to train on.
        jobs: the number of processes, which share the cores.
        checkpoint_seconds: the time between checkpoints of a run.
        keep_checkpoints: whether to keep checkpoints of finished runs, so that epochs can be added.
        tensorboard: whether to write event files for TensorBoard.
    """

    runs: Sequence[Recordable]
    root: Path
    epochs: int
    data: Path | None = None
    device: str = "cpu"
    jobs: int = 1
    checkpoint_seconds: float = 30.0
    keep_checkpoints: bool = False
    tensorboard: bool = False


@dataclass(frozen=True)
class Event:
    """A report on a run.

    Args:
        kind: "begun", "advanced", "finished" or "failed"; "lost" if a worker process has died.
        index: the position of the run in the order; -1 for "lost".
        done: the number of finished epochs, with the fraction of the one under way.
        note: the last accuracy, or the error.
    """

    kind: str
    index: int
    done: float
    note: str = ""


class WorkerError(RuntimeError):
    """The worker processes have ended before all runs were done."""


def carry_out(order: Order) -> Iterator[Event]:
    """Carry out all runs that are not finished yet, and yield events.

    Uses worker processes if there are several jobs and at least two unfinished runs.

    Raises:
        WorkerError: if all workers have ended and there are unfinished runs.
    """
    if order.jobs == 1:
        yield from work(order)
        return
    left = [run for run in order.runs if len(Record(order.root, run).epochs()) < order.epochs]
    if len(left) < 2:
        yield from work(order)
        return
    with _interrupts_ignored():  # workers inherit this, so that only the parent ends them
        channels = dict(_started(order) for _ in range(min(order.jobs, len(left))))
    workers, over = list(channels.values()), set()
    try:
        for event in _listen(channels):
            over |= {event.index} if event.kind in ("finished", "failed") else set()
            yield event
    finally:
        for worker in workers:
            worker.terminate()  # the worker stops after its batch and a checkpoint
        for worker in workers:
            worker.join(STOP_SECONDS)
            worker.kill()
            worker.join()
    if len(over) < len(order.runs):
        codes = ", ".join(str(worker.exitcode) for worker in workers)
        raise WorkerError(
            f"{len(order.runs) - len(over)} of {len(order.runs)} runs are not done: the worker "
            f"processes have ended (exit codes {codes}). If they were killed, memory may have run "
            f"out: try fewer --jobs. The same command goes on from here"
        )


def _started(order: Order) -> tuple[Connection, BaseProcess]:
    """Start a worker process; return the channel of its events and the process.

    Each worker has a channel of its own, because a worker that is killed while it sends would leave
    a common channel locked.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // order.jobs)
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(order, threads, theirs), daemon=True)
    worker.start()
    theirs.close()  # so that reading ends when the worker does
    return ours, worker


def _listen(channels: dict[Connection, BaseProcess]) -> Iterator[Event]:
    """Yield the events of all workers until the last one has ended; "lost" for each that failed."""
    left = dict(channels)
    while left:
        for channel in wait([*left]):
            assert isinstance(channel, Connection)
            try:
                event: Event = channel.recv()
            except (EOFError, OSError):
                worker = left.pop(channel)
                worker.join()
                channel.close()
                if not worker.exitcode:
                    continue
                event = Event("lost", -1, 0.0, f"a worker has ended with code {worker.exitcode}")
            yield event


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT within the context. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(order: Order, threads: int, channel: Connection) -> None:
    """Carry out runs in a worker process and send events. Ends if the parent process has ended."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    try:
        for event in work(order):
            if parent is not None and not parent.is_alive():
                return
            channel.send(event)
    except (KeyboardInterrupt, BrokenPipeError):  # asked to stop, or the parent has gone
        return


def work(order: Order) -> Iterator[Event]:
    """Carry out the unfinished runs in this process, and yield events.

    Runs that other processes have locked are tried again until they are finished. A run that fails
    is reported and does not stop the others.
    """
    pending = list(enumerate(order.runs))
    while pending:
        taken = []
        for index, run in pending:
            record = Record(order.root, run)
            try:
                with record.claimed() as ours:
                    if ours:
                        yield from _run(order, index, record)
                    else:
                        taken.append((index, run))
            except (DataError, RecordError, OSError) as error:
                yield Event("failed", index, 0.0, str(error))
            except Exception:
                yield Event("failed", index, 0.0, traceback.format_exc())
        if len(taken) == len(pending):
            for index, run in taken:
                done = min(order.epochs, len(Record(order.root, run).epochs()))
                yield Event("advanced", index, done, "another process")
            time.sleep(0.5)
        pending = taken


def _run(order: Order, index: int, record: Record) -> Iterator[Event]:
    """Train one run to the end, from its checkpoint if there is one, and yield events."""
    epochs = record.epochs()
    if len(epochs) < order.epochs:
        training = record.run.training(Store(order.data), order.device)
        state = record.checkpoint()
        if state is not None:
            training.load_state_dict(state)
        yield Event("begun", index, len(training.epochs))
        session = {
            "device": order.device,
            "jobs": order.jobs,
            "samples": [len(training.split.train_x), len(training.split.test_x)],
            "machine": describe(),
        }
        record.begin(session)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # skipped steps are in the record
            for done in _train(order, record, training):
                yield Event("advanced", index, done, _accuracy(training.epochs))
        epochs = training.epochs
    if not order.keep_checkpoints:
        record.drop_checkpoint()
    if order.tensorboard and not (record.folder / "tensorboard").exists():
        log = _logger(order, record, 0)
        for epoch in epochs:
            log(epoch)
    yield Event("finished", index, order.epochs, _accuracy(epochs[: order.epochs]))


def _train(order: Order, record: Record, training: Training) -> Iterator[float]:
    """Train to the last epoch; write epochs and checkpoints; yield the number of epochs done.

    Yields after each epoch and every TELL_SECONDS. If asked to stop, writes a checkpoint after the
    batch and raises KeyboardInterrupt. A run that begins anew to get more epochs repeats the
    recorded ones, which stay in the file until there are as many new ones.
    """
    log = _logger(order, record, len(training.epochs))
    recorded = len(record.epochs())
    saved = told = time.monotonic()
    with _stoppable() as is_asked_to_stop:
        while len(training.epochs) < order.epochs:
            for part in training.advance():
                now, over = time.monotonic(), len(training.epochs) == order.epochs
                if part == 1.0:
                    log(training.epochs[-1])
                    if len(training.epochs) >= recorded:
                        record.save(training.epochs)
                if over or is_asked_to_stop() or now - saved >= order.checkpoint_seconds:
                    record.save_checkpoint(training.state_dict())
                    saved = now
                if is_asked_to_stop() and not over:
                    raise KeyboardInterrupt
                if part == 1.0 or now - told >= TELL_SECONDS:
                    yield len(training.epochs) + part % 1.0
                    told = now


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and SIGINT within the context; yield a function that tells if there was one.

    SIGINT stays ignored if it was. Outside of the main thread, no signals are caught.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    before = {n: signal.signal(n, lambda number, frame: asked.append(number)) for n in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _accuracy(epochs: list[Epoch]) -> str:
    """Format the test accuracy of the last epoch."""
    return f"{epochs[-1].test_accuracy:.2f} %" if epochs else ""


def _logger(order: Order, record: Record, epochs: int) -> Callable[[Epoch], None]:
    """Return a function that writes an epoch for TensorBoard, or does nothing if not asked for.

    Args:
        epochs: the number of epochs that are in the event files already.
    """
    if not order.tensorboard:
        return lambda epoch: None
    from torchrls.lab.experiments.tensorboard import Log

    return Log(record.folder, epochs).write
