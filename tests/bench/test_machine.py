import json

from llamarl_jax.bench.machine import hardware, short_name, versions


def test_hardware_and_versions_are_plain_and_complete():
    machine = hardware()
    json.dumps([machine, versions()], allow_nan=False)
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0
    assert machine["cpu"]
    assert machine["gpu"] is None
    assert versions()["jax"].count(".") >= 2


def test_the_name_for_files_is_plain():
    cpu = {"gpu": None, "cpu": "Intel(R) Xeon(R) CPU @ 2.60GHz", "cores": 2}
    assert short_name(cpu) == "intel-xeon-cpu-2-cores"
    assert short_name({**cpu, "gpu": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"
