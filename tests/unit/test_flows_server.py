"""What does a run say when its Prefect server goes away under it?"""

from __future__ import annotations

import httpx
import pytest

from flows.server import PrefectServer, told_when_lost
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
