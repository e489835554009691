"""The one HTTP client of these tests is closed when they are over."""

import pytest

from tests.serving.fake_engine import HTTP


@pytest.fixture(scope="session", autouse=True)
def close_http():
    yield
    HTTP.close()
