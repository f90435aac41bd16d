"""`--code-budget` gives up the largest text programs, and says so where it may not."""

import pytest

from tests.precompile.named import model_on
from tpu_vl.errors import ConfigError
from tpu_vl.precompile.footprint import model_shape
from tpu_vl.precompile.program_sizes import total_code
from tpu_vl.sized import SizedModel


def sized(**flags: int) -> SizedModel:
    return model_on("qwen3_vl_8b", "v6e:2x2", tensor_parallel_size=4, **flags)


def code(model: SizedModel) -> int:
    return total_code(model_shape(model.family, model.cfg, model.mesh), model.engine_config)


def test_default_sizes_fit_the_default_budget() -> None:
    model = sized()
    assert model.engine_config.token_capacities == (4, 16, 64, 256, 1024, 2048)
    assert code(model) < 1 << 30


def test_a_smaller_budget_gives_up_the_largest_prefill_step() -> None:
    whole = sized()
    small = sized(code_budget=code(whole) - 1)
    assert small.engine_config.token_capacities == (4, 16, 64, 256, 1024)
    assert small.engine_config.max_num_batched_tokens == 1024
    assert code(small) < code(whole)
    # The media pool holds the largest frames and one step's tokens.
    assert small.engine_config.pool_rows == whole.engine_config.pool_rows - 1024
    assert small.engine_config.num_pages >= whole.engine_config.num_pages


def test_what_was_asked_for_is_refused_rather_than_changed() -> None:
    budget = code(sized()) - 1
    with pytest.raises(ConfigError, match=rf"--max-num-batched-tokens 2048 .*{budget}"):
        sized(code_budget=budget, max_num_batched_tokens=2048)


def test_a_budget_that_no_program_of_all_sequences_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs 256 .*--code-budget 1000000: raise it"):
        sized(code_budget=1_000_000)
