"""A server whose engine says TEXT; the one HTTP client of these tests is closed when they are over."""

import pytest

from tests.serving.fake_engine import HTTP, TEXT, fake_server, saying


@pytest.fixture(scope="session", autouse=True)
def close_http():
    yield
    HTTP.close()


@pytest.fixture(scope="module")
def server():
    with fake_server(saying(TEXT, 3, 1, 2)) as (address, engine):
        yield address, engine
