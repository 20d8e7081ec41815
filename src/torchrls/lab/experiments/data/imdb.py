"""The IMDB reviews, read from the text files of aclImdb."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrls.lab.experiments.data.split import Split, chosen
from torchrls.lab.experiments.data.store import Archive, DataError, Store
from torchrls.lab.experiments.data.tar import members

FOLDER = "aclImdb"
ARCHIVE = Archive(
    "aclImdb_v1.tar.gz",
    "7c2ac02c03563afcf9b574c7e56c153a",
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
)
#: The numbers of padding and of words outside of the vocabulary.
PADDING, UNKNOWN = 0, 1
#: The folders of bad and good reviews; their positions are the labels.
KINDS = ("neg", "pos")
_NAME = re.compile(r"aclImdb/(train|test)/(neg|pos)/\d+_\d+\.txt")
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")

#: The name of a review, its text, and its label: 1 for good, 0 for bad.
Review = tuple[str, str, int]


def fetch(store: Store) -> None:
    """Download the archive unless the folder or the archive is there."""
    if store.find(FOLDER) is None:
        store.archive(ARCHIVE)


def load(
    store: Store,
    *,
    limit: int | None = None,
    test_limit: int | None = None,
    vocabulary: int = 10_000,
    length: int = 100,
) -> Split:
    """Return reviews as rows of ``length`` word numbers, and their labels: 1 for good, 0 for bad.

    The vocabulary has the most frequent words of the training set. Long reviews keep their last
    words, where the verdict is; short reviews are padded with zeros at the end (see
    :func:`lengths`).

    Args:
        vocabulary: the count of word numbers, including those of padding and of unknown words.
    """
    if vocabulary < 3 or length < 1:
        raise ValueError(
            f"vocabulary must be at least 3 and length at least 1, got {vocabulary} and {length}"
        )
    train, train_y = _reviews(store, "train", limit)
    test, test_y = _reviews(store, "test", test_limit)
    numbers = numbered(train, vocabulary)
    return Split(encoded(train, numbers, length), train_y, encoded(test, numbers, length), test_y)


def words(text: str) -> list[str]:
    """Return the lower-case words and numbers of a text, without markup.

    Example:
        >>> words("It's GREAT!<br /><br />10/10")
        ["it's", 'great', '10', '10']
    """
    return _WORD.findall(text.lower().replace("<br />", " "))


def numbered(reviews: Sequence[list[str]], size: int) -> dict[str, int]:
    """Number the most frequent words; equally frequent words are in alphabetical order.

    Example:
        >>> numbered([["a", "b", "b"], ["c"]], size=4)
        {'b': 2, 'a': 3}
    """
    counts = Counter(word for review in reviews for word in review)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: UNKNOWN + 1 + i for i, word in enumerate(frequent[: size - 2])}


def encoded(reviews: Sequence[list[str]], numbers: dict[str, int], length: int) -> Tensor:
    """Return rows of word numbers: the last ``length`` words of each review, padded at the end.

    Example:
        >>> encoded([["a", "b", "c"], ["x"]], {"b": 2, "c": 3}, length=2)
        tensor([[2, 3],
                [1, 0]])
    """
    rows = torch.full((len(reviews), length), PADDING)
    for row, review in zip(rows, reviews, strict=True):
        last = review[-length:] or [""]  # a review without a word is one unknown word
        row[: len(last)] = torch.tensor([numbers.get(word, UNKNOWN) for word in last])
    return rows


def lengths(rows: Tensor) -> Tensor:
    """Return the number of words of each row, without padding.

    Example:
        >>> lengths(torch.tensor([[2, 3], [1, 0]])).tolist()
        [2, 1]
    """
    return (rows != PADDING).sum(1)


def _reviews(store: Store, kind: str, limit: int | None) -> tuple[list[list[str]], Tensor]:
    """Return the words and the labels of the reviews of a kind, "train" or "test"."""
    folder = store.find(FOLDER)
    reviews = sorted(_unpacked(folder, kind) if folder else _packed(store.archive(ARCHIVE), kind))
    origin = folder or store.folder / ARCHIVE.name
    for label, name in enumerate(KINDS):
        if not any(review[2] == label for review in reviews):
            raise DataError(f"{origin} has no reviews in {FOLDER}/{kind}/{name}")
    order = chosen(len(reviews), limit).tolist()
    labels = torch.tensor([reviews[i][2] for i in order])
    return [words(reviews[i][1]) for i in order], labels


def _unpacked(folder: Path, kind: str) -> Iterator[Review]:
    """Read the reviews of a kind from a folder."""
    for label, name in enumerate(KINDS):
        for path in (folder / kind / name).glob("*.txt"):
            yield f"{name}/{path.name}", path.read_text("utf-8", "replace"), label


def _packed(path: Path, kind: str) -> Iterator[Review]:
    """Read the reviews of a kind from the archive."""

    def wanted(member: tarfile.TarInfo) -> bool:
        return bool(_NAME.fullmatch(member.name)) and member.name.split("/")[1] == kind

    for name, content in members(path, wanted):
        label, file = name.split("/")[2:]
        yield f"{label}/{file}", content.decode("utf-8", "replace"), KINDS.index(label)
