"""What stands in `deployments/` and `prefect.yaml` names things that exist. No container engine is needed here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from resources.hardware import quickstart_classes

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS = ROOT / "deployments"


def manifests() -> list[dict[str, Any]]:
    files = sorted((DEPLOYMENTS / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def worker_commands() -> dict[str, str]:
    """Command lines of Dask workers by where they stand."""
    services = yaml.safe_load((DEPLOYMENTS / "compose.yaml").read_text())["services"]
    found = {f"compose/{name}": service.get("command", "") for name, service in services.items()}
    for manifest in manifests():
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            found[f"kubernetes/{manifest['metadata']['name']}"] = " ".join(container["args"])
    return {where: command for where, command in found.items() if "dask_worker" in command}


@pytest.mark.parametrize("place", ["compose", "kubernetes"])
def test_every_hardware_class_of_the_defaults_has_workers_tagged_with_it(place):
    commands = [command for where, command in worker_commands().items() if where.startswith(place)]
    tags = {match[1] for command in commands if (match := re.search(r"--resources (\w+)=\d+", command))}
    assert tags == set(quickstart_classes())


def test_modules_that_commands_run_or_preload_exist():
    for where, command in worker_commands().items():
        for module in re.findall(r"(?:-m|--preload) ([\w.]+)", command):
            assert importlib.util.find_spec(module) is not None, (where, module)


def test_every_selector_matches_its_pods():
    for manifest in manifests():
        if manifest["kind"] == "Deployment":
            spec = manifest["spec"]
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"], manifest["metadata"]


@pytest.mark.parametrize("name", ["rewards-docker.json", "rewards-kubernetes.json"])
def test_job_templates_use_only_variables_that_they_declare(name):
    text = (DEPLOYMENTS / "work-pools" / name).read_text()
    template = json.loads(text)
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


def test_dockerfiles_copy_what_exists():
    for file in (DEPLOYMENTS / "docker").iterdir():
        for line in file.read_text().splitlines():
            if line.startswith("COPY"):
                for source in line.split()[1:-1]:
                    assert (ROOT / source).exists(), (file, source)


def test_deployments_name_flows_by_module_and_leave_the_work_pool_to_the_environment():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    names = set()
    for deployment in deployments:
        module, _, function = deployment["entrypoint"].rpartition(".")
        names.add(f"{getattr(importlib.import_module(module), function).name}/{deployment['name']}")
        assert deployment["pull"] == []
        assert re.fullmatch(r"\{\{ \$\w+_POOL \}\}", deployment["work_pool"]["name"])
    assert names == {"train/quickstart", "serve-rewards/serverless", "evaluate/latest", "warm-start/quickstart"}
