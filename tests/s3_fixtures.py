"""An S3 service on 127.0.0.1 for tests marked ``s3``: moto's server, one bucket, a fresh prefix for each test."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pytest

BUCKET = "rollart-tests"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of a running S3 service; the AWS variables of this process (and its children) point at it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", endpoint)
        environment.setenv("AWS_ACCESS_KEY_ID", "testing")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environment.setenv("NO_PROXY", "127.0.0.1")
        environment.setenv("no_proxy", "127.0.0.1")
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """Url of an empty prefix in a bucket of the service."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def store_url(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """Url of an empty store, once on each back end."""
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"file://{tmp_path}/store"
