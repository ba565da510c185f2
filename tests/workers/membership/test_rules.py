"""Single rules, on a clock that the test sets: who only seems to be silent, who is seated, what a restart adopts."""

import dataclasses

import pytest

from thinwire.workers.membership.attendance import Happened, Send, Timing
from thinwire.workers.membership.messages import (
    Answer,
    Beat,
    Formed,
    FromMember,
    Join,
    Notice,
    Refusal,
    Seating,
)
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Doing, Identity, Limits, Seat, Seated, Standing

TIMING = Timing(start_wait_s=0.2)


class Told:
    """The rules, with what they said so far."""

    def __init__(self, least: int, most: int, timing: Timing = TIMING, after: int = 0) -> None:
        self.rules = Rules(Limits(least, most), timing, 0.0, after=after)
        self.seats, self.refusals, self.events = {}, {}, []

    def take(self) -> None:
        for effect in self.rules.take():
            match effect:
                case Send(to, Seating(seat=seat)):
                    self.seats[to] = seat
                case Send(to, Refusal() as refusal):
                    self.refusals[to] = refusal
                case Happened():
                    self.events.append(effect)

    def come(self, id: str, slot: int, now: float, signature: dict[str, str] | None = None) -> None:
        assert self.rules.hello(Identity(id, slot, "h", 1), None, now) is None
        self.join(id, now, signature=signature)

    def say(self, id: str, message: FromMember, now: float) -> None:
        self.rules.heard(id, message, now)
        self.take()

    def join(
        self,
        id: str,
        now: float,
        signature: dict[str, str] | None = None,
        *,
        step: int = 0,
        has_state: bool | None = None,
    ) -> None:
        """With its state, where it is seated."""
        seat = self.seats.get(id)
        held = seat is not None if has_state is None else has_state
        standing = (
            Standing(None, None, step, held) if seat is None else Standing(seat.generation, seat.rank, step, held)
        )
        after = 0 if seat is None else seat.generation
        self.say(id, Join(after=after, standing=standing, signature=signature), now)

    def beat(self, id: str, now: float, step: int | None = 1, seconds: float = 0.1, doing: Doing | None = None) -> None:
        self.say(id, Beat(number=1, step=step, seconds=seconds, doing=doing), now)

    def answer(self, id: str, number: int, now: float, *, yes: bool = True, step: int = 3) -> None:
        self.say(id, Answer(number=number, yes=yes, step=step), now)

    def run(self, since: float, until: float, beating: dict[str, float], step: int | None = 1) -> None:
        """Beats each second, at the given part of it, and ticks."""
        for tick in range(round(since * 20), round(until * 20)):
            now = tick / 20
            for id, part in beating.items():
                if tick % 20 == round(part * 20):
                    self.beat(id, now, step)
            self.rules.tick(now)
            self.take()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def formed(size: int, most: int | None = None) -> Told:
    told = Told(1, most or size)
    for slot in range(size):
        told.come(f"w{slot}", slot, 0.0)
    told.run(0.0, 0.5, {})
    assert [seat.size for seat in told.seats.values()] == [size] * size
    for id in told.seats:
        told.say(id, Formed(generation=1), 0.5)
    return told


def test_a_worker_that_was_given_up_leaves_and_is_sent_away_whenever_it_comes():
    told = formed(2, 4)
    told.come("w2", 2, 0.6)
    told.rules.bar("w2", "given up", 0.7)
    told.rules.bar("w1", "given up", 0.7)
    told.rules.bar("w3", "given up", 0.7)  # which has not come yet
    told.take()
    assert [event.fields["id"] for event in told.events if event.kind == "dismissed"] == ["w2"]
    for id, slot in (("w2", 2), ("w3", 3)):
        refusal = told.rules.hello(Identity(id, slot, "h", 1), None, 0.8)
        assert refusal is not None
        assert (refusal.verdict, refusal.why) == ("dismissed", "given up")
    assert told.rules._attendance.unwanted == {"w1": "given up"}  # at a boundary, as a member that was dismissed


def test_a_new_process_in_the_slot_of_the_only_member_is_seated_once_that_one_cannot_commit_any_more():
    told = formed(1)
    told.run(0.5, 12.0, {})
    told.come("new", 0, 12.0)
    told.run(12.0, TIMING.lease_s - 1.0, {"new": 0.0})
    assert "new" not in told.seats
    told.run(TIMING.lease_s - 1.0, TIMING.lease_s + 2.0, {"new": 0.0})
    assert told.seats["new"].generation == 2


@pytest.mark.parametrize("has_begun", [True, False])
def test_half_of_the_members_go_on_at_once_only_if_they_hold_the_state(has_begun):
    told = formed(1, most=2)
    told.run(0.5, 2.0, {"w0": 0.0})
    told.come("new", 1, 2.0)
    told.answer("w0", 1, 2.1, step=1)
    told.join("w0", 2.2)
    assert told.seats["new"].size == 2
    told.run(3.0, 20.0, {"new": 0.0}, step=2 if has_begun else None)
    assert ("w0" in told.refusals) is has_begun
    told.run(20.0, TIMING.lease_s + 4.0, {"new": 0.0}, step=None)
    assert "w0" in told.refusals


def test_a_newcomer_that_is_silent_for_long_may_come_back():
    told = formed(1)
    told.come("new", 1, 1.0)
    told.run(1.0, TIMING.lease_s + 5.0, {"w0": 0.0})
    assert "new" not in told.refusals
    told.come("new", 1, TIMING.lease_s + 5.0)


def test_a_member_that_comes_back_before_it_has_read_its_seat_is_given_it_again():
    told = formed(2)
    del told.seats["w1"]
    told.rules.gone("w1", "its connection ended", 1.0)
    told.come("w1", 1, 1.1)
    assert told.seats["w1"].generation == 1


def test_a_connection_that_was_reset_costs_nothing_where_the_worker_comes_back_at_once():
    told = formed(2)
    told.rules.reset("w1", "its connection broke", 1.0)
    told.run(1.0, 1.3, {"w0": 0.0})
    assert told.rules.hello(Identity("w1", 1, "h", 1), told.seats["w1"], 1.3) is None
    told.run(1.3, 8.0, {"w0": 0.0, "w1": 0.0})
    assert "lost" not in told.kinds()


@pytest.mark.parametrize(("heard_before_s", "waits_s"), [(0.5, TIMING.reset_s), (3.0, TIMING.return_s)])
def test_a_connection_that_was_reset_is_a_loss_where_the_worker_does_not_come_back(heard_before_s, waits_s):
    told = formed(2)
    told.beat("w1", 1.0)
    at = 1.0 + heard_before_s
    told.run(1.0, at, {"w0": 0.0})
    told.rules.reset("w1", "its connection broke", at)
    told.run(at, at + waits_s - 0.1, {"w0": 0.0})
    assert "lost" not in told.kinds()
    told.run(at + waits_s - 0.1, at + waits_s + 0.1, {"w0": 0.0})
    assert told.events[-1].kind == "lost"


def test_who_was_refused_is_told_the_same_when_it_comes_back():
    told = Told(1, 1)
    told.come("w0", 0, 0.0, {"model": "a"})
    told.run(0.0, 0.5, {})
    told.come("w1", 1, 1.0, {"model": "b"})
    refusal = told.refusals["w1"]
    assert refusal.verdict == "refused"
    assert told.rules.hello(Identity("w1", 1, "h", 1), None, 2.0) == refusal


def test_who_could_not_hear_of_a_regroup_has_its_time_from_when_it_is_back():
    told = formed(3)
    told.run(0.5, 5.0, {"w0": 0.0, "w1": 0.3})
    told.rules.gone("w2", "its connection ended", 5.0)
    told.run(5.0, 40.0, {})
    told.run(40.0, 40.0 + TIMING.join_timeout_s - 1.0, {"w0": 0.0, "w1": 0.3})
    assert "w0" not in told.refusals
    told.run(40.0 + TIMING.join_timeout_s - 1.0, 41.0 + TIMING.join_timeout_s, {"w0": 0.0, "w1": 0.3})
    assert "it hangs" in told.refusals["w0"].why


def test_a_server_that_was_cut_off_briefly_waits_for_the_last_to_be_heard_again():
    told = formed(3)
    told.run(0.5, 20.0, {f"w{slot}": slot / 5 for slot in range(3)})
    told.run(20.0, 28.0, {})
    told.run(28.0, 31.0, {"w0": 0.0, "w1": 0.2})
    assert told.refusals == {}
    told.run(31.0, 50.0, {f"w{slot}": slot / 5 for slot in range(3)})
    assert told.refusals == {}


def test_newcomers_that_come_first_when_the_server_is_back_do_not_take_the_place_of_members():
    told = formed(1)
    told.run(0.5, 60.0, {})
    told.come("new", 0, 60.0)
    told.run(60.0, 61.0, {"new": 0.0})
    told.run(61.0, 70.0, {"w0": 0.0})
    assert told.refusals.keys() <= {"new"}


def test_a_restarted_server_lets_members_of_an_earlier_generation_wait_for_those_of_the_last():
    before = formed(3)
    early = before.seats["w2"]
    before.rules.gone("w2", "its connection ended", 1.0)
    for id in ("w0", "w1"):
        before.join(id, 1.1)
    last = before.seats["w0"]
    assert last.generation == 2
    told = Told(1, 3, Timing(quiet_s=TIMING.lease_s), after=2)
    told.seats["w2"] = early
    assert told.rules.hello(early.members[2].identity, early, 0.5) is None
    told.join("w2", 0.6)
    told.run(1.0, 20.0, {"w2": 0.0})
    assert told.refusals == {}
    assert told.rules.hello(last.members[0].identity, last, 20.0) is None
    told.run(20.0, 21.0, {"w0": 0.0})
    assert told.refusals["w2"].verdict == "fenced"


def test_one_that_stops_before_the_step_that_was_planned_ends_the_generation_for_all():
    told = formed(2)
    told.say("w0", Notice(reason="told to go"), 1.0)
    told.run(1.0, 2.0, {"w0": 0.0, "w1": 0.0}, step=3)
    (proposed,) = [event for event in told.events if event.kind == "proposed"]
    assert proposed.fields["step"] > 3
    for id in ("w0", "w1"):
        told.answer(id, 1, 2.0)
    told.take()
    assert told.kinds()[-1] == "confirmed"
    told.join("w1", 3.0, step=3)  # a collective took too long there
    assert told.kinds()[-1] == "over"


def test_members_that_wait_in_a_collective_are_told_that_another_has_stopped_as_planned():
    told = formed(2)
    told.say("w0", Notice(reason="told to go"), 1.0)
    told.run(1.0, 2.0, {"w0": 0.0, "w1": 0.0}, step=3)
    (proposed,) = [event for event in told.events if event.kind == "proposed"]
    for id in ("w0", "w1"):
        told.answer(id, 1, 2.0)
    told.join("w1", 3.0, step=proposed.fields["step"])
    told.run(3.0, 4.0, {"w0": 0.0, "w1": 0.0})
    assert "over" not in told.kinds()
    told.run(4.0, 10.0, {"w0": 0.0, "w1": 0.0})
    assert told.kinds()[-1] == "over"
    assert told.refusals == {}


def test_the_silence_of_all_during_a_stop_of_the_server_itself_does_not_count():
    told = formed(3)
    told.run(100.0, 101.0, {"w0": 0.0, "w1": 0.0, "w2": 0.0})  # nothing ran before, the server's clock neither
    assert told.refusals == {}
    assert len(told.rules.snapshot(0).members) == 3


def test_a_longer_step_is_waited_for_before_a_member_is_fenced():
    told = formed(3)
    told.beat("w1", 1.0, step=3, seconds=10.0)
    told.rules.gone("w2", "it died", 1.0)
    told.join("w0", 1.0)
    told.run(1.0, 30.5, {"w0": 0.0, "w1": 0.0})
    assert told.refusals == {}
    told.run(30.5, 32.0, {"w0": 0.0, "w1": 0.0})
    why = "it did not come to the regroup within 30 s: it hangs"
    assert told.refusals["w1"].why == why
    assert told.seats["w0"].reason == f"worker w2 was lost: it died; worker w1 was lost: {why}"


def test_members_with_state_come_before_those_without_and_newcomers_last():
    told = formed(3, most=4)
    told.come("new", 9, 1.0)
    told.rules.gone("w1", "it died", 1.0)
    told.join("w2", 1.0)
    told.join("w0", 1.0, has_state=False)  # as where rank 0 died while it sent it
    assert [member.identity.slot for member in told.seats["w2"].members] == [2, 0, 9]


def second_generation() -> tuple[Seat, Identity]:
    """That of w0 and a newcomer, after w1 has died; and the newcomer."""
    told = formed(2, most=3)
    told.come("new", 2, 1.0)
    told.rules.gone("w1", "it died", 1.0)
    told.join("w0", 1.0)
    seat = told.seats["w0"]
    assert (seat.generation, [member.identity.id for member in seat.members]) == (2, ["w0", "new"])
    return seat, seat.members[1].identity


def test_a_restarted_server_takes_the_largest_generation_that_it_is_told():
    seat, _ = second_generation()
    told = Told(1, 3)
    told.come("new", 2, 0.0)  # it comes first, and has not read that it is seated
    assert told.rules.hello(seat.members[0].identity, seat, 0.1) is None
    told.take()
    assert (told.seats["new"].generation, told.seats["new"].rank) == (2, 1)
    assert [occupant.rank for occupant in told.rules.snapshot(0).members] == [0, 1]


def test_a_restarted_server_closes_nothing_before_all_members_have_come_back_or_are_given_up():
    seat, new = second_generation()
    told = Told(1, 3)
    assert told.rules.hello(seat.members[0].identity, seat, 0.0) is None
    told.seats["w0"] = seat
    told.join("w0", 0.0)
    assert told.seats == {"w0": seat}
    assert told.rules.hello(new, dataclasses.replace(seat, rank=1), 0.5) is None
    told.seats["new"] = dataclasses.replace(seat, rank=1)
    told.join("new", 0.5)
    assert (told.seats["w0"].generation, told.seats["w0"].size) == (3, 2)


def test_a_join_that_was_sent_before_the_seat_was_read_ends_nothing():
    told = formed(2)
    told.seats.clear()
    for id in ("w0", "w1"):
        told.join(id, 1.0)
    assert [seat.generation for seat in told.seats.values()] == [1, 1]
    assert told.rules.snapshot(0).status == "training"


def test_a_number_that_anybody_has_heard_of_is_not_given_again():
    told = formed(1)
    late = Identity("late", 7, "h", 1)
    seat = dataclasses.replace(
        told.seats["w0"], generation=5, members=(Seated(late, told.seats["w0"].members[0].standing),)
    )
    refusal = told.rules.hello(late, seat, 1.0)
    assert refusal is not None
    assert refusal.verdict == "fenced"
    told.join("w0", 1.0)
    assert told.seats["w0"].generation == 6


def test_a_proposal_that_is_refused_is_made_again_twice_as_far_and_rests_after_ten():
    told = formed(1, most=2)
    told.come("new", 1, 1.0)
    told.run(1.0, 1.05, {})
    for number in range(1, 11):
        told.answer("w0", number, 1.0, yes=False, step=0)
    steps = [event.fields["step"] for event in told.events if event.kind == "proposed"]
    assert steps == [2 * 2**i for i in range(10)]
    told.run(1.0, 3.0, {"w0": 0.0, "new": 0.0}, step=0)
    assert [event.fields["step"] for event in told.events if event.kind == "proposed"][10:] == [2]


def test_nothing_is_confirmed_before_all_have_said_yes():
    told = formed(2, most=3)
    told.come("new", 2, 1.0)
    told.run(1.0, 1.05, {})
    told.answer("w0", 1, 1.0)
    told.run(1.0, 2.0, {"w0": 0.0, "w1": 0.0, "new": 0.0})
    assert "confirmed" not in told.kinds()
    told.answer("w1", 1, 2.0)
    assert told.kinds()[-1] == "confirmed"
