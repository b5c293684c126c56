"""The golden files are what the float64 code beside them gives, and that code shares nothing with what it checks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.golden import algorithms_reference, training_reference

FOLDER = Path(algorithms_reference.__file__).parent


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Places at which two JSON values differ; numbers by more than the last bits of another machine's `exp`."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [text for key in expected for text in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for index, pair in pairs for text in differences(*pair, f"{where}[{index}]")]
    if isinstance(expected, float) and isinstance(found, float | int):
        close = math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
        return [] if close else [f"{where}: {found}, not {expected}"]
    return [] if found == expected else [f"{where}: {found}, not {expected}"]


@pytest.mark.parametrize("name", ["algorithms", "training"])
def test_the_file_is_what_its_script_gives(name: str) -> None:
    script = {"algorithms": algorithms_reference, "training": training_reference}[name]
    written = json.loads((FOLDER / f"{name}.json").read_text())
    assert differences(json.loads(json.dumps(script.all_cases())), written) == []
    assert differences({"a": [1.0]}, {"a": [1.1]}) == [".a[0]: 1.0, not 1.1"]


def test_no_reference_imports_what_it_checks() -> None:
    for script in FOLDER.glob("*_reference.py"):
        imports = [line for line in script.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not [line for line in imports if line.split()[1].startswith(("tasks", "resources", "flows"))], script
