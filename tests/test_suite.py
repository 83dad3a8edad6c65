"""What the suite promises of every test."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.parametrize("place", ["first", "second"])
def test_random_numbers_depend_on_the_name_of_a_test(place, request):
    drawn = torch.rand(3)
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    assert torch.equal(drawn, torch.rand(3))


@pytest.fixture
def ran(tmp_path):
    """The tests that a small suite with the conftest of this one runs with some options, or what is refused."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(f"def test_x_{name}(): pass\n\n\ndef test_y_{name}(): pass\n")

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        if done.stderr:
            return done.stderr
        passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
        return sorted(re.findall(r"test_\w+\.py::\w+", "\n".join(passed)))

    return run


def test_each_test_is_in_one_of_the_parts(ran):
    parts = [ran("--part", f"{k}/3") for k in range(3)]
    assert sorted(sum(parts, [])) == ran()
    assert len(ran()) == 8
    assert all(len(part) < 8 for part in parts)


def test_a_file_is_in_one_of_the_parts_where_files_stay_whole(ran):
    parts = [ran("--part", f"{k}/2", "-n", "2", "--dist", "loadfile") for k in range(2)]
    assert sorted(sum(parts, [])) == ran()
    files = [{line.partition("::")[0] for line in part} for part in parts]
    assert files[0] and files[1] and not files[0] & files[1]


@pytest.mark.parametrize("marks", ["matrix", "(matrix and not nightly) and not x", "(matrix or nightly) and not x"])
def test_parts_of_the_matrix_are_of_tests_however_it_is_asked_for(tmp_path, ran, marks):
    """Most of its tests are in a few files: parts of files would be of a few tests, or of nearly all."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = matrix\n nightly\n")
    for file in tmp_path.glob("test_*.py"):
        file.write_text("import pytest\n\n\n" + file.read_text().replace("def ", "@pytest.mark.matrix\ndef "))
    parts = [ran("-m", marks, "--part", f"{k}/2") for k in range(2)]
    assert len(sum(parts, [])) == 8
    files = [{line.partition("::")[0] for line in part} for part in parts]
    assert files[0] & files[1]


@pytest.mark.parametrize("value", ["3/3", "1", "-1/2", "1/0"])
def test_a_part_that_is_none_is_refused(ran, value):
    assert f"'{value}' is not K/N with K below N, as 0/3" in ran(f"--part={value}")
