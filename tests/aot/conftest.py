import pytest

from llamarl_jax.aot.targets import find_obstacle


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
