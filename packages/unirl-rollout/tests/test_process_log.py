"""What is said of the log of a process that failed."""

from unirl.rollout.engine.process_log import end_of_log

OF_A_WORKER = """(Worker pid=7) Traceback (most recent call last):
(Worker pid=7)   File "a.py", line 1, in f
(Worker pid=7) KeyError: 'heads'
"""
OF_ITS_OWNER = """ERROR 11-23 11:12:31 [stage.py:308] Traceback (most recent call last):
ERROR 11-23 11:12:31 [stage.py:308] EOFError
torch.cuda.OutOfMemoryError: 3 GiB
"""


def test_the_first_errors_stand_before_the_end(tmp_path):
    log = tmp_path / "log"
    log.write_text(f"{OF_A_WORKER * 2}{OF_ITS_OWNER}{'x' * 4000}")
    first, end = end_of_log(log).split("The end of its log:\n")
    assert (
        first == "The first errors in its log:\n  KeyError: 'heads'\n  EOFError\n  torch.cuda.OutOfMemoryError: 3 GiB\n"
    )
    assert end == "x" * 4000


def test_a_short_log_is_given_whole(tmp_path):
    log = tmp_path / "log"
    log.write_text(OF_A_WORKER)
    assert end_of_log(log, f"its log {log}") == f"The end of its log {log}:\n{OF_A_WORKER}"
    assert end_of_log(tmp_path / "none") == ""
