"""One contract for both back ends of the object store, and what is particular to each."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resources.object_store import ObjectStore

CLAIMERS = 4
CLAIMS = 25


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return ObjectStore.open(store_url)


def test_put_replaces_and_get_returns_the_bytes(store: ObjectStore) -> None:
    store.put("runs/a/one.bin", b"first")
    store.put("runs/a/one.bin", memoryview(b"second"))
    assert store.get("runs/a/one.bin") == b"second"
    assert store.size("runs/a/one.bin") == 6
    assert store.exists("runs/a/one.bin")


def test_create_takes_a_free_key_once(store: ObjectStore) -> None:
    assert store.create("claims/1", b"first") is True
    assert store.create("claims/1", b"second") is False
    assert store.get("claims/1") == b"first"


def test_create_has_one_winner_among_threads(store: ObjectStore) -> None:
    together = threading.Barrier(CLAIMERS)

    def claim(owner: int) -> bool:
        together.wait(timeout=30)
        return store.create("claims/contended", str(owner).encode())

    with ThreadPoolExecutor(CLAIMERS) as threads:
        won = list(threads.map(claim, range(CLAIMERS)))
    assert won.count(True) == 1
    assert store.get("claims/contended") == str(won.index(True)).encode()


def test_an_absent_object_is_a_key_error_that_names_it(store: ObjectStore) -> None:
    store.put("folder/object", b"")
    for key in ("nothing", "folder", "folder/object/below"):
        assert not store.exists(key)
        with pytest.raises(KeyError, match=key):
            store.get(key)
        with pytest.raises(KeyError, match=key):
            store.size(key)


def test_delete_removes_and_ignores_what_is_not_there(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert store.create("a/b", b"again")


def test_list_is_sorted_recursive_and_by_folder(store: ObjectStore) -> None:
    for key in ("runs/b/2", "runs/b/1", "runs/a/deep/x", "runs/bb/3", "other"):
        store.put(key, b"")
    assert store.list("runs/b") == store.list("runs/b/") == ["runs/b/1", "runs/b/2"]
    assert store.list("runs") == ["runs/a/deep/x", "runs/b/1", "runs/b/2", "runs/bb/3"]
    assert store.list() == ["other", "runs/a/deep/x", "runs/b/1", "runs/b/2", "runs/bb/3"]
    assert store.list("absent") == []


def test_json_round_trip_and_strictness(store: ObjectStore) -> None:
    value = {"b": [1, None, 0.5], "a": "ü"}
    store.put_json("x.json", value)
    assert store.get_json("x.json") == value
    assert json.loads(store.get("x.json"))["a"] == "ü"
    with pytest.raises(ValueError, match="JSON"):
        store.put_json("x.json", float("nan"))
    assert store.get_json("x.json") == value


def test_adopt_moves_a_local_file_into_the_store(store: ObjectStore, tmp_path: Path) -> None:
    staged = store.staging("weights/big.bin")
    staged.write_bytes(b"w" * 1000)
    assert store.list() == []
    store.adopt("weights/big.bin", staged)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"replaced")
    assert store.get("weights/big.bin") == b"w" * 1000
    store.adopt("weights/big.bin", elsewhere)
    assert store.get("weights/big.bin") == b"replaced"
    assert not staged.exists() and not elsewhere.exists()


def test_a_store_travels_as_its_url(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    twin = pickle.loads(pickle.dumps(store))
    assert twin == store and hash(twin) == hash(store)
    assert twin.sub("a").get("b") == b"x"
    assert twin.sub("a").uri("b") == store.uri("a/b") == f"{store.url}/a/b"
    assert len(pickle.dumps(store)) < 300


def test_arrow_reads_what_was_put(store: ObjectStore) -> None:
    store.put("t/x.bin", b"payload")
    file_system, base = store.arrow()
    with file_system.open_input_file(f"{base}/t/x.bin") as file:
        assert file.read() == b"payload"


def test_check_writable_leaves_nothing(store: ObjectStore) -> None:
    store.check_writable()
    assert store.list() == []


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "../up", "a/./b", "a/.tmp-1", "a\\b"])
def test_a_malformed_key_is_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="object key"):
        store.put(key, b"")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/x", "allowed: file:///path, s3://bucket/prefix"),
        ("file://relative/x", "absolute path"),
        ("s3:///prefix", "names no bucket"),
        ("", "give a path"),
    ],
)
def test_an_unusable_url_is_refused_with_the_remedy(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObjectStore.open(url)


def test_a_plain_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = ObjectStore.open("state/store/")
    assert store.url == f"file://{tmp_path}/state/store"
    assert store == ObjectStore.open(tmp_path / "state" / "store")
    assert store.local_path("a/b") == tmp_path / "state" / "store" / "a" / "b"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"store: 'file://.*/file/store' cannot be written.*choose a folder"):
        ObjectStore.open(tmp_path / "file" / "store").check_writable()


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_named(s3_endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"'s3://absent-bucket/x' cannot be written.*check that the bucket exists"):
        ObjectStore.open("s3://absent-bucket/x").check_writable()


@pytest.mark.s3
def test_s3_has_no_local_path(s3_url: str) -> None:
    assert ObjectStore.open(s3_url).local_path("a") is None


class BrokenSecondPart:
    """A raw file whose first write takes half and whose second fails, as when the disk is full."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.writes = 0

    def write(self, data: memoryview) -> int:
        self.writes += 1
        if self.writes == 2:
            raise OSError(28, "No space left on device")
        return os.write(self.descriptor, data[: len(data) // 2])

    def __enter__(self) -> BrokenSecondPart:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


@pytest.mark.parametrize("verb", ["put", "create"])
def test_s18_a_file_write_that_fails_at_its_second_part_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """S18 on file://: no visible object, no leftover, and the next attempt goes through."""
    store = ObjectStore.open(tmp_path)

    def open_broken(path: Path, *_: object, **__: object) -> BrokenSecondPart:
        return BrokenSecondPart(os.open(path, os.O_WRONLY | os.O_CREAT))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", open_broken)
        with pytest.raises(OSError, match="No space left"):
            getattr(store, verb)("object", b"0123456789")
    assert not store.exists("object") and store.list() == [] and os.listdir(tmp_path) == []
    assert store.create("object", b"0123456789")


@pytest.mark.s3
def test_s18_an_s3_upload_that_fails_at_its_second_part_shows_nothing(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S18 on s3://: a multipart upload whose second part is lost is aborted, and an older object stays whole."""
    import s3fs

    store = ObjectStore.open(s3_url)
    call = s3fs.S3FileSystem._call_s3

    async def lose_second_part(self: s3fs.S3FileSystem, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "upload_part" and kwargs["PartNumber"] == 2:
            raise OSError("connection lost")
        return await call(self, method, *args, **kwargs)

    data = bytes(101 * 2**20)  # s3fs uploads in parts from 100 MiB
    with monkeypatch.context() as lossy:
        lossy.setattr(s3fs.S3FileSystem, "_call_s3", lose_second_part)
        with pytest.raises(OSError, match="connection lost"):
            store.put("new", data)
    assert not store.exists("new") and store.list() == []


CLAIM_ALL = """
import json, sys
from resources.object_store import ObjectStore
store, owner, num_claims = ObjectStore.open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([n for n in range(num_claims) if store.create(f"claims/{n:03d}", owner.encode() * 4096)]))
"""


def test_create_has_one_winner_among_processes(tmp_path: Path) -> None:
    """Each claim is won once, and whoever loses it sees the winner's object whole."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM_ALL, str(tmp_path), str(owner), str(CLAIMS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for owner in range(CLAIMERS)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    winners = {str(owner): json.loads(process.communicate(timeout=30)[0]) for owner, process in enumerate(processes)}
    assert sorted(n for mine in winners.values() for n in mine) == list(range(CLAIMS))
    store = ObjectStore.open(tmp_path)
    for owner, mine in winners.items():
        assert all(store.get(f"claims/{n:03d}") == owner.encode() * 4096 for n in mine)
