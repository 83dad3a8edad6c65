"""What the suite promises of every test."""

import zlib

import pytest
import torch


@pytest.mark.parametrize("place", ["first", "second"])
def test_random_numbers_depend_on_the_name_of_a_test(place, request):
    drawn = torch.rand(3)
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    assert torch.equal(drawn, torch.rand(3))
