"""Which run is this, and where does it go on? (S10)"""

from __future__ import annotations

import pytest

import flows.opening
from flows.config import RunConfig
from flows.opening import check_inputs
from flows.opening import open_run as opened_run
from resources.rewards.liveness import RUN_DRIVER
from resources.runs import claim_resume, find_run, write_iteration


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(store=str(tmp_path / "store"), num_iterations=60)


def open_run(config, resume):
    """Opened, and ended at once."""
    with opened_run(config, resume) as opened:
        return opened


def finish(run, iteration: int) -> None:
    write_iteration(run, iteration, {"version": iteration + 1, "queue_state": {"version": iteration + 1}})


def test_a_new_run_is_found_as_the_latest(config):
    run, point = open_run(config, None)
    assert point is None
    assert find_run(config.store, "latest") == run


def test_60_iterations_done_and_60_more_asked_for_goes_on_with_iteration_61(config):
    """S10."""
    run, _ = open_run(config, None)
    for iteration in range(60):
        finish(run, iteration)
    more = config.model_copy(update={"num_iterations": 120})
    again, point = open_run(more, "latest")
    assert again == run
    assert point is not None and point.version == 60  # iteration number 60 is the 61st


def test_a_resume_never_ends_at_once_with_nothing_done(config):
    """S10."""
    run, _ = open_run(config, None)
    finish(run, 59)
    run.folder().put_json("summary.json", {"num_iterations": 60})
    with pytest.raises(ValueError, match=r"has 60 iterations .* for 60 more set num_iterations to 120"):
        open_run(config, run.run_id)


def test_a_run_that_was_killed_in_its_last_evaluation_is_summed_up(config):
    """All iterations are there and the summary is not: something is left to do. Also when an earlier end, of fewer
    iterations, was summed up."""
    run, _ = open_run(config, None)
    finish(run, 59)
    _, point = open_run(config, run.run_id)
    assert point is not None and point.version == 60
    run.folder().put_json("summary.json", {"num_iterations": 30})
    assert open_run(config, run.run_id)[1] == point
    fewer = config.model_copy(update={"num_iterations": 30})
    with pytest.raises(ValueError, match="nothing is left to do"):
        open_run(fewer, run.run_id)


@pytest.fixture
def quick(config) -> RunConfig:
    """Signs of life come and are waited for within a moment."""
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"heartbeat_s": 0.05})})


def test_a_living_run_is_not_resumed_beside_itself(quick):
    with opened_run(quick, None) as (run, _):
        finish(run, 0)
        with pytest.raises(ValueError, match=f"run {run.run_id} is running: its sign of life .*/driver changes"):
            open_run(quick, "latest")
        assert run.folder().list("resumes/") == [], "nothing was changed"
    assert open_run(quick, "latest")[1] is not None


def test_of_two_resumes_within_seconds_one_is_refused(quick):
    """The first one gives its sign of life from its claim on, long before its pools and its server are there."""
    run, _ = open_run(quick, None)
    finish(run, 0)
    with opened_run(quick, "latest"):
        with pytest.raises(ValueError, match="is running"):
            open_run(quick, "latest")
        assert run.folder().list("resumes/") == ["resumes/000001.json"]


def test_of_two_resumes_at_the_same_instant_one_is_refused(quick, monkeypatch):
    """Both saw that nobody runs it: the claim is a conditional create, and the store lets one have it."""
    run, _ = open_run(quick, None)
    finish(run, 0)
    monkeypatch.setattr(flows.opening, "has_driver", lambda *arguments: not claim_resume(run, 1))
    with pytest.raises(ValueError, match="is being resumed by another driver since a moment ago"):
        open_run(quick, "latest")


def test_a_claim_that_gave_no_sign_is_waited_for_and_then_passed_over(quick):
    """Its driver died between the claim and its first sign of life."""
    run, _ = open_run(quick, None)
    finish(run, 0)
    assert claim_resume(run, 1)
    open_run(quick, "latest")
    assert run.folder().list("resumes/") == ["resumes/000001.json", "resumes/000002.json"]
    assert run.folder().get_json(RUN_DRIVER)["life"] == 2


def test_checkpoints_beyond_the_resume_are_forgotten(config):
    """A learner that is rebuilt starts from the newest one; none may be of a life that was given up."""
    run, _ = open_run(config, None)
    finish(run, 0)
    for version in (1, 2):
        run.folder().put_json(f"checkpoints/v{version:06d}/state.json", {})
    open_run(config, "latest")
    assert run.folder().list("checkpoints/") == ["checkpoints/v000001/state.json"]


def test_a_resume_of_another_configuration_is_refused(config):
    run, _ = open_run(config, None)
    with pytest.raises(ValueError, match="cannot be resumed with another seed"):
        open_run(config.model_copy(update={"seed": 9}), run.run_id)


def test_an_unknown_run_names_the_known_ones(config):
    run, _ = open_run(config, None)
    with pytest.raises(ValueError, match=run.run_id):
        open_run(config, "nosuch")
    with pytest.raises(ValueError, match="holds no run yet"):
        find_run(str(config.store) + "-other", "latest")


def test_a_bad_name_is_refused(config):
    with pytest.raises(ValueError, match="name is 'Bad Name'"):
        open_run(config.model_copy(update={"name": "Bad Name"}), None)


def test_a_missing_model_directory_is_named(config, tmp_path):
    policy = config.policy.model_copy(update={"model_directory": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="none"):
        check_inputs(config.model_copy(update={"policy": policy}))


def test_a_store_that_cannot_be_written_is_named(config, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="file/store"):
        check_inputs(config.model_copy(update={"store": str(file / "store")}))


def test_an_environment_that_does_not_exist_is_named_with_its_family(config):
    family = config.families["frozen_lake"].model_copy(update={"environment": "frozen_pond"})
    with pytest.raises(ValueError, match=r"families.lake: .*frozen_pond"):
        check_inputs(config.model_copy(update={"families": {"lake": family}}))
