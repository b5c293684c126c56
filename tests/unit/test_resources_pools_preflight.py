"""Which class serves which, and what makes two processes differ."""

from __future__ import annotations

from resources.hardware import quickstart_classes
from resources.pools.fingerprint import Fingerprint, take_fingerprint
from resources.pools.preflight import ServingClasses, map_classes

VERSIONS = (("python", "3.11"), ("dask", "2026.8.0"))


def test_classes_with_workers_serve_themselves() -> None:
    present = {name: ["tcp://h:1"] for name in quickstart_classes()}
    serving, missing = map_classes(quickstart_classes(), present)
    assert serving == {name: name for name in quickstart_classes()}
    assert missing == []


def test_a_missing_class_falls_back_and_is_counted() -> None:
    """S20: an error or a fallback, never silence."""
    present = {"bandwidth": ["b"], "learner": ["l"], "cpu": ["c"], "control": ["k"]}
    serving, missing = map_classes(quickstart_classes(), present)
    assert serving["compute"] == "bandwidth"
    assert missing == []
    pools = ServingClasses(serving, {name: tuple(found) for name, found in present.items()})
    assert pools.num_fallbacks == 1
    assert pools.workers_of("compute") == ("b",)


def test_a_class_that_nobody_serves_is_missing() -> None:
    serving, missing = map_classes(quickstart_classes(), {"cpu": ["c"], "control": ["k"]})
    assert missing == ["compute", "bandwidth", "learner"]
    assert set(serving) == {"cpu", "control"}


def test_fingerprints_of_one_checkout_agree() -> None:
    assert take_fingerprint() == take_fingerprint()
    assert take_fingerprint().difference(take_fingerprint()) == ""


def test_differences_are_put_in_words() -> None:
    mine = Fingerprint("aaaaaaaaaaaa", "/here", VERSIONS)
    theirs = Fingerprint("bbbbbbbbbbbb", "/there", (("python", "3.12"),))
    assert mine.difference(theirs) == (
        "code bbbbbbbbbbbb in /there instead of aaaaaaaaaaaa in /here, python 3.12 instead of 3.11, "
        "dask missing instead of 2026.8.0"
    )
