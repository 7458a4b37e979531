"""What the API suite drives: our own service, started once, or another one by its URL.

    pytest tests/api_suite
    pytest tests/api_suite --base-url http://host:8000 --model NAME [--reference-url http://one-engine-alone:8001]

With a URL nothing is started, and of ours nothing is imported. What the other service does not offer is skipped with
its own words as the reason. With a reference the same requests go to both, and their answers are compared field by
field. Keys come from the environment variable OPENAI_API_KEY.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
sys.path.insert(0, str(Path(__file__).parent))

from target import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("api suite", "the service that tests/api_suite drives")
    group.addoption("--base-url", help="a running service, like http://127.0.0.1:8000; default: our own, started")
    group.addoption("--model", help="the model's name there; default: the first that it lists")
    group.addoption("--reference-url", help="one engine alone with the same model: answers must be equal")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The service."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    # The options are unknown to pytest where the suite is not named on its command line.
    base_url, model, reference_url = (
        request.config.getoption(name, default=None) for name in ("--base-url", "--model", "--reference-url")
    )
    if base_url is not None:
        with Target(base_url, reference_url, model=model, key=key) as target:
            yield target
        return
    from own_service import start_own_service

    directory = tmp_path_factory.mktemp("api-suite")
    with (
        start_own_service(directory) as (deployment, reference_url),
        Target(deployment.url, reference_url, model=None, key=key, deployment=deployment) as target,
    ):
        yield target
