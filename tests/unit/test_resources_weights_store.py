"""The weight store on both back ends: whole versions or none, verified, pruned around whoever reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from resources.object_store import LocalObjectStore, ObjectStore
from resources.weights.manifest import WeightsDamaged
from resources.weights.store import WeightConflict, WeightStore

TIED = json.dumps({"model_type": "qwen3", "tie_word_embeddings": True}).encode()
UNTIED = json.dumps({"model_type": "qwen3", "tie_word_embeddings": False}).encode()
NAMES = {"model.embed_tokens.weight", "model.norm.weight"}


def make_tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    embedding = torch.arange(12, dtype=torch.float32).reshape(4, 3) * scale
    return {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.full((3,), scale, dtype=torch.bfloat16)}


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return ObjectStore.open(store_url)


@pytest.fixture
def weights(store: ObjectStore, tmp_path: Path, clock: Clock) -> WeightStore:
    return WeightStore(store, "run", cache=tmp_path / "cache", clock=clock)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def test_what_is_published_is_fetched_bit_for_bit(weights: WeightStore) -> None:
    assert weights.latest() is None and weights.versions() == []
    manifest = weights.publish(3, make_tensors(), files={"config.json": TIED}, base=2)
    assert weights.latest() == 3 and weights.versions() == [3]
    assert weights.manifest(3) == manifest
    assert (manifest.base, manifest.published_at, manifest.run_id) == (2, 1000.0, "run")
    assert manifest.tensors["model.norm.weight"].dtype == "bfloat16"
    assert manifest.tensors["model.embed_tokens.weight"].shape == (4, 3)
    assert set(manifest.files) == {"model.safetensors", "config.json"}
    assert_equal(weights.fetch(3, NAMES), make_tensors())
    directory = weights.directory(3)
    assert (directory / "config.json").read_bytes() == TIED
    assert (directory / "model.safetensors").stat().st_size == manifest.num_bytes


def test_a_fetched_version_survives_its_removal(weights: WeightStore) -> None:
    for version in (0, 1):
        weights.publish(version, make_tensors(version + 1))
    old = weights.fetch(0)
    assert weights.prune(1, set()) == [0]
    assert_equal(old, make_tensors(1))


def test_a_version_that_is_not_there_is_named_with_those_that_are(weights: WeightStore) -> None:
    weights.publish(1, make_tensors())
    for read in (weights.manifest, weights.fetch, weights.directory):
        with pytest.raises(KeyError, match=r"version 2 of run 'run' is not in .*it holds \[1\]"):
            read(2)


def test_the_same_weights_may_be_published_again_and_others_not(weights: WeightStore) -> None:
    first = weights.publish(1, make_tensors())
    assert weights.publish(1, make_tensors()) == first
    with pytest.raises(WeightConflict, match="version 1 of run 'run' is already published with other weights"):
        weights.publish(1, make_tensors(2.0))
    assert_equal(weights.fetch(1), make_tensors())
    weights.publish(1, make_tensors(2.0), on_exist="replace")
    assert_equal(weights.fetch(1), make_tensors(2.0))


def test_latest_never_moves_back(weights: WeightStore) -> None:
    weights.publish(6, make_tensors())
    weights.publish(5, make_tensors())
    assert weights.latest() == 6 and weights.versions() == [5, 6]


def test_s24_an_unmatched_name_is_an_error_on_the_readers_side(weights: WeightStore) -> None:
    """S24: one tensor under another name is named as missing and as unmatched."""
    tensors = make_tensors()
    tensors["model.norm.wait"] = tensors.pop("model.norm.weight")
    weights.publish(1, tensors)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\].*unmatched \['model.norm.wait'\]"):
        weights.fetch(1, NAMES)


def test_s24_a_tied_head_left_out_is_recorded_and_given_back(weights: WeightStore) -> None:
    """S24: the reader of a tied model gets its head, by reference and not as a copy."""
    manifest = weights.publish(1, make_tensors(), files={"config.json": TIED})
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    tensors = weights.fetch(1, NAMES | {"lm_head.weight"})
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    assert set(weights.fetch(1)) == NAMES


def test_s24_an_untied_head_left_out_is_an_error(weights: WeightStore) -> None:
    """S24: on the publisher's side where the model's configuration is known, else on the reader's."""
    with pytest.raises(ValueError, match=r"lm_head.weight is missing and config.json does not tie it"):
        weights.publish(1, make_tensors(), files={"config.json": UNTIED})
    assert weights.versions() == []
    weights.publish(1, make_tensors())
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\]"):
        weights.fetch(1, NAMES | {"lm_head.weight"})


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_s24_a_damaged_file_is_found_by_its_checksum(weights: WeightStore, store: ObjectStore, file: str) -> None:
    """S24, checksums on both sides: one flipped bit, size unchanged."""
    weights.publish(1, make_tensors(), files={"config.json": TIED})
    key = f"runs/run/weights/v000001/{file}"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    for read in (weights.fetch, weights.directory):
        with pytest.raises(WeightsDamaged, match=rf"{file} has .*its manifest says"):
            read(1)


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    weights = WeightStore(store, "run")
    weights.publish(1, make_tensors(), files={"config.json": TIED})
    store.delete("runs/run/weights/v000001/config.json")
    with pytest.raises(WeightsDamaged, match=r"config.json is missing, though its manifest names it"):
        weights.fetch(1)


@pytest.mark.parametrize(
    ("version", "tensors", "files", "message"),
    [
        (-1, make_tensors(), {}, "version is -1"),
        (0, {}, {}, "has no tensors"),
        (0, make_tensors(), {"manifest.json": b""}, "'manifest.json' is not allowed"),
        (0, make_tensors(), {"a/b": b""}, "'a/b' is not allowed"),
    ],
)
def test_a_malformed_publication_is_refused(
    tmp_path: Path, version: int, tensors: dict[str, torch.Tensor], files: dict[str, bytes], message: str
) -> None:
    weights = WeightStore(ObjectStore.open(tmp_path), "run")
    with pytest.raises(ValueError, match=message):
        weights.publish(version, tensors, files=files)
    assert weights.versions() == []


class StoreThatFailsAt(LocalObjectStore):
    """Refuses one object of a version: the disk is full just there."""

    failing_name = ""

    def __init__(self, root: Path, failing_name: str) -> None:
        super().__init__(str(root))
        self.failing_name = failing_name

    def sub(self, prefix: str) -> ObjectStore:
        return StoreThatFailsAt(self.root / prefix, self.failing_name)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._refuse(key)
        super().put(key, data)

    def adopt(self, key: str, source: Path) -> None:
        self._refuse(key)
        super().adopt(key, source)

    def _refuse(self, key: str) -> None:
        if key.endswith(f"v000002/{self.failing_name}"):
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_s18_a_publication_that_fails_in_the_middle_is_not_seen(tmp_path: Path, name: str) -> None:
    """S18: readers go on with the version before, and the same version can be published afterwards."""
    files = {"config.json": TIED, "tokenizer.json": b"{}"}
    broken, whole = WeightStore(StoreThatFailsAt(tmp_path, name), "run"), WeightStore(ObjectStore.open(tmp_path), "run")
    broken.publish(1, make_tensors(), files=files)
    with pytest.raises(OSError, match="No space left"):
        broken.publish(2, make_tensors(2.0), files=files)
    assert whole.latest() == 1 and whole.versions() == [1]
    with pytest.raises(KeyError):
        whole.fetch(2)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]
    whole.publish(2, make_tensors(2.0), files=files)
    assert whole.latest() == 2
    assert_equal(whole.fetch(2), make_tensors(2.0))


def test_prune_keeps_the_newest_and_the_protected(weights: WeightStore, store: ObjectStore) -> None:
    for version in range(6):
        weights.publish(version, make_tensors(version))
    assert weights.prune(2, {1}) == [0, 2, 3]
    assert weights.versions() == [1, 4, 5]
    assert not [key for key in store.list("runs/run/weights") if "/v000003/" in key]
    assert weights.prune(2, {1}) == []
    with pytest.raises(ValueError, match="keep is 0"):
        weights.prune(0, set())


def test_s8_the_cleaner_waits_for_a_slow_reader(weights: WeightStore) -> None:
    """S8: a version under lease stays however many are published after it, and goes when the reader is done."""
    weights.publish(0, make_tensors(0))
    with weights.reading(0, "slow engine"):
        for version in range(1, 5):
            weights.publish(version, make_tensors(version))
            weights.prune(2, set())
        assert weights.versions() == [0, 3, 4]
        assert_equal(weights.fetch(0), make_tensors(0))
    assert weights.prune(2, set()) == [0]


def test_the_lease_of_a_reader_that_died_runs_out(weights: WeightStore, clock: Clock, store: ObjectStore) -> None:
    for version in (0, 1):
        weights.publish(version, make_tensors(version))
    killed = weights.reading(0, "killed engine")
    killed.__enter__()
    clock.now += 1799
    assert weights.prune(1, set()) == []
    clock.now += 2
    assert weights.prune(1, set()) == [0]
    assert not [key for key in store.list("runs/run/weights") if "leases" in key]
    killed.__exit__(None, None, None)  # a reader that comes back after all finds its lease gone, and does no harm


def test_a_reader_that_comes_while_a_version_is_being_removed_keeps_it(
    weights: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is taken after the cleaner's first look: its second look finds it, and the version is back whole."""
    for version in (0, 1):
        weights.publish(version, make_tensors(version))
    looks = iter([False, True])
    monkeypatch.setattr(weights._leases, "is_held", lambda version: next(looks))
    assert weights.prune(1, set()) == []
    assert weights.versions() == [0, 1]
    assert_equal(weights.fetch(0), make_tensors(0))


def test_what_a_killed_cleaner_left_is_removed(weights: WeightStore, store: ObjectStore) -> None:
    for version in (0, 1, 3):
        weights.publish(version, make_tensors(version))
    store.delete("runs/run/weights/v000000/manifest.json")
    store.put("runs/run/weights/v000004/model.safetensors", b"being published")
    assert weights.prune(2, set()) == [0]
    assert [key for key in store.list("runs/run/weights") if "v000000" in key] == []
    assert store.exists("runs/run/weights/v000004/model.safetensors")


@pytest.mark.s3
def test_a_remote_version_is_downloaded_once_and_anew_when_it_changed(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore.open(s3_url)
    weights = WeightStore(store, "run", cache=tmp_path)
    weights.publish(0, make_tensors(0))
    weights.publish(1, make_tensors(1))
    first = weights.directory(1)
    inode = (first / "model.safetensors").stat().st_ino
    assert weights.directory(1) == first and (first / "model.safetensors").stat().st_ino == inode
    (first / "model.safetensors").write_bytes(b"a copy that was damaged")
    assert_equal(weights.fetch(1), make_tensors(1))
    weights.publish(1, make_tensors(5), on_exist="replace")
    assert_equal(weights.fetch(1), make_tensors(5))
    old = weights.directory(0)
    weights.prune(1, set())
    weights.fetch(1)
    assert not old.exists()
