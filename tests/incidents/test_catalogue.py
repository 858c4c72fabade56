"""Every public incident of the catalogue has a test, or a reason why it has none."""

from tests.incidents.catalogue import marked_ids, read_catalogue


def test_every_incident_is_replayed_or_it_is_said_why_not() -> None:
    marked = {incident for incident, _ in marked_ids()}
    undecided = [one.id for one in read_catalogue() if (one.id in marked) == bool(one.missing)]
    assert not undecided


def test_tests_name_incidents_that_there_are() -> None:
    known = [one.id for one in read_catalogue()]
    assert len(set(known)) == len(known)
    assert {incident for incident, _ in marked_ids()} <= set(known)
