"""IMDB reviews, from the text files of aclImdb."""

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
PADDING, UNKNOWN = 0, 1
KINDS = ("neg", "pos")
_NAME = re.compile(r"aclImdb/(train|test)/(neg|pos)/\d+_\d+\.txt")
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")

#: The name of a review, its text, and 1 if it is a good one.
Review = tuple[str, str, int]


def fetch(store: Store) -> None:
    """Make sure that the files are there."""
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
    """Reviews as rows of ``length`` word numbers, and whether they are good (1) or bad (0).

    The vocabulary has the most frequent words of the training set alone. Of a long review the
    last words are kept, where the verdict is; a short one is padded with zeros at its end, so
    that its length is the number of its entries that are not zero (see :func:`lengths`).

    Args:
        vocabulary: numbers of words, with those for padding (0) and for unknown words (1).
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
    """Lower-case words and numbers, without the markup.

    Example:
        >>> words("It's GREAT!<br /><br />10/10")
        ["it's", 'great', '10', '10']
    """
    return _WORD.findall(text.lower().replace("<br />", " "))


def numbered(reviews: Sequence[list[str]], size: int) -> dict[str, int]:
    """Numbers of the most frequent words, equally frequent ones in the order of the alphabet.

    Example:
        >>> numbered([["a", "b", "b"], ["c"]], size=4)
        {'b': 2, 'a': 3}
    """
    counts = Counter(word for review in reviews for word in review)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: UNKNOWN + 1 + i for i, word in enumerate(frequent[: size - 2])}


def encoded(reviews: Sequence[list[str]], numbers: dict[str, int], length: int) -> Tensor:
    """Rows of numbers, the last ``length`` words of each review, padded at the end.

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
    """How many words each row has.

    Example:
        >>> lengths(torch.tensor([[2, 3], [1, 0]])).tolist()
        [2, 1]
    """
    return (rows != PADDING).sum(1)


def _reviews(store: Store, kind: str, limit: int | None) -> tuple[list[list[str]], Tensor]:
    folder = store.find(FOLDER)
    found = sorted(_unpacked(folder, kind) if folder else _packed(store.archive(ARCHIVE), kind))
    origin = folder or store.folder / ARCHIVE.name
    for label, name in enumerate(KINDS):
        if not any(review[2] == label for review in found):
            raise DataError(f"{origin} has no reviews in {FOLDER}/{kind}/{name}")
    order = chosen(len(found), limit).tolist()
    labels = torch.tensor([found[i][2] for i in order])
    return [words(found[i][1]) for i in order], labels


def _unpacked(folder: Path, kind: str) -> Iterator[Review]:
    for label, name in enumerate(KINDS):
        for path in (folder / kind / name).glob("*.txt"):
            yield f"{name}/{path.name}", path.read_text("utf-8", "replace"), label


def _packed(path: Path, kind: str) -> Iterator[Review]:
    def wanted(member: tarfile.TarInfo) -> bool:
        return bool(_NAME.fullmatch(member.name)) and member.name.split("/")[1] == kind

    for name, content in members(path, wanted):
        label, file = name.split("/")[2:]
        yield f"{label}/{file}", content.decode("utf-8", "replace"), KINDS.index(label)
