"""Of two sides of a network that is cut, of two servers, of two groups, one commits; and nobody is ended needlessly."""

import pytest

from tests.workers.membership.cuts import Net
from thinwire.workers.membership.commit_lease import LEASE_S
from thinwire.workers.membership.messages import Join, Unreachable
from thinwire.workers.membership.seats import Standing
from thinwire.workers.membership.state import Fenced, Refused


def why(node) -> str:
    return str(node.state.ended)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_servers_host_cut_off_for_30_s_ends_nobody_and_training_goes_on(size):
    net = Net(1, size)
    nodes = net.formed(size)
    net.server_side = 9
    before = len(net.commits)
    net.run(30.0)
    assert len(net.commits) - before == 120  # each tick
    net.server_side = 0
    net.run(30.0)
    assert [node.state.ended for node in nodes] == [None] * size
    assert {generation for _, generation, _ in net.commits} == {1}
    assert not net.said("fenced")
    assert not net.said("lost")


def test_cut_off_for_longer_than_the_lease_training_waits_and_then_goes_on():
    net = Net(1, 3)
    nodes = net.formed(3)
    net.server_side = 9
    net.run(LEASE_S + 2.0)
    at = net.now
    net.run(60.0)
    assert not net.committed(at)
    net.server_side = 0
    net.run(20.0)
    assert net.committed(at) == {(1, (0, 1, 2))}
    assert [node.state.ended for node in nodes] == [None] * 3


def test_two_that_were_cut_off_together_come_back_one_after_the_other_and_both_stay():
    """The membership is with the third, which waits for them: the first to come back makes a half, and no haste."""
    net = Net(1, 3)
    nodes = net.formed(3)
    net.cut(*nodes[1:])
    net.run(20.0)
    assert not net.said("fenced")
    for node in nodes[1:]:
        net.cut(node, side=0)
        net.run(3.0)
    net.run(20.0)
    assert [node.state.ended for node in nodes] == [None] * 3
    net.cut(*nodes[1:])
    net.run(20.0)
    net.cut(nodes[1], side=0)
    net.run(6.0)
    assert [one.fields["slot"] for one in net.said("fenced")] == [2]  # who stays away is not waited for longer


def test_members_on_one_side_and_a_spare_with_the_server_on_the_other():
    net = Net(1, 2)
    a, b = net.formed(2)
    (spare,) = net.add(7)
    net.run(2.0)
    assert spare.generation == 0
    net.cut(a, b)
    at = net.now
    net.run(LEASE_S - 2.0)
    assert net.committed(at) == {(1, (0, 1))}
    assert spare.generation == 0
    net.run(10.0)
    assert not a.state.may_commit()
    assert spare.generation == 2
    assert net.said("gave_up")[-1].fields["step"] > 0
    after = net.now
    net.run(10.0)
    assert net.committed(after) == {(2, (7,))}
    net.cut(a, b, side=0)
    net.run(10.0)
    assert isinstance(a.state.ended, Fenced)
    assert isinstance(b.state.ended, Fenced)


def test_a_new_process_in_the_slot_of_a_silent_one_does_not_prove_that_it_is_dead():
    net = Net(1, 1)
    (a,) = net.formed(1)
    net.cut(a)
    net.run(12.0)
    (new,) = net.add(0)
    at = net.now
    net.run(20.0)
    assert net.committed(at) == {(1, (0,))}
    net.cut(a, side=0)
    net.run(5.0)
    assert a.state.ended is None
    assert isinstance(new.state.ended, Refused)


def test_half_and_more_with_the_server_go_on_within_seconds_and_the_others_are_fenced():
    net = Net(1, 4)
    a, b, c, d = net.formed(4)
    net.cut(c, d)
    net.run(13.0)
    assert (a.generation, b.generation) == (2, 2)
    assert a.state.seat.size == 2
    at = net.now
    net.run(10.0)
    assert net.committed(at) == {(2, (0, 1))}
    net.cut(c, d, side=0)
    net.run(3.0)
    assert why(c) == why(d) == "it was counted as lost: it has not been heard of for 10 s"


def test_a_minority_with_the_server_waits_for_the_others_until_their_leases_have_ended():
    net = Net(1, 3)
    a, b, c = net.formed(3)
    net.cut(b, c)
    at = net.now
    net.run(LEASE_S - 2.0)
    assert (net.committed(at), a.generation) == (set(), 1)
    assert "2 of 3 are not heard of" in net.rules.snapshot(0).status_text
    net.run(6.0)
    assert a.state.seat.generation == 2
    (event,) = net.said("minority")
    assert (event.fields["heard"], event.fields["silent"]) == (1, 2)
    assert event.fields["steps_given_up"] >= 0


def test_a_seat_tells_how_far_the_generation_before_had_come():
    net = Net(1, 2)
    a, b = net.formed(2)
    (spare,) = net.add(7)
    spare.forms = False
    net.run(1.0)
    net.cut(a, b)
    net.run(30.0)
    told = max(worker.step for worker in net.rules._attendance.members())
    net.run(LEASE_S)
    assert 0 < spare.state.seat.furthest == told < a.step
    assert net.said("gave_up")[0].fields["step"] == told
    net.kill(spare)  # before its first step
    (last,) = net.add(8)
    net.run(8.0)
    assert (last.generation, last.state.seat.furthest) == (3, told)


def test_a_minority_that_is_joined_again_in_time_goes_on_with_all():
    net = Net(1, 3)
    nodes = net.formed(3)
    net.cut(*nodes[1:])
    net.run(30.0)
    net.cut(*nodes[1:], side=0)
    at = net.now
    net.run(5.0)
    assert net.committed(at) == {(1, (0, 1, 2))}


def test_of_a_minority_those_that_are_known_to_be_dead_are_not_waited_for():
    net = Net(1, 5)
    a, b, *others = net.formed(5)
    net.kill(others[0])
    net.run(1.0)
    assert a.state.seat.size == 4
    net.cut(*others[1:])
    net.run(13.0)
    assert a.state.seat.size == b.state.seat.size == 2


def test_a_death_that_is_known_is_acted_on_at_once():
    net = Net(1, 3)
    a, b, c = net.formed(3)
    net.kill(c)
    net.run(0.75)
    assert (a.generation, b.generation) == (2, 2)


def test_all_dead_at_once_newcomers_wait_until_none_can_come_back():
    net = Net(1, 2)
    both = net.formed(2)
    net.kill(*both)
    at = net.now
    new = net.add(0, 1)
    net.run(4.0)
    assert new[0].generation == 0
    net.run(2.0)
    assert new[0].generation == new[1].generation == 2
    assert net.committed(at) <= {(2, (0, 1))}


def test_a_member_whose_connection_was_ended_and_that_lives_is_taken_back():
    net = Net(1, 2)
    a, b = net.formed(2)
    b.hangs = True  # for a while: so long nothing follows
    net.end_connection(a)
    net.run(3.0)
    assert (a.state.ended, a.generation, len(net.said("returned"))) == (None, 1, 1)
    b.hangs = False
    net.run(1.0)
    assert {(node.generation, node.state.seat.size, node.state.seat.lost) for node in (a, b)} == {(2, 2, ())}


def reset(net, node):
    """A device in between ends its connection at the server's side."""
    node.connected = False
    net.open.discard(node.id)
    net.rules.reset(node.id, "its connection broke: Connection reset by peer", net.now)
    net.deliver()


def test_a_lone_worker_whose_connection_was_reset_and_that_is_cut_off_then_keeps_what_its_lease_gives():
    net = Net(1, 1)
    (a,) = net.formed(1)
    net.add(4)
    net.run(1.0)
    reset(net, a)
    net.cut(a)
    at = net.now
    net.run(LEASE_S - 3.0)
    assert net.committed(at) == {(1, (0,))}
    net.cut(a, side=0)
    net.run(5.0)
    assert a.state.ended is None


def test_others_go_on_at_once_without_one_whose_connection_was_reset_and_that_does_not_come_back():
    net = Net(1, 2)
    a, b = net.formed(2)
    reset(net, b)
    net.cut(b)
    net.run(2.5)
    assert (a.generation, a.state.seat.size) == (2, 1)


@pytest.mark.parametrize("forming", [True, False])
def test_one_whose_connection_ends_again_and_again_and_that_does_not_come_is_left_out(forming):
    """As where only small packets come through, so that it never reads its seat, or of the end of the generation."""
    net = Net(1, 2)
    a, b = net.add(0, 1) if forming else net.formed(2)
    b.forms, b.hangs = not forming, not forming
    net.run(3.0)
    if not forming:
        a.state.over = "for the test"
    at = net.now
    while b.state.ended is None and net.now - at < 90.0:
        net.run(8.0)
        b.connected = False
        net.open.discard(b.id)
        net.rules.cut(b.id, "its connection broke: timed out", net.now)
        net.deliver()
        net.run(1.0)
    assert "it hangs" in why(b)
    assert net.now - at <= (75.0 if forming else 30.0)


def test_nor_does_it_need_others_who_wait():
    net = Net(1, 1)
    (a,) = net.formed(1)
    (spare,) = net.add(4)
    net.run(1.0)
    net.end_connection(a)
    net.run(10.0)
    assert (a.generation, spare.generation, a.state.ended) == (2, 0, None)


def test_a_process_that_was_stopped_for_longer_than_its_lease_commits_nothing_before_it_was_heard():
    net = Net(1, 1)
    (a,) = net.formed(1)
    a.stopped = True
    net.run(LEASE_S + 5.0)
    a.stopped = False
    assert not a.state.may_commit()
    at = net.now
    net.run(3.0)
    assert net.committed(at) == {(1, (0,))}
    assert a.state.ended is None


def test_a_stopped_process_whose_place_was_taken_commits_nothing_when_it_wakes():
    net = Net(1, 1)
    (a,) = net.formed(1)
    a.stopped = True
    (spare,) = net.add(3)
    net.run(LEASE_S + 5.0)
    assert spare.generation == 2
    at = net.now
    a.stopped = False
    net.run(5.0)
    assert net.committed(at) == {(2, (3,))}
    assert isinstance(a.state.ended, Fenced)


def test_a_server_that_was_restarted_seats_no_newcomers_beside_members_that_are_cut_off():
    net = Net(1, 1)
    (a,) = net.formed(1)
    net.cut(a)
    net.restart()
    (spare,) = net.add(5)
    at = net.now
    net.run(LEASE_S - 1.0)
    assert spare.generation == 0
    net.run(5.0)
    assert spare.generation == 2  # the number goes on from what was kept
    assert net.committed(at) == {(1, (0,)), (2, (5,))}


def test_a_server_that_was_restarted_after_all_were_dead_is_quick():
    net = Net(1, 1)
    (a,) = net.formed(1)
    net.kill(a)
    net.run(6.0)
    net.restart()
    (b,) = net.add(0)
    net.run(3.0)
    assert b.generation == 2


def test_a_server_that_was_restarted_goes_on_at_once_with_members_that_come_back():
    net = Net(1, 3)
    nodes = net.formed(3)
    net.restart()
    net.run(1.0)
    at = net.now
    net.kill(nodes[2])
    net.run(1.0)
    assert net.committed(at) == {(2, (0, 1))}


def test_numbers_of_generations_go_on_from_what_a_checkpoint_tells():
    net = Net(1, 2)
    nodes = net.add(0, floor=3) + net.add(1, floor=8)
    net.run(3.0)
    assert [node.generation for node in nodes] == [9, 9]


def test_a_member_that_still_forms_its_group_does_not_hang_and_one_that_never_does_is_fenced():
    net = Net(1, 3)
    a, b, c = net.formed(3)
    b.hangs, b.forms, b.state.formed = True, False, False
    net.rules._attendance.workers[b.id].formed = False
    net.kill(c)
    net.run(40.0)
    assert b.state.ended is None
    net.run(20.0)
    assert "it hangs" in why(b)
    assert a.state.seat.size == 1


def test_one_that_does_not_form_its_group_while_others_have_is_fenced():
    net = Net(1, 2)
    a, b = net.add(0, 1)
    b.forms = False
    net.run(50.0)
    assert (a.state.ended, b.state.ended) == (None, None)
    net.run(20.0)
    assert why(b) == "it did not form its group within 60 s: it hangs"
    assert a.generation == 2


def test_where_nobody_forms_a_group_all_try_again():
    net = Net(1, 2)
    a, b = net.add(0, 1)
    a.forms = b.forms = False  # each waits for the other, because of a word that was lost
    net.run(60.0)
    assert a.generation == b.generation == 1
    net.run(4.0)
    assert a.generation == b.generation == 2
    assert net.said("over")[0].fields["why"] == "no member has formed its group within 60 s"


def test_of_a_pair_that_cannot_talk_one_is_left_out_and_named():
    net = Net(1, 3)
    a, b, c = net.formed(3)
    net.run(5.0)
    a.say(Unreachable(generation=1, ranks={2: "timed out"}))
    net.run(2.0)
    assert why(c) == "rank 0 cannot reach it (timed out)"
    assert a.state.seat.size == b.state.seat.size == 2
    assert a.state.seat.lost[0].why == why(c)


def test_of_a_pair_that_can_talk_again_and_has_its_group_nobody_is_left_out():
    net = Net(1, 3)
    a, b, c = net.add(0, 1, 2)
    for node in (a, b, c):
        node.forms = False
    net.run(10.0)
    a.say(Unreachable(generation=1, ranks={2: "timed out"}))
    for node in (a, b, c):
        node.forms = True
    net.run(5.0)
    assert [node.generation for node in (a, b, c)] == [1, 1, 1]
    assert not net.said("fenced")


def test_the_one_in_most_broken_pairs_is_left_out_whatever_its_rank():
    net = Net(1, 4)
    a, b, c, d = net.formed(4)
    net.run(5.0)
    b.say(Unreachable(generation=1, ranks={0: "no route"}))
    c.say(Unreachable(generation=1, ranks={0: "no route"}))
    net.run(2.0)
    assert why(a) == "rank 1 cannot reach it (no route); rank 2 cannot reach it (no route)"
    assert [node.state.ended for node in (b, c, d)] == [None] * 3


def test_of_a_pair_that_is_cut_in_a_step_one_is_left_out_whoever_brought_the_state():
    net = Net(1, 3)
    (a,) = net.formed(1)
    b, c = net.add(1, 2)
    net.run(1.0)
    a.state.over = "for the test"
    net.run(5.0)
    assert a.state.seat.size == 3
    for node in (b, c):  # which hold it by now
        node.say(Unreachable(generation=a.generation, ranks={0: "no answer"}))
    net.run(2.0)
    assert why(a) == "rank 1 cannot reach it (no answer); rank 2 cannot reach it (no answer)"
    assert b.state.seat.size == c.state.seat.size == 2


def test_whom_neither_its_peers_nor_the_membership_reach_is_waited_for_as_a_minority_does():
    net = Net(1, 3)
    a, b, c = net.formed(3)
    net.cut(b, c)
    for _ in range(4):
        net.run(5.0)
        a.say(Unreachable(generation=1, ranks={1: "no answer", 2: "no answer"}))
    assert not net.said("fenced")
    net.cut(b, c, side=0)
    at = net.now
    net.run(5.0)
    assert net.committed(at) == {(1, (0, 1, 2))}


@pytest.mark.parametrize("unheard", [False, True])
def test_the_last_that_holds_the_state_is_not_left_out(unheard):
    net = Net(1, 3)
    (a,) = net.formed(1)
    newcomers = net.add(1, 2)
    net.run(1.0)
    for node in (a, *newcomers):
        node.forms = False
    a.state.over = "for the test"
    net.run(1.0)
    assert a.state.seat.size == 3
    if unheard:
        net.cut(a)
        net.run(4.0)
    generation = a.generation
    for node in newcomers:
        node.say(Unreachable(generation=generation, ranks={0: "no route"}))
    net.run(2.0)
    assert a.state.ended is None
    assert [node.state.ended is not None for node in newcomers] == [True, True]


def test_one_whose_signature_differs_is_refused_alone_and_told_the_field():
    net = Net(1, 3)
    ours = net.add(0, 1, signature={"spec": "1a", "data": "x"})
    (other,) = net.add(2, signature={"spec": "1a", "data": "y"})
    net.run(4.0)
    assert isinstance(other.state.ended, Refused)
    assert why(other) == "this worker trains something else: data is y, the job's is x"
    assert [node.state.seat.size for node in ours] == [2, 2]
    (late,) = net.add(2, signature={"spec": "2b", "data": "x"})
    net.run(1.0)
    assert why(late) == "this worker trains something else: spec is 2b, the job's is 1a"


def test_of_one_right_and_one_wrong_worker_the_one_is_refused_that_the_driver_knows_to_be_wrong():
    net = Net(1, 2)
    net.rules.know({"spec": "1a"}, net.now)
    (wrong,) = net.add(0, signature={"spec": "2b", "data": "x"})
    (right,) = net.add(1, signature={"spec": "1a", "data": "x"})
    net.run(4.0)
    assert isinstance(wrong.state.ended, Refused)
    assert why(wrong) == "this worker trains something else: spec is 2b, the job's is 1a"
    assert (right.generation, right.state.seat.size) == (1, 1)
    net.rules.know({"spec": "3c"}, net.now)  # another driver: members go on with what they have begun
    (like_members,) = net.add(0, signature={"spec": "1a", "data": "x"})
    net.run(4.0)
    assert like_members.state.ended is None
    net.kill(right, like_members)
    (waiting,) = net.add(2, signature={"spec": "3c", "data": "x"})
    net.run(0.5)
    net.rules.know({"spec": "4d"}, net.now)
    net.run(1.0)
    assert isinstance(waiting.state.ended, Refused)


def test_of_two_that_differ_from_the_first_the_lowest_slot_is_right_and_members_keep_it_over_a_restart():
    net = Net(1, 3)
    (other,) = net.add(1, signature={"spec": "2b"})
    (one,) = net.add(0, signature={"spec": "1a"})
    net.run(4.0)
    assert isinstance(other.state.ended, Refused)
    assert one.generation == 1
    net.restart()
    net.run(1.0)
    (late,) = net.add(2, signature={"spec": "2b"})
    one.state.over = "for the test"
    net.run(6.0)
    assert isinstance(late.state.ended, Refused)
    assert one.state.ended is None


def test_a_floor_does_not_lower_a_number():
    net = Net(1, 1)
    (a,) = net.formed(1)
    net.rules.heard(a.id, Join(after=1, standing=Standing(1, 0, 5, True)), net.now)
    net.run(1.0)
    assert a.generation == 2


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize(("size", "cut"), [(size, cut) for size in range(1, 6) for cut in range(1, size + 1)])
def test_the_table_of_who_goes_on_after_how_long(size, cut, spare):
    net = Net(1, size)
    nodes = net.formed(size)
    if spare:
        net.add(9)
    net.cut(*nodes[size - cut :])
    at = net.now
    net.run(50.0)
    later = [when - at for when, generation, _ in net.commits if generation > 1]
    if cut == size and not spare:
        assert not later
    else:
        expected_s = 10.0 if 2 * cut <= size else 48.25
        assert expected_s - 1.0 <= later[0] <= expected_s + 2.0
    if cut < size:  # the step needs all of them
        assert max(when for when, generation, _ in net.commits if generation == 1) <= at
