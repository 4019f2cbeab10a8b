"""A server that is killed under load, five times: every answer that was received is in the ledger, once.

The long run of the same is bench/crash.
"""

from bench.crash.run import crash

KILLS, FUNCTIONS = 5, 3


def test_every_answer_that_was_received_before_a_kill_is_in_the_ledger_once() -> None:
    outcome = crash(KILLS, FUNCTIONS, seed=7, options=[])
    assert outcome.received > 0
    assert (outcome.lost, outcome.twice, outcome.wrong, outcome.unexplained) == ([], [], [], [])
    assert outcome.entries == outcome.received + outcome.entries_without_answer
    assert outcome.entries_without_answer <= outcome.in_flight
    assert outcome.overlapping_intervals == 0
