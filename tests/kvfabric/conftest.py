import pytest

SCHEMES = ("inproc", "ucx")


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    """Tests that take it run over every transport, in one process."""
    name: str = request.param
    return name
