"""What does a run say when its Prefect server goes away under it?"""

from __future__ import annotations

import httpx
import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from flows.server import PrefectServer, told_when_lost
from flows.server_watch import LOST_AFTER_S, ServerWatch
from resources.failures import InfrastructureFailure

URL = "http://10.0.0.1:4200/api"


def test_a_server_that_is_lost_is_named_with_the_remedy():
    with (
        pytest.raises(
            InfrastructureFailure,
            match=rf"the Prefect server at {URL} was lost under the run \(ConnectError: refused\). What was recorded .*"
            "start the server again .* resume the run with --resume",
        ),
        told_when_lost(PrefectServer(URL, is_local=False)),
    ):
        raise httpx.ConnectError("refused")


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError), told_when_lost(PrefectServer(URL, is_local=True)):
        raise KeyError("mine")


def test_where_a_local_servers_log_lies_is_told():
    with (
        pytest.raises(InfrastructureFailure, match="its log is in .*logs"),
        told_when_lost(PrefectServer(URL, is_local=True)),
    ):
        raise httpx.ReadTimeout("")


def test_a_server_without_a_sign_of_life_is_tried_again_no_more_until_it_answers():
    now, alive = 0.0, True
    before = PREFECT_CLIENT_MAX_RETRIES.value()
    assert before > 0
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 5}) as settings:
        watch = ServerWatch(URL, settings, lambda: alive, lambda: now)

        def retries_after(seconds: float) -> int:
            nonlocal now
            now += seconds
            watch.look()
            return PREFECT_CLIENT_MAX_RETRIES.value()

        assert retries_after(1000.0) == 5
        alive = False
        assert retries_after(LOST_AFTER_S - 1.0) == 5, "a restart is waited out"
        assert retries_after(2.0) == 0
        assert retries_after(2.0) == 0
        alive = True
        assert retries_after(1.0) == 5
    assert PREFECT_CLIENT_MAX_RETRIES.value() == before == get_current_settings().client.max_retries
