"""What the processes of a cluster are started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resources.hardware import HardwareClass, quickstart_classes
from resources.pools.forking import common_environment
from resources.pools.spec import dask_settings, worker_environment, worker_specs
from resources.pools.standing import parse_classes, pools_config


def test_one_process_per_accelerator_slot_tagged_by_class() -> None:
    classes = {
        "compute": HardwareClass(role="engine", num_workers=2),
        "cpu": HardwareClass(role="environment"),
        "spare": HardwareClass(role="engine", num_workers=0),
    }
    specs = worker_specs(classes, env={}, preload_modules=("prefect",), host="127.0.0.1")
    assert list(specs) == ["compute-0", "compute-1", "cpu-0"]
    options = [spec["options"] for spec in specs.values()]
    assert [each["resources"] for each in options] == [{"compute": 1}, {"compute": 1}, {"cpu": 4}]
    assert [each["nthreads"] for each in options] == [3, 3, 6]
    assert all(each["preload"] == ["prefect"] and each["host"] == "127.0.0.1" for each in options)


def test_threads_follow_the_class_and_the_caller_wins() -> None:
    environment = worker_environment(
        HardwareClass(role="learner", torch_threads=3), {"PREFECT_API_URL": "http://h/api"}
    )
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["PREFECT_API_URL"] == "http://h/api"
    assert environment["PREFECT_LOGGING_EXTRA_LOGGERS"] == "resources,tasks"
    assert worker_environment(HardwareClass(role="learner"), {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_are_forked_from_one_process_only_when_they_are_alike_and_without_accelerators() -> None:
    classes = quickstart_classes()
    assert common_environment(classes, {"A": "1"}) == worker_environment(classes["cpu"], {"A": "1"})
    more_threads = HardwareClass(role="learner", torch_threads=2)
    assert common_environment({**classes, "learner": more_threads}, {}) is None
    accelerated = HardwareClass(role="engine", device="cuda")
    assert common_environment({**classes, "compute": accelerated}, {}) is None
    absent = HardwareClass(role="engine", device="cuda", num_workers=0)
    assert common_environment({**classes, "compute": absent}, {}) is not None


def test_a_lost_worker_is_an_error_not_a_silent_second_run() -> None:
    settings = dask_settings(30.0)
    assert settings["distributed.scheduler.allowed-failures"] == 0
    assert settings["distributed.scheduler.no-workers-timeout"] == "30s"
    assert settings["distributed.worker.daemon"] is False
    assert settings["distributed.deploy.lost-worker-timeout"] == "120s", "a nanny's new worker is not closed again"


def test_workers_are_not_profiled() -> None:
    """An hour of Dask's profiles took hundreds of MB in the worker that runs most stages."""
    assert dask_settings(30.0)["distributed.worker.profile.enabled"] is False


def test_the_run_file_and_the_command_line_name_the_classes(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("seed: 1\npools:\n  start_timeout_s: 5\n")
    config = pools_config(run_file, "compute=2,cpu=3")
    assert config.start_timeout_s == 5
    assert {name: each.num_workers for name, each in config.classes.items()} == {
        "compute": 2,
        "bandwidth": 1,
        "learner": 1,
        "cpu": 3,
        "control": 1,
    }
    assert set(pools_config(None, None).classes) == set(quickstart_classes())


@pytest.mark.parametrize(
    ("classes", "message"), [("gpu=1", "names .'gpu'.; known classes"), ("cpu", "has 'cpu'; write class=number")]
)
def test_wrong_classes_are_refused(classes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pools_config(None, classes)


def test_a_run_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config .*missing.yaml cannot be read"):
        pools_config(tmp_path / "missing.yaml", None)


def test_classes_are_numbers_by_name() -> None:
    assert parse_classes("compute=1, cpu=2") == {"compute": 1, "cpu": 2}
