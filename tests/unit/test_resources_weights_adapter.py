"""Versions that are adapters alone: each is merged into the run's base as it is, and into no other one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resources.object_store import ObjectStore
from resources.policy.directory import weights_digest
from resources.rollout.policy_files import fetch_policy_files
from resources.weights.adapter import MergedTensors
from resources.weights.manifest import AdapterEntry, WeightsDamaged
from resources.weights.store import WeightStore
from tests.model_directories import write_model

RANK, SCALING = 4, 2.0
TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("model"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return ObjectStore.open(store_url)


@pytest.fixture
def weights(store: ObjectStore, tmp_path: Path) -> WeightStore:
    return WeightStore(store, "run", cache=tmp_path / "cache")


def make_adapter(model: Path, version: int) -> dict[str, torch.Tensor]:
    base, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(version)
    tensors = {}
    for target in TARGETS:
        num_out, num_in = base[f"{target}.weight"].shape
        tensors[f"base_model.model.{target}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator)
        tensors[f"base_model.model.{target}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator)
    return tensors


def publish(weights: WeightStore, model: Path, *versions: int, digest: str | None = None) -> None:
    digest = digest or weights_digest(model)
    for version in versions:
        adapter = AdapterEntry(base_digest=digest, scaling=SCALING)
        weights.publish_base(model, digest)
        weights.publish(version, make_adapter(model, version), files={"adapter_config.json": b"{}"}, adapter=adapter)


def merged_by_hand(model: Path, version: int) -> dict[str, torch.Tensor]:
    tensors, adapter = load_file(model / "model.safetensors"), make_adapter(model, version)
    for target in TARGETS:
        down, up = (adapter[f"base_model.model.{target}.lora_{part}.weight"] for part in "AB")
        tensors[f"{target}.weight"] = tensors[f"{target}.weight"] + SCALING * (up @ down)
    return tensors


def test_every_version_is_merged_into_the_base_as_it_is(weights: WeightStore, model: Path) -> None:
    """Bit by bit, in whatever order versions are loaded and however many came before: nothing accumulates."""
    publish(weights, model, *range(6))
    pristine = load_file(model / "model.safetensors")
    for version in (0, 1, 2, 3, 4, 5, 1, 5, 0):
        found, expected = weights.fetch(version), merged_by_hand(model, version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    held = weights._held
    assert held is not None and all(torch.equal(held.tensors[name], pristine[name]) for name in pristine)


def test_a_version_holds_the_adapter_alone_and_names_its_base(weights: WeightStore, model: Path) -> None:
    publish(weights, model, 0, 1)
    manifest = weights.manifest(1)
    assert set(manifest.files) == {"adapter_model.safetensors", "adapter_config.json"}
    assert manifest.tensors.keys() == make_adapter(model, 1).keys()
    assert manifest.adapter == AdapterEntry(base_digest=weights_digest(model), base="base", scaling=SCALING)
    assert weights.num_bytes(1) == manifest.num_bytes < (model / "model.safetensors").stat().st_size / 10
    assert {path.name for path in weights.directory(1).iterdir()} >= set(manifest.files)
    assert (weights.policy_directory(1) / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_s24_names_are_those_of_the_policy(weights: WeightStore, model: Path) -> None:
    publish(weights, model, 1)
    names = set(load_file(model / "model.safetensors"))
    tensors = weights.fetch(1, names | {"lm_head.weight"})
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"version 1 of run 'run' does not fit .*missing \['model.more'\]"):
        weights.fetch(1, names | {"model.more"})


def test_the_base_is_never_pruned(weights: WeightStore, model: Path, store: ObjectStore, tmp_path: Path) -> None:
    publish(weights, model, *range(5))
    assert weights.prune(1, set()) == [0, 1, 2, 3]
    assert weights.versions() == [4]
    assert {key.split("/")[3] for key in store.list("runs/run/weights")} == {"base", "v000004", "latest.json"}
    fresh = WeightStore(store, "run", cache=tmp_path / "cache")
    for reader in (weights, fresh):
        assert torch.equal(reader.fetch(4)[f"{TARGETS[0]}.weight"], merged_by_hand(model, 4)[f"{TARGETS[0]}.weight"])
    assert {"config.json", "tokenizer_config.json"} <= {
        path.name for path in fetch_policy_files(store, "run").iterdir()
    }


def test_another_base_is_refused_by_reader_and_publisher(
    weights: WeightStore, model: Path, store: ObjectStore, tmp_path: Path
) -> None:
    publish(weights, model, 0)
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"run 'run' are adapters of the base .* start from the same policy"):
        publish(weights, other, 1)
    for key in store.list("runs/run/weights/base"):
        store.delete(key)
    reader = WeightStore(store, "run", cache=tmp_path / "second")
    with pytest.raises(WeightsDamaged, match=r"version 0 of run 'run' is an adapter of the base .* holds none"):
        reader.fetch(0)
    weights.publish_base(other, weights_digest(other))
    with pytest.raises(WeightsDamaged, match=r"version 0 of run 'run' is an adapter of the base .*means nothing"):
        reader.fetch(0)


def test_s24_a_damaged_base_or_adapter_is_found_by_its_checksum(
    weights: WeightStore, model: Path, store: ObjectStore, tmp_path: Path
) -> None:
    publish(weights, model, 0)
    for key in ("base/model.safetensors", "v000000/adapter_model.safetensors"):
        whole = store.get(f"runs/run/weights/{key}")
        store.put(f"runs/run/weights/{key}", whole[:-1] + bytes([whole[-1] ^ 1]))
        reader = WeightStore(store, "run", cache=tmp_path / key.partition("/")[0])
        with pytest.raises(WeightsDamaged, match="its manifest says"):
            reader.fetch(0)
        store.put(f"runs/run/weights/{key}", whole)
    assert WeightStore(store, "run", cache=tmp_path / "whole").fetch(0).keys()


def test_a_model_directory_that_changed_is_no_base(weights: WeightStore, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep policy.model_directory as it is"):
        publish(weights, write_model(tmp_path / "other", seed=1), 0, digest=weights_digest(model))
    publish(weights, model, 0)
    assert weights.fetch(0).keys(), "what an interrupted publication left is replaced"


def test_a_base_in_several_files_with_a_tied_head_in_bfloat16(
    weights: WeightStore, model: Path, tmp_path: Path
) -> None:
    """As hubs keep larger models. Merged in float32; what no model reads is left out."""
    tensors = load_file(model / "model.safetensors")
    several = tmp_path / "several"
    shutil.copytree(model, several)
    (several / "model.safetensors").unlink()
    names, half = sorted(tensors), len(tensors) // 2
    stored = {
        "model-00001-of-00002.safetensors": {n: tensors[n].bfloat16() for n in names[:half]},
        "model-00002-of-00002.safetensors": {
            **{n: tensors[n].bfloat16() for n in names[half:]},
            "lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"]),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
    }
    for name, of_file in stored.items():
        save_file(of_file, several / name, metadata={"format": "pt"})
    weight_map = {name: file for file, of_file in stored.items() for name in of_file}
    (several / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    digest = weights_digest(several)
    weights.publish_base(several, digest)
    weights.publish(2, make_adapter(model, 2), adapter=AdapterEntry(base_digest=digest, scaling=SCALING))
    found = weights.fetch(2)
    assert found.keys() == tensors.keys()
    name = f"{TARGETS[0]}.weight"
    change = merged_by_hand(model, 2)[name] - tensors[name]
    torch.testing.assert_close(found[name], tensors[name].bfloat16().float() + change, atol=1e-6, rtol=0)
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert (weights.policy_directory(2) / "model.safetensors.index.json").is_file()


def test_a_version_published_again_in_the_other_form_leaves_nothing_behind(weights: WeightStore, model: Path) -> None:
    """A directory with both would be read as either."""
    publish(weights, model, 3)
    merged = {name: tensor.contiguous() for name, tensor in weights.fetch(3).items()}
    config = (model / "config.json").read_bytes()
    weights.publish(3, merged, files={"config.json": config}, on_exist="replace")
    directory = weights.directory(3)
    assert {path.name for path in directory.iterdir()} - {"manifest.json"} == {"model.safetensors", "config.json"}
    assert torch.equal(weights.fetch(3)[f"{TARGETS[0]}.weight"], merged[f"{TARGETS[0]}.weight"])


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    base = {"layer.weight": torch.zeros(3, 2)}
    down, up = torch.zeros(1, 2), torch.zeros(3, 1)
    names = {part: f"base_model.model.layer.lora_{part}.weight" for part in "AB"}
    assert MergedTensors(base, {names["A"]: down, names["B"]: up}, 1.0, "it")["layer.weight"].shape == (3, 2)
    for adapter in (
        {names["A"]: down},
        {names["B"]: up},
        {names["A"].replace("layer", "other"): down, names["B"].replace("layer", "other"): up},
        {"layer.lora_magnitude_vector": up},
    ):
        with pytest.raises(ValueError, match="it does not fit its base: .* no pair of A and B"):
            MergedTensors(base, adapter, 1.0, "it")
    with pytest.raises(ValueError, match=r"layer.weight has shape \(3, 2\), and A \(2, 3\), B \(3, 1\)"):
        MergedTensors(base, {names["A"]: torch.zeros(2, 3), names["B"]: up}, 1.0, "it")
