import jax

from llamarl_jax.bench.decode_cost import StepCost, kernel_params, step_cost
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import TransformerSpec

CONFIG = ModelConfig(
    vocab_size=10,
    valid_vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)


def test_a_step_worked_out_by_hand():
    # A layer: q 4·4, k 4·2, v 4·2, o 4·4 = 48; gate, up, down 3·4·6 = 72. Two layers: 240. LM head 10·4 = 40.
    assert kernel_params(CONFIG) == 240
    cost = step_cost(CONFIG, batch=3, num_prompts=2, prompt_tokens=4, new_tokens=3, kernel_itemsize=1, head_itemsize=4, cache_itemsize=2)
    assert cost == StepCost(
        weight_bytes=240 + 40 * 4,
        cache_bytes=2 * (1 * 2) * 2 * (2 * 4 + 3 * 1) * 2,  # keys and values, one head of 2, two layers, 0 to 2 own tokens, two bytes
        matmul_flops=2 * 280 * 3,
        attention_flops=2 * (2 * (2 * 2) * 5) * 2 * 3,  # scores and mixing, 2 FLOPs for each of two heads of 2 and five tokens
    )
    assert (cost.num_bytes, cost.num_flops) == (400 + 176, 1680 + 480)


def test_the_slower_of_memory_and_arithmetic_sets_the_limit():
    cost = StepCost(weight_bytes=900, cache_bytes=100, matmul_flops=1500, attention_flops=500)
    assert cost.limit_s(bytes_per_s=100, flops_per_s=1000) == 10
    assert cost.limit_s(bytes_per_s=1000, flops_per_s=100) == 20


def test_the_kernels_of_the_real_model_are_counted():
    leaves = jax.tree_util.tree_leaves_with_path(TransformerSpec.build(CONFIG, is_scanned=True).shapes)
    assert kernel_params(CONFIG) == sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
