"""Names of floating-point types and of models on the hub."""

import pytest
import torch

from unirl.types.errors import ConfigError
from unirl.types.hub import is_hub_id
from unirl.types.precision import DTYPES, dtype_named
from unirl.types.sampling import PRECISIONS


def test_every_precision_of_sampling_names_a_dtype() -> None:
    assert tuple(DTYPES) == PRECISIONS
    assert [dtype_named(name, "dtype") for name in PRECISIONS] == [torch.float32, torch.bfloat16, torch.float16]


def test_another_name_is_refused_with_the_option_that_holds_it() -> None:
    with pytest.raises(ConfigError, match=r"fsdp.param_dtype = 'fp8' must be one of fp32, bf16, fp16"):
        dtype_named("fp8", "fsdp.param_dtype")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", True),
        ("a/b_c.1", True),
        ("gpt2", False),
        ("./models/sd3", False),
        ("/models/sd3", False),
        ("a/b/c", False),
    ],
)
def test_a_hub_id_is_an_owner_and_a_name(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
