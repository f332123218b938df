import pytest

from llamarl_jax.bench.limits import DeviceLimits, measure_limits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_are_measured(dtype):
    limits = measure_limits(dtype, 1 << 20)
    assert min(limits.read_bytes_per_s, limits.copy_bytes_per_s, limits.matmul_flops_per_s) > 1e6


def test_the_best_of_two_measurements():
    assert DeviceLimits(1, 5, 3).best(DeviceLimits(2, 4, 3)) == DeviceLimits(2, 5, 3)
