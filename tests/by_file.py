"""Which tests a process of `pytest -n` gets together."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

ONE_AT_A_TIME = (
    "tests/test_cli.py::TestMistakes::test_found_by_the_server_app_end_with_its_line",
    "tests/test_cli.py::TestRuns::",
    "tests/test_cli.py::test_an_interrupt_ends_the_run_and_all_it_started",
    "tests/test_cli.py::test_so_does_a_termination_while_flower_starts",
    "tests/test_runner.py::TestSuperLink::test_why_a_run_could_not_start_is_said",
    "tests/compare/test_cli_compare.py::test_with_flower_it_is_interrupted_and_goes_on",
    "tests/secure_sum/test_docs_example.py::test_it_runs_in_flower",
    "tests/strategies/test_plugin.py::test_a_whole_run_of_flower",
)
"""How the ids of tests begin that start Flower's own processes, each with many of its own.

Named here and not marked with `xdist_group`: the process that deals knows tests by their ids alone, and
pytest 9.2 leaves out of those what pytest-xdist 3.8 adds for a group.
"""


def is_one_at_a_time(test_id: str) -> bool:
    """Whether no other such test may run beside it."""
    return test_id.startswith(ONE_AT_A_TIME)


class ByFile(LoadFileScheduling):
    """Deals files, so that a file's fixtures and what its tests cache are made once.

    Tests that must not run beside each other count as one more file.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "one at a time" if is_one_at_a_time(nodeid) else super()._split_scope(nodeid)
