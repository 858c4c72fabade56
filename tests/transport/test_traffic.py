"""Whether anything is on its way, from what each end of a connection says."""

import pytest

from kvreplay.transport.traffic import Connection, Ledger, Traffic

CONNECTION = Connection("tcp://127.0.0.1:1", "D0!1")


class Ends:
    """Both ends of connections, and the ledger that hears them."""

    def __init__(self) -> None:
        self.asks, self.answers = Traffic(), Traffic()
        self.ledger = Ledger()

    def tell(self, *ends: Traffic) -> bool:
        """Whether nothing is on its way after that."""
        for end in ends or (self.asks, self.answers):
            told = end.tell()
            if told is not None:
                self.ledger.hear(told)
        return self.ledger.is_even

    def ask(self) -> None:
        self.asks.opened(CONNECTION)
        self.asks.sent(CONNECTION)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_a_question_is_awaited_until_it_is_taken(ends: Ends) -> None:
    ends.ask()
    assert not ends.tell()
    ends.answers.taken(CONNECTION)
    assert ends.tell()


def test_an_answer_is_awaited_until_it_is_taken(ends: Ends) -> None:
    ends.ask()
    ends.answers.taken(CONNECTION)
    ends.answers.sent(CONNECTION, is_answer=True)
    assert not ends.tell()
    ends.asks.taken(CONNECTION, is_answer=True)
    assert ends.tell()


def test_who_took_it_may_say_so_before_who_sent_it(ends: Ends) -> None:
    ends.ask()
    ends.answers.taken(CONNECTION)
    assert ends.tell(ends.answers)
    assert ends.tell(ends.asks)


def test_a_taken_question_does_not_stand_for_an_answer(ends: Ends) -> None:
    ends.ask()
    ends.answers.taken(CONNECTION)
    ends.answers.sent(CONNECTION, is_answer=True)
    ends.tell(ends.answers)
    assert not ends.tell(ends.asks)


def test_nothing_is_awaited_over_a_closed_connection(ends: Ends) -> None:
    ends.ask()
    ends.tell()
    ends.asks.closed(CONNECTION)
    assert ends.tell()
    ends.answers.sent(CONNECTION, is_answer=True)
    assert ends.tell()


def test_nothing_is_awaited_from_where_nobody_listens(ends: Ends) -> None:
    ends.answers.gone(CONNECTION.endpoint)
    ends.tell()
    ends.ask()
    assert ends.tell()
    ends.ledger.listens(CONNECTION.endpoint)
    ends.ask()
    assert not ends.tell()


def test_who_stops_listening_takes_no_more(ends: Ends) -> None:
    ends.ask()
    assert not ends.tell()
    ends.answers.gone(CONNECTION.endpoint)
    assert ends.tell()


def test_strangers_are_not_waited_for_and_not_remembered_for_ever(ends: Ends) -> None:
    for number in range(10_000):
        stranger = Connection(CONNECTION.endpoint, f"stranger{number}")
        ends.answers.taken(stranger)
        ends.answers.sent(stranger, is_answer=True)
        ends.tell()
    assert ends.ledger.is_even
    assert len(ends.ledger._early) <= 1 << 12


def test_what_a_socket_has_lost_can_be_given_up(ends: Ends) -> None:
    ends.ask()
    ends.tell()
    ends.ledger.give_up()
    assert ends.ledger.is_even
    ends.answers.taken(CONNECTION)  # it comes after all
    assert ends.tell()
    ends.asks.sent(CONNECTION)
    ends.asks.sent(CONNECTION)
    assert not ends.tell()
