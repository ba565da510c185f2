"""Seats told as changes are the seats; a server that was restarted asks a few; what all must hear is heard at once."""

import random

import pytest

from tests.workers.membership.test_rules import TIMING, Told, formed
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.asking import ASK_S, MOST_ASKED
from thinwire.workers.membership.attendance import Close, Send
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seating import Roster, Run, Turnover
from thinwire.workers.membership.seats import Identity, Limits, LostMember, Seated, Standing
from thinwire.workers.membership.state import State


def member(slot: int, standing: Standing) -> Seated:
    return Seated(Identity(f"id{slot}", slot, "10.0.0.1", 1000 + slot, port=4000 + slot), standing)


def newcomer(slot: int) -> Seated:
    return member(slot, Standing(None, None, 0, False))


def followed(before: Roster, chance: random.Random) -> Roster:
    """Some have gone, some have come; some are a step behind, hold nothing, or say something of their own."""
    stay = [rank for rank in range(len(before.members)) if chance.random() < 0.8]
    if chance.random() < 0.3:
        chance.shuffle(stay)
    members = [
        member(
            before.members[rank].identity.slot,
            Standing(before.generation, rank, 7 - (chance.random() < 0.2), chance.random() < 0.9)
            if chance.random() < 0.9
            else Standing(chance.choice([None, 1]), chance.choice([None, 0]), 3, False),
        )
        for rank in stay
    ]
    members += [newcomer(100 * before.generation + slot) for slot in range(chance.randint(0, 3))]
    lost = (LostMember("id0", 0, 0, "its connection ended"),)
    return Roster(generation=before.generation + 1, reason="by chance", lost=lost, furthest=7, members=tuple(members))


def test_changes_told_one_after_another_are_the_seats_told_in_full():
    for seed in range(200):
        chance = random.Random(seed)
        roster = Roster(generation=1, reason="first", members=tuple(newcomer(slot) for slot in range(6)))
        seat = roster.seat(0)
        for _ in range(4):
            known, roster = roster, followed(roster, chance)
            if not roster.members:
                break
            change = Turnover.between(known.generation, known.members, roster)
            rank = chance.randrange(len(roster.members))
            line = m.encoded(m.Seating(rank=rank, roster=roster, change=change))
            told = m.from_server.validate_json(line)
            assert isinstance(told, m.Seating)
            assert told.roster is None
            seat = told.seat_after(seat)
            assert seat == roster.seat(rank)


def test_a_death_among_a_thousand_is_told_in_a_few_hundred_bytes():
    before = Roster(generation=1, reason="first", members=tuple(newcomer(slot) for slot in range(1000)))
    rest = tuple(
        member(one.identity.slot, Standing(1, rank, 9, True))
        for rank, one in enumerate(before.members)
        if rank not in (0, 500)
    )
    after = Roster(generation=2, reason="two died", members=rest)
    change = Turnover.between(1, before.members, after)
    assert change.pieces == (Run(1, 499, 9, True), Run(501, 499, 9, True))
    assert len(m.encoded(m.Seating(rank=3, change=change))) < 300
    assert change.roster(before.seat(7)) == after


@pytest.mark.parametrize(
    "change",
    [
        Turnover(generation=9, reason="", base=8, pieces=(Run(0, 1, 0, True),)),
        Turnover(generation=9, reason="", base=1, pieces=(Run(1, 2, 0, True),)),
        Turnover(generation=9, reason="", base=1, pieces=(Run(2**50, 2**50, 0, True),)),
    ],
    ids=["of seats that it has not", "of a rank that is not there", "of no rank at all"],
)
def test_a_change_that_does_not_follow_is_no_seat(change):
    state = State(Identity("id0", 0, "h", 1))
    first = Roster(generation=1, reason="first", members=(newcomer(0), newcomer(1)))
    with pytest.raises(m.BadLine, match="cannot tell its seat"):
        state.heard(m.Seating(rank=0, change=change))
    state.heard(m.Seating(rank=0, roster=first))
    with pytest.raises(m.BadLine, match="cannot tell its seat"):
        state.heard(m.Seating(rank=0, change=change))
    assert state.seat == first.seat(0)
    with pytest.raises(m.BadLine, match="without seats"):
        state.heard(m.Seating(rank=0))
    with pytest.raises(m.BadLine, match="has no rank"):
        state.heard(m.Seating(rank=2, roster=Roster(generation=2, reason="", members=first.members)))


class Restarted:
    """A server that knows nothing, to which the members of a generation come with its number."""

    def __init__(self, size: int, **timing: float) -> None:
        self.told = formed(size)
        self.rules = Rules(Limits(1, size), TIMING, 0.0, after=1)
        self.asked: list[str] = []
        self.welcome: list[str] = []
        self.refused: list[str] = []
        self.closed: list[str] = []

    def take(self) -> None:
        for effect in self.rules.take():
            match effect:
                case Send(to, m.AskSeat()):
                    self.asked.append(to)
                case Send(to, m.Welcome()):
                    self.welcome.append(to)
                case Send(to, m.Refusal()):
                    self.refused.append(to)
                case Close(id):
                    self.closed.append(id)

    def come(self, slot: int, now: float, seated: int = 1) -> m.Refusal | None:
        answer = self.rules.hello(Identity(f"w{slot}", slot, "h", 1), seated, now)
        self.take()
        return answer

    def tell(self, slot: int, now: float) -> None:
        self.rules.heard(f"w{slot}", m.OwnSeat(seat=self.told.seats[f"w{slot}"]), now)
        self.take()


def test_a_server_that_was_restarted_asks_a_few_and_welcomes_all_by_one_answer():
    server = Restarted(10)
    for slot in range(10):
        assert server.come(slot, 0.1) is None
    assert server.asked == [f"w{slot}" for slot in range(MOST_ASKED)]
    assert server.welcome == []
    server.tell(2, 0.2)
    assert sorted(server.welcome) == sorted(f"w{slot}" for slot in range(10))
    server.tell(1, 0.3)  # it was asked too, and is late
    assert server.refused == []
    snapshot = server.rules.snapshot(0)
    assert (snapshot.generation, len(snapshot.members), snapshot.status) == (1, 10, "training")


def test_who_dies_or_hangs_when_it_is_asked_holds_up_nobody():
    server = Restarted(10)
    for slot in range(10):
        server.come(slot, 0.1)
    server.rules.gone("w0", "its connection ended", 0.2)
    server.take()
    assert server.asked[MOST_ASKED:] == ["w4"]
    server.rules.tick(0.2 + ASK_S)
    server.rules.tick(0.3 + ASK_S)
    server.take()
    assert server.closed == ["w1", "w2", "w3", "w4"]
    assert server.asked[MOST_ASKED + 1 :] == ["w5", "w6", "w7", "w8"]
    server.come(1, 3.4)  # it is there again
    server.tell(5, 3.5)
    assert sorted(server.welcome) == ["w1", "w5", "w6", "w7", "w8", "w9"]
    assert len(server.rules.snapshot(0).members) == 6


def test_a_member_of_an_older_generation_that_waits_is_told_that_others_went_on():
    server = Restarted(2)
    (old,) = formed(1).seats.values()
    assert server.come(7, 0.1, seated=1) is None
    newer = Roster(generation=5, reason="", members=tuple(one for one in server.told.seats["w0"].members))
    server.told.seats["w0"] = newer.seat(0)
    server.come(0, 0.2, seated=5)
    server.tell(0, 0.3)
    assert server.welcome == ["w0"]
    assert (server.refused, server.closed) == (["w7"], ["w7"])
    assert old.generation == 1


def test_nothing_else_is_taken_from_who_is_not_welcome_yet():
    server = Restarted(2)
    server.come(0, 0.1)
    with pytest.raises(m.BadLine, match="before its welcome"):
        server.rules.heard("w0", m.Beat(number=1, step=None, seconds=0.0), 0.2)
    server.rules.misspoke("w0", "it said something else", 0.2)
    server.take()
    server.come(1, 0.3)
    server.tell(1, 0.4)
    assert server.welcome == ["w1"]


def test_the_first_death_is_told_at_once_and_those_after_it_together():
    told: Told = formed(6)
    told.rules.take()
    for rank in range(4):
        told.rules.gone(f"w{rank}", "its connection ended", 0.6)
    first = [one.message for one in told.rules.take() if isinstance(one, Send) and isinstance(one.message, m.LostPeers)]
    assert [list(message.ranks) for message in first] == [[0]] * 5
    told.rules.hello(Identity("w2", 2, "h", 1), 1, 0.62)  # it lives, and is back before anybody heard of it
    told.rules.take()
    told.rules.tick(0.65)
    rest = {
        one.to: list(one.message.ranks)
        for one in told.rules.take()
        if isinstance(one, Send) and isinstance(one.message, m.LostPeers)
    }
    assert rest == {id: [1, 3] for id in ("w2", "w4", "w5")}
