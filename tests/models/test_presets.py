import math

import jax
import pytest

from llamarl_jax.models.presets import PRESETS
from llamarl_jax.models.transformer import TransformerSpec

# Parameters of the published checkpoints, as the Hub counts them in their safetensors files.
PUBLISHED = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def test_every_preset_has_a_published_count():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_published_model(name):
    shapes = TransformerSpec.build(PRESETS[name], is_scanned=True).shapes
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == PUBLISHED[name]


def test_qwen25_heads_are_as_wide_as_the_hidden_size_allows():
    assert {PRESETS[name].head_dim for name in PRESETS if name.startswith("qwen2.5")} == {64, 128}
