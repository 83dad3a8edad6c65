"""What code asks of a device."""

import pytest
import torch

from unirl.types.devices import building_on, empty_cache, has_values, is_accelerator, is_on_host


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("meta", False), ("cuda:1", True), ("xpu", True)])
def test_a_device_with_its_own_memory_is_an_accelerator(device: str, expected: bool) -> None:
    assert is_accelerator(device) is expected
    assert is_accelerator(torch.device(device)) is expected
    assert has_values(device)


def test_a_cpu_has_no_cache_to_empty() -> None:
    empty_cache("cpu")


def test_a_part_for_the_host_is_built_where_it_computes_on_a_real_device() -> None:
    with building_on("cpu", of="cuda") as place:
        assert place == torch.device("cpu")
        assert not is_on_host()
