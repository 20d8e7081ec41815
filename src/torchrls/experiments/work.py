"""Working through a list of runs, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from torchrls.experiments.data import DataError, Split, Store
from torchrls.experiments.machine import describe
from torchrls.experiments.records import Record, RecordError
from torchrls.experiments.runs import Run
from torchrls.experiments.tasks import TASKS
from torchrls.experiments.training import Epoch, Training

#: Events of a run come no more often, but for the ends of epochs.
TELL_SECONDS = 0.25


@dataclass(frozen=True)
class Order:
    """What is to be done, and how.

    Args:
        runs: what to run.
        root: the folder of the records.
        epochs: of each run.
        data: the folder of the data; see :class:`torchrls.experiments.data.Store`.
        device: where to train.
        jobs: processes; cores are shared among them.
        checkpoint_seconds: a run is saved at least so often.
        keep_checkpoints: those of finished runs too, so that they can be made longer.
        tensorboard: whether to write its files, too.
    """

    runs: Sequence[Run]
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
        kind: "begun", "advanced", "finished" or "failed".
        index: of the run in the order.
        done: epochs, with the part of the one under way.
        note: the last accuracy, or the error.
    """

    kind: str
    index: int
    done: float
    note: str = ""


def carry_out(order: Order) -> Iterator[Event]:
    """Do everything that is not done yet; yields what happens."""
    if order.jobs == 1:
        yield from work(order)
        return
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // order.jobs)
    workers = [
        context.Process(target=_worker, args=(order, threads, events), daemon=True)
        for _ in range(order.jobs)
    ]
    for worker in workers:
        worker.start()
    try:
        yield from _listen(workers, events)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _listen(workers: list[Any], events: Any) -> Iterator[Event]:
    finished = 0
    while finished < len(workers):
        try:
            event = events.get(timeout=0.5)
        except queue.Empty:
            dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(
                    f"a worker process ended with exit code {dead[0]}; if it was killed, memory "
                    f"may have run out: try fewer --jobs. The same command goes on from here"
                ) from None
            continue
        if event is None:
            finished += 1
        else:
            yield event


def _worker(order: Order, threads: int, events: Any) -> None:
    torch.set_num_threads(threads)
    try:
        for event in work(order):
            if not _has_parent():
                return
            events.put(event)
        events.put(None)
    except KeyboardInterrupt:  # the parent says what is to be said
        pass


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
            record = Record(order.root, run)
            with record.claimed() as ours:
                if not ours:
                    left.append((index, run))
                    continue
                yield from _attempt(order, index, record)
        if len(left) == len(pending):
            yield from _watch(order, left)
            time.sleep(0.5)
        pending = left


def _watch(order: Order, others: list[tuple[int, Run]]) -> Iterator[Event]:
    for index, run in others:
        yield Event("advanced", index, len(Record(order.root, run).epochs()), "another process")


def _attempt(order: Order, index: int, record: Record) -> Iterator[Event]:
    """A run that fails is told of and does not keep others from being run."""
    try:
        yield from _run(order, index, record)
    except (DataError, RecordError) as error:
        yield Event("failed", index, 0.0, str(error))
    except Exception:
        yield Event("failed", index, 0.0, traceback.format_exc())


def _run(order: Order, index: int, record: Record) -> Iterator[Event]:
    earlier = record.epochs()
    if len(earlier) >= order.epochs:
        yield Event("finished", index, order.epochs, _accuracy(earlier[: order.epochs]))
        return
    yield Event("begun", index, 0.0)
    training = _training(order, record)
    record.begin({"device": order.device, "jobs": order.jobs, "machine": describe()})
    log = _logger(order, record, training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # skipped steps are in the record
        for done in _train(order, record, training, log):
            yield Event("advanced", index, done, _accuracy(training.epochs))
    if not order.keep_checkpoints:
        record.drop_checkpoint()
    yield Event("finished", index, order.epochs, _accuracy(training.epochs))


def _train(
    order: Order, record: Record, training: Training, log: Callable[[], None]
) -> Iterator[float]:
    """Epochs done, every now and then; records and checkpoints are up to date by then."""
    saved = told = time.monotonic()
    while len(training.epochs) < order.epochs:
        for part in training.advance():
            if part == 1.0:
                record.save(training.epochs)
                log()
            now, over = time.monotonic(), len(training.epochs) == order.epochs
            if over or now - saved >= order.checkpoint_seconds:
                record.save_checkpoint(training.state_dict())
                saved = now
            if part == 1.0 or now - told >= TELL_SECONDS:
                yield len(training.epochs) + part % 1.0
                told = now


def _training(order: Order, record: Record) -> Training:
    """At its beginning, or where a checkpoint was left; the records are brought in line with it."""
    run = record.run
    task = TASKS[run.task]
    split = _split(run.task, tuple(sorted(run.choices.items())), order.data, order.device)
    training = Training(
        run.contender,
        partial(task.network, run.choices),
        split,
        seed=run.seed,
        batch_size=run.choices["batch_size"],
    )
    state = record.checkpoint()
    if state is not None:
        training.load_state_dict(state)
    record.save(training.epochs)
    return training


@lru_cache(maxsize=1)
def _split(task: str, choices: tuple[Any, ...], data: Path | None, device: str) -> Split:
    return TASKS[task].split(Store(data), dict(choices)).to(device)


def _accuracy(epochs: list[Epoch]) -> str:
    return f"{epochs[-1].test_accuracy:.2f} %" if epochs else ""


def _logger(order: Order, record: Record, training: Training) -> Callable[[], None]:
    if not order.tensorboard:
        return lambda: None
    from torchrls.experiments.tensorboard import Log

    return partial(Log(record.folder, len(training.epochs)).write, training.epochs)
