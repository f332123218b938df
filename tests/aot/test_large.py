"""The checks of `test_decode.py` at 70B and 405B on eight devices; `python -m tests.aot.figures` prints what they look at as a table."""

import pytest

from llamarl_jax.aot.decode import compile_decode
from llamarl_jax.aot.targets import H100, H200
from llamarl_jax.models.presets import PRESETS
from tests.aot import checks
from tests.aot.engines import engine_config

pytestmark = [pytest.mark.aot, pytest.mark.aot_large, pytest.mark.usefixtures("gpu_compiler")]


@pytest.mark.parametrize("name", ["llama3.1-70b", "llama3.1-405b"])
def test_a_large_model_decodes_like_a_small_one(name):
    model = PRESETS[name]
    report = compile_decode(model, engine_config(), tensor=8)
    checks.check_projections_are_float8(report, model)
    checks.check_attention_is_our_kernel(report, model, engine_config())
    checks.check_weights_are_read_as_stored(report)
    checks.check_cache_is_written_in_place(report)
    checks.check_collectives(report, model, 64)
    checks.check_memory_is_as_planned(report, model, engine_config())
    assert report.warnings == ()


def test_405b_in_bfloat16_needs_an_h200():
    model = PRESETS["llama3.1-405b"]
    reports = [compile_decode(model, engine_config("none"), tensor=8, target=target) for target in (H100, H200)]
    assert [report.fits for report in reports] == [False, True]
