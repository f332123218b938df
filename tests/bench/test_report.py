import datetime

import pytest

from llamarl_jax.bench.decode_cost import StepCost
from llamarl_jax.bench.limits import DeviceLimits
from llamarl_jax.bench.options import DecodeOptions
from llamarl_jax.bench.report import DecodeReport
from llamarl_jax.bench.sample import OURS, Row, Sample


def _run(step_s: float, limits: DeviceLimits | None) -> Sample:
    return Sample(total_s=3.0, prefill_s=1.0, decode_steps=1, step_s=step_s, token_ids=[[1]], limits=limits)


def _report(runner: str, *samples: Sample) -> DecodeReport:
    report = DecodeReport(
        started=datetime.datetime.now(datetime.UTC),
        model="m",
        origin="random",
        options=DecodeOptions(),
        hardware={},
        versions={},
        load_average=None,
    )
    cost = StepCost(weight_bytes=30.0, cache_bytes=10.0, matmul_flops=50.0, attention_flops=10.0)
    report.add(1, cost, [Row(runner=runner, batch=1, samples=samples, agreement=1.0)], [], {})
    return report


def test_a_run_is_compared_with_the_rates_beside_it():
    quiet, busy, tired = DeviceLimits(20, 5, 100), DeviceLimits(10, 9, 60), DeviceLimits(40, 5, 10)
    report = _report(OURS, _run(4.0, quiet), _run(5.0, busy), _run(6.5, tired))  # 2 s of 4, 4 s of 5, and 6 s of FLOPs of 6.5
    assert report.limit_share(report.rows[0]) == pytest.approx(4 / 5)
    assert report.limits == DeviceLimits(40, 9, 100)


def test_a_peer_has_no_share():
    report = _report("peer", _run(4.0, None))
    assert report.limit_share(report.rows[0]) is None
