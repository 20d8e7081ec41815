"""The data sets: read as they are published, refused when they are not."""

from __future__ import annotations

import gzip
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from fakes import datasets
from torchrls.lab.experiments.data import DataError, Store, cifar10, imdb, mnist
from torchrls.lab.experiments.data import tar as tar_module
from torchrls.lab.experiments.data.split import chosen, images
from torchrls.lab.experiments.data.store import Archive

LOADERS = {"mnist": mnist.load, "cifar10": cifar10.load, "imdb": imdb.load}


@pytest.fixture
def offline(monkeypatch):
    """No network."""
    import pooch

    def refuse(self, url, *args, **kwargs):
        raise OSError("the network is down")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))


# -- as published --------------------------------------------------------------------------------


def test_mnist(tmp_path):
    split = mnist.load(Store(datasets.everything(tmp_path)))
    assert split.train_x.shape == (200, 784)
    assert split.test_x.shape == (60, 784)
    assert split.train_y.dtype == torch.int64
    assert 0 <= split.train_x.min() <= split.train_x.max() <= 1
    for row, label in zip(split.train_x.view(-1, 28, 28), split.train_y, strict=True):
        assert row.mean(1).argmax() == 2 * label


def test_mnist_from_its_archives_in_either_folder(tmp_path, monkeypatch):
    unpacked = mnist.load(Store(datasets.everything(tmp_path / "unpacked")))
    for place in ("a", "b/mnist"):
        folder = datasets.mnist(tmp_path / place, packed=True)
        sums = {name: datasets.md5(folder / name) for name in mnist.ARCHIVES}
        known = {name: replace(mnist.ARCHIVES[name], md5=md5) for name, md5 in sums.items()}
        monkeypatch.setattr(mnist, "ARCHIVES", known)
        assert equal(mnist.load(Store(tmp_path / place.split("/")[0])), unpacked)


def test_cifar10_from_folder_and_archive(tmp_path, monkeypatch):
    folder = datasets.cifar10(tmp_path / "unpacked" / cifar10.FOLDER)
    split = cifar10.load(Store(folder.parent))
    assert split.train_x.shape == (200, 3, 32, 32)
    assert split.test_x.shape == (40, 3, 32, 32)
    for image, label in zip(split.test_x, split.test_y, strict=True):
        assert image.mean((0, 2)).argmax() // 3 == label
    (tmp_path / "packed").mkdir()
    path = datasets.tar(tmp_path / "packed" / cifar10.ARCHIVE.name, folder)
    monkeypatch.setattr(cifar10, "ARCHIVE", replace(cifar10.ARCHIVE, md5=datasets.md5(path)))
    assert equal(cifar10.load(Store(path.parent)), split)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing is unpacked


def test_imdb_from_folder_and_archive(tmp_path, monkeypatch):
    folder = datasets.imdb(tmp_path / "unpacked" / imdb.FOLDER)
    split = imdb.load(Store(folder.parent), length=8)
    assert split.train_x.shape == (120, 8)
    assert split.train_y.sum() == 60
    (tmp_path / "packed").mkdir()
    path = datasets.tar(tmp_path / "packed" / imdb.ARCHIVE.name, folder)
    monkeypatch.setattr(imdb, "ARCHIVE", replace(imdb.ARCHIVE, md5=datasets.md5(path)))
    assert equal(imdb.load(Store(path.parent), length=8), split)


def test_imdb_vocabulary_is_that_of_the_training_set(tmp_path):
    folder = datasets.imdb(tmp_path / imdb.FOLDER)
    (folder / "test" / "pos" / "0_7.txt").write_text("xyzzy " * 50)
    split = imdb.load(Store(tmp_path), length=20)
    assert (split.test_x == imdb.UNKNOWN).any()
    assert not (split.train_x == imdb.UNKNOWN).any()
    small = imdb.load(Store(tmp_path), length=20, vocabulary=5)
    assert int(small.train_x.max()) == 4
    (folder / "test" / "pos" / "0_7.txt").write_text("")
    empty = imdb.load(Store(tmp_path), length=20)
    assert int(imdb.lengths(empty.test_x).min()) == 1


@pytest.mark.parametrize("task", LOADERS)
def test_limits_take_the_same_samples(task, tmp_path):
    store = Store(datasets.everything(tmp_path))
    few, more = (LOADERS[task](store, limit=n, test_limit=n) for n in (10, 20))
    assert len(few.train_x) == len(few.test_x) == 10
    assert torch.equal(few.train_y, more.train_y[:10])
    assert torch.equal(few.test_y, more.test_y[:10])
    assert not torch.equal(chosen(100, 50), torch.arange(50))


def test_scaling(tmp_path):
    store = Store(datasets.everything(tmp_path))
    split = cifar10.load(store, scaling="standard")
    assert torch.allclose(split.train_x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(split.train_x.std((0, 2, 3)), torch.ones(3), atol=1e-4)
    with pytest.raises(ValueError, match="scaling must be"):
        images((split.train_x, split.train_y), (split.test_x, split.test_y), scaling="none")


def test_bad_choices_of_imdb(tmp_path):
    with pytest.raises(ValueError, match="vocabulary must be at least 3"):
        imdb.load(Store(datasets.everything(tmp_path)), vocabulary=2)


# -- where files are -----------------------------------------------------------------------------


def test_the_folder_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRLS_DATA", str(tmp_path))
    assert Store().folder == tmp_path
    assert Store(tmp_path / "other").folder == tmp_path / "other"
    monkeypatch.delenv("TORCHRLS_DATA")
    assert Store().folder.name == "torchrls"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="must be a folder"):
        Store(tmp_path / "file")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-binary.tar.gz"),
        ("imdb", "aclImdb_v1.tar.gz"),
    ],
)
def test_missing_files_and_no_network(task, name, tmp_path):
    with pytest.raises(DataError) as caught:
        LOADERS[task](Store(tmp_path))
    for text in (name, str(tmp_path), "the network is down", "TORCHRLS_DATA", "--data", "http"):
        assert text in str(caught.value)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def published(tmp_path):
    """A server with a file, and its address."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "file.bin").write_bytes(b"content" * 1000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder / "file.bin", f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(tmp_path, published):
    path, address = published
    archive = Archive("file.bin", datasets.md5(path), (f"{address}/gone", f"{address}/file.bin"))
    store = Store(tmp_path / "new" / "cache")
    results = store.archive(archive)
    assert results == store.folder / "file.bin"
    assert results.read_bytes() == path.read_bytes()
    path.unlink()
    assert store.archive(archive) == results  # it is there already


def test_download_of_something_else(tmp_path, published):
    _, address = published
    archive = Archive("file.bin", "0" * 32, (f"{address}/file.bin",))
    with pytest.raises(DataError, match=r"file\.bin is not in .*cannot be downloaded"):
        Store(tmp_path / "cache").archive(archive)
    assert not (tmp_path / "cache" / "file.bin").exists()


# -- not as published ----------------------------------------------------------------------------


def test_wrong_sum(tmp_path):
    path = datasets.tar(tmp_path / cifar10.ARCHIVE.name, datasets.cifar10(tmp_path / "x"))
    with pytest.raises(DataError, match=r"md5 sum is .*must be c32a1d4ab5d0.*delete it"):
        cifar10.load(Store(path.parent))


LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no idx file"),
        (b"\0\0\x08\x03" + bytes(12), "is no idx file of bytes in 1 dimension"),
        (b"\0\0\x0d\x01\0\0\0\x01\0", "begins with 00000d01, must be 00000801"),
        (b"\0\0\x08\x01\0\0\0\xc8" + bytes(199), "announces 200 bytes, it has only 199"),
        (b"\0\0\x08\x01\0\0\0\xc8" + bytes(201), "announces 200 bytes, it has more"),
        (b"\0\0\x08\x01\xff\xff\xff\xff" + bytes(9), "cannot be right"),
        (b"\0\0\x08\x01\0\0\0\xc7" + bytes(199), "has 200 images, but .* has 199 labels"),
        (b"\0\0\x08\x01\0\0\0\xc8" + bytes([10] * 200), "has the label 10"),
    ],
)
def test_bad_idx_files(content, message, tmp_path):
    datasets.mnist(tmp_path)
    (tmp_path / LABELS).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        mnist.load(Store(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_images_of_another_size(tmp_path):
    datasets.mnist(tmp_path)
    images = torch.zeros(200, 14, 14).numpy()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(datasets.idx(images))
    with pytest.raises(DataError, match=r"images of \(14, 14\) pixels, must be \(28, 28\)"):
        mnist.load(Store(tmp_path))


def test_bad_gzip(tmp_path):
    whole = gzip.compress(datasets.idx(torch.zeros(1000).numpy()))
    for content in (whole[:-20], b"no gzip", whole[:30] + b"????" + whole[34:]):
        path = tmp_path / "labels.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"labels\.gz (cannot be read|is truncated)"):
            mnist.idx(path, dims=1)


def test_bad_batches(tmp_path):
    folder = datasets.cifar10(tmp_path / cifar10.FOLDER)
    path = folder / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin is truncated or corrupt: .* 3,073"):
        cifar10.load(Store(tmp_path))
    path.write_bytes(b"\xff" + content[1:])
    with pytest.raises(DataError, match="has the label 255"):
        cifar10.load(Store(tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin cannot be read: No such file"):
        cifar10.load(Store(tmp_path))


def test_folder_without_reviews(tmp_path):
    (datasets.imdb(tmp_path / imdb.FOLDER) / "train" / "pos").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="has no reviews in aclImdb/train/pos"):
        imdb.load(Store(tmp_path))


def packed(monkeypatch, module, path):
    """A store with an archive whose sum is taken for the right one."""
    monkeypatch.setattr(module, "ARCHIVE", replace(module.ARCHIVE, md5=datasets.md5(path)))
    return Store(path.parent)


def test_truncated_archive(tmp_path, monkeypatch):
    path = datasets.tar(
        tmp_path / cifar10.ARCHIVE.name, datasets.cifar10(tmp_path / cifar10.FOLDER)
    )
    (tmp_path / cifar10.FOLDER).rename(tmp_path / "gone")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="is truncated or corrupt"):
        cifar10.load(packed(monkeypatch, cifar10, path))
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="is truncated or corrupt"):
        cifar10.load(packed(monkeypatch, cifar10, path))


def test_archive_of_something_else(tmp_path, monkeypatch):
    path = datasets.tar_of(tmp_path / cifar10.ARCHIVE.name, {"readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"has no data_batch_1\.bin, .* in its folder"):
        cifar10.load(packed(monkeypatch, cifar10, path))
    path = datasets.tar_of(tmp_path / imdb.ARCHIVE.name, {"readme.txt": b"hello"})
    with pytest.raises(DataError, match="has no reviews in aclImdb/train/neg"):
        imdb.load(packed(monkeypatch, imdb, path))


def test_a_malicious_archive_does_nothing(tmp_path, monkeypatch):
    """Paths that lead elsewhere, links and a second file through a link: nothing is written."""
    inside = tmp_path / "inside"
    inside.mkdir()
    reviews = {
        f"aclImdb/{kind}/{label}/0_1.txt": b"a word"
        for kind in ("train", "test")
        for label in imdb.KINDS
    }
    evil = {
        "../outside.txt": b"evil",
        "/tmp/torchrls-evil.txt": b"evil",
        "aclImdb/link/file.txt": b"evil",
        "aclImdb/train/pos/../../../../9_9.txt": b"evil",
    }
    links = {"aclImdb/link": str(tmp_path), "aclImdb/train/pos/8_8.txt": "/etc/passwd"}
    path = datasets.tar_of(inside / imdb.ARCHIVE.name, {**evil, **reviews}, links)
    split = imdb.load(packed(monkeypatch, imdb, path))
    assert len(split.train_x) == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == [path.name, "inside"]


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    path = datasets.tar_of(tmp_path / imdb.ARCHIVE.name, {"aclImdb/zeros": bytes(5_000_000)})
    monkeypatch.setattr(tar_module, "MAX_BYTES", 4_000_000)
    with pytest.raises(DataError, match="unpacks to more than 4,000,000 bytes; refused"):
        imdb.load(packed(monkeypatch, imdb, path))
