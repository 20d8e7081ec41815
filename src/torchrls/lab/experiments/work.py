"""Working through a list of runs, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
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

#: Events of a run come no more often, but for the ends of epochs.
TELL_SECONDS = 0.25
#: How long workers have to come to the end of a batch.
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Order:
    """What is to be done, and how.

    Args:
        runs: what to run.
        root: the folder of the records.
        epochs: of each run.
        data: the folder of the data; see :class:`torchrls.lab.experiments.data.Store`.
        device: where to train.
        jobs: processes; cores are shared among them.
        checkpoint_seconds: a run is saved at least so often.
        keep_checkpoints: those of finished runs too, so that they can be made longer.
        tensorboard: whether to write its files, too.
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
    """Something that happened to a run.

    Args:
        kind: "begun", "advanced", "finished" or "failed"; or "lost", of a worker.
        index: of the run in the order.
        done: epochs, with the part of the one under way.
        note: the last accuracy, or the error.
    """

    kind: str
    index: int
    done: float
    note: str = ""


class WorkerError(RuntimeError):
    """Worker processes have ended before everything was done."""


def carry_out(order: Order) -> Iterator[Event]:
    """Do everything that is not done yet; yields what happens.

    Raises:
        WorkerError: if all workers have ended and there are runs left to do.
    """
    if order.jobs == 1:
        yield from work(order)
        return
    left = [run for run in order.runs if len(Record(order.root, run).epochs()) < order.epochs]
    if len(left) < 2:
        yield from work(order)
        return
    with _interrupts_ignored():  # and by the workers, for good: it is for the parent to end them
        channels = dict(_started(order) for _ in range(min(order.jobs, len(left))))
    workers, over = list(channels.values()), set()
    try:
        for event in _listen(channels):
            over |= {event.index} if event.kind in ("finished", "failed") else set()
            yield event
    finally:
        for worker in workers:
            worker.terminate()  # at the end of a batch, after a checkpoint
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
    """A worker, and what to hear it on.

    Each has a channel of its own: one that is killed while it speaks leaves a common one locked.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // order.jobs)
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(order, threads, theirs), daemon=True)
    worker.start()
    theirs.close()  # so that the channel ends when the worker does
    return ours, worker


def _listen(channels: dict[Connection, BaseProcess]) -> Iterator[Event]:
    """All events, until the last worker has ended."""
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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(order: Order, threads: int, channel: Connection) -> None:
    torch.set_num_threads(threads)
    try:
        for event in work(order):
            if not _has_parent():
                return
            channel.send(event)
    except (KeyboardInterrupt, BrokenPipeError):  # asked to stop, or there is nobody to tell
        return


def _has_parent() -> bool:
    """Whoever ends the command, by whatever signal, ends its workers."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def work(order: Order) -> Iterator[Event]:
    """Take every run that is not done and that nobody else is at; wait for those of others."""
    pending = list(enumerate(order.runs))
    while pending:
        left = []
        for index, run in pending:
            is_taken = yield from _attempt(order, index, Record(order.root, run))
            if is_taken:
                left.append((index, run))
        if len(left) == len(pending):
            yield from _watch(order, left)
            time.sleep(0.5)
        pending = left


def _watch(order: Order, others: list[tuple[int, Recordable]]) -> Iterator[Event]:
    for index, run in others:
        done = min(order.epochs, len(Record(order.root, run).epochs()))
        yield Event("advanced", index, done, "another process")


def _attempt(order: Order, index: int, record: Record) -> Generator[Event, None, bool]:
    """A run that fails is told of and does not keep others from being run.

    Returns:
        Whether another process is at it.
    """
    try:
        with record.claimed() as ours:
            if not ours:
                return True
            yield from _run(order, index, record)
    except (DataError, RecordError, OSError) as error:
        yield Event("failed", index, 0.0, str(error))
    except Exception:
        yield Event("failed", index, 0.0, traceback.format_exc())
    return False


def _run(order: Order, index: int, record: Record) -> Iterator[Event]:
    epochs = record.epochs()
    if len(epochs) < order.epochs:
        training = _training(order, record)
        yield Event("begun", index, len(training.epochs))
        yield from _train(order, index, record, training)
        epochs = training.epochs
    _finish(order, record, epochs)
    yield Event("finished", index, order.epochs, _accuracy(epochs[: order.epochs]))


def _train(order: Order, index: int, record: Record, training: Training) -> Iterator[Event]:
    split = training.split
    session = {
        "device": order.device,
        "jobs": order.jobs,
        "samples": [len(split.train_x), len(split.test_x)],
        "machine": describe(),
    }
    record.begin(session)
    log = _logger(order, record, len(training.epochs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # skipped steps are in the record
        for done in _steps(order, record, training, log):
            yield Event("advanced", index, done, _accuracy(training.epochs))


def _steps(
    order: Order, record: Record, training: Training, log: Callable[[Epoch], None]
) -> Iterator[float]:
    """Epochs done, every now and then; records and checkpoints are up to date by then.

    A run that begins anew, to be made longer than it was, has the same epochs again. Those that
    are recorded stay until there are as many new ones.
    """
    recorded = len(record.epochs())
    saved = told = time.monotonic()
    with _stoppable() as is_asked_to_stop:
        for part in _parts(training, order.epochs):
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


def _parts(training: Training, epochs: int) -> Iterator[float]:
    """How much of an epoch is done, after every batch."""
    while len(training.epochs) < epochs:
        yield from training.advance()


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Interrupts wait for the end of a batch: what says whether there was one."""
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


def _finish(order: Order, record: Record, epochs: list[Epoch]) -> None:
    """What a finished run has or has not."""
    if not order.keep_checkpoints:
        record.drop_checkpoint()
    if order.tensorboard and not (record.folder / "tensorboard").exists():
        log = _logger(order, record, 0)
        for epoch in epochs:
            log(epoch)


def _training(order: Order, record: Record) -> Training:
    """At its beginning, or where a checkpoint was left."""
    training = record.run.training(Store(order.data), order.device)
    state = record.checkpoint()
    if state is not None:
        training.load_state_dict(state)
    return training


def _accuracy(epochs: list[Epoch]) -> str:
    return f"{epochs[-1].test_accuracy:.2f} %" if epochs else ""


def _logger(order: Order, record: Record, epochs: int) -> Callable[[Epoch], None]:
    if not order.tensorboard:
        return lambda epoch: None
    from torchrls.lab.experiments.tensorboard import Log

    return Log(record.folder, epochs).write
