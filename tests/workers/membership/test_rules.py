"""The laws of the rules, in whatever order things happen; and the clock, told rather than waited for."""

import dataclasses

from hypothesis import example, given
from hypothesis import strategies as st

from tests.workers.membership.world import Actor, World
from thinwire.workers.membership import Identity, Limits, Seated, Standing
from thinwire.workers.membership.messages import Proposal

ACTIONS = [
    "come",
    "join",
    "step",
    "read",
    "die",
    "wait",
    "hang",
    "limits",
    "dismiss",
    "notice",
    "restart",
    "connect",
    "finish",
]
COMMON = ["come", "join", "step", "read", "read", "join", "step", "wait"]
acts = st.tuples(st.sampled_from(COMMON + ACTIONS), st.integers(0, 5))


def act(world: World, what: str, number: int) -> None:
    living = world.living()
    actor = living[number % len(living)] if living else None
    match what:
        case "come":
            world.come(number)
        case "wait":
            world.wait(0.25 * (number + 1) ** 2 / 4)
        case "limits":
            world.rules.set_limits(Limits(1 + number % 2, 2 + number // 2), world.now)
            world.deliver()
        case "dismiss":
            world.rules.dismiss(number, "asked to", world.now)
            world.deliver()
        case "restart":
            world.restart(number)
        case "notice" if actor is not None and actor.connected:
            world.rules.notice(actor.identity.id, "told to go", world.now)
            world.deliver()
        case "join" if actor is not None:
            world.join(actor)
        case "step" if actor is not None:
            world.take_step(actor)
        case "read" if actor is not None:
            world.read(actor)
        case "die" if actor is not None:
            world.die(actor)
        case "hang" if actor is not None:
            actor.hangs = True
        case "connect" if actor is not None and not actor.connected:
            world.connect(actor)
        case "finish" if actor is not None and number == 5:
            world.finish(actor)


def calm(world: World) -> None:
    """Whoever lives and does not hang does what a training loop does, until nothing changes any more."""
    for _ in range(60):
        for actor in world.living():
            if not actor.connected and not actor.hangs and not actor.inbox:
                world.connect(actor)
        for actor in world.living():
            world.read(actor)
            world.join(actor)
            world.take_step(actor)
        world.wait(0.25)


@example(1, 2, [("come", 0), ("join", 0), ("wait", 0), ("hang", 0), ("wait", 4), ("die", 0)])
@given(st.integers(1, 2), st.integers(2, 4), st.lists(acts, max_size=40) | st.lists(acts, min_size=60, max_size=120))
def test_nobody_has_two_seats_and_nobody_waits_for_the_dead(least, most, actions):
    world = World(least, most)
    for what, number in actions:
        act(world, what, number)
    calm(world)
    living = [actor for actor in world.living() if not actor.hangs]
    snapshot = world.rules.snapshot(0)
    if snapshot.status == "finished":
        assert not living
        return
    seated = [actor for actor in living if actor.seat and actor.joining is None]
    at_its_end = any(what == "finish" for what, _ in actions)
    silent = {actor.identity.id for actor in world.living() if actor.hangs}
    died_silent = {actor.identity.id for actor in world.actors if actor.ended and actor.hangs}
    members = {occupant.id for occupant in snapshot.members}
    if not living or (members and members <= silent | died_silent):
        # Those of whom nothing was heard when they went may live, and this server be cut off from them.
        assert members <= silent | died_silent
        assert len(living) < world.rules.limits.min or not living
        if not members & silent and not at_its_end:
            newcomers_take_the_place_of_the_dead(world)
        return
    assert sorted(members - silent) == sorted(actor.identity.id for actor in seated) or (
        snapshot.status == "waiting for workers"
    )
    if snapshot.status == "waiting for workers":
        assert len(living) < world.rules.limits.min
        return
    assert len({actor.seat.generation for actor in seated}) == 1
    if at_its_end:
        return  # nothing is planned once a member has come to a clean end
    waiting = [actor for actor in living if actor.joining is not None]
    assert not waiting or len(seated) == world.rules.limits.max
    assert len(seated) <= world.rules.limits.max


def newcomers_take_the_place_of_the_dead(world: World) -> None:
    """As many as it takes: nobody who waits for them is left."""
    for slot in range(100, 100 + world.rules.limits.min):
        world.come(slot)
    calm(world)
    living = [actor for actor in world.living() if not actor.hangs]
    seated = sorted(actor.identity.id for actor in living if actor.seat and actor.joining is None)
    assert len(seated) >= world.rules.limits.min
    assert sorted(occupant.id for occupant in world.rules.snapshot(0).members) == seated


def formed(least: int, most: int, count: int) -> World:
    """`count` workers in generation 1."""
    world = World(least, most)
    for slot in range(count):
        world.come(slot)
        world.join(world.actors[slot])
    world.wait(2.5)
    for actor in world.actors:
        world.read(actor)
        assert actor.seat is not None
    return world


def test_the_silence_of_all_during_a_stop_of_the_server_itself_does_not_count():
    world = formed(1, 3, 3)
    world.now += 100.0  # nothing ran, the server's clock neither
    world.wait(1.0)
    assert len(world.rules.snapshot(0).members) == 3


def test_a_longer_step_is_waited_for_before_a_member_is_fenced():
    world = formed(1, 3, 3)
    a, b, c = world.actors
    world.rules.beat(b.identity.id, 1, 3, 5.0, world.now)
    world.die(c)
    world.read(a)
    world.join(a)
    world.wait(14.5)
    assert b.connected
    world.wait(1.0)
    assert not b.connected
    world.read(a)
    assert a.seat.reason == "worker w2 was lost: it died; worker w1 was lost: " + (
        "it did not come to the regroup within 15 s: it hangs"
    )


def test_members_with_state_come_before_those_without_and_newcomers_last():
    world = formed(1, 4, 3)
    world.come(9)
    world.join(world.actors[3])
    a, b, c, _ = world.actors
    world.die(b)
    for actor in (a, c):
        world.read(actor)
    # a says that it has no state: it died while rank 0 sent it
    generation = a.seat.generation
    world.join(c)
    world.rules.join(a.identity.id, generation, Standing(generation, 0, 0, False), world.now)
    world.deliver()
    world.read(c)
    assert [member.identity.slot for member in c.seat.members] == [2, 0, 9]


def test_a_restarted_server_takes_the_largest_generation_that_it_is_told():
    world = formed(1, 3, 2)
    a, b = world.actors
    world.come(2)
    world.join(world.actors[2])
    world.die(b)
    world.read(a)
    world.join(a)
    world.read(a)
    c = world.actors[2]
    assert (a.seat.generation, c.seat, len(c.inbox) > 0) == (2, None, True)
    world.restart(1)  # c comes first; it has not read that it is seated
    world.read(c)
    assert c.seat.generation == 2
    assert [occupant.rank for occupant in world.rules.snapshot(0).members] == [0, 1]


def test_a_join_that_was_sent_before_the_seat_was_read_ends_nothing():
    world = formed(1, 2, 2)
    a, b = world.actors
    for actor in (a, b):
        world.rules.join(actor.identity.id, 0, Standing(None, None, 0, False), world.now)
    world.deliver()
    assert [type(message).__name__ for message in (*a.inbox, *b.inbox)] == ["Seating", "Seating"]
    assert world.rules.snapshot(0).status == "training"


def test_a_number_that_anybody_has_heard_of_is_not_given_again():
    world = formed(1, 1, 1)
    (a,) = world.actors
    late = Actor(Identity("late", 7, "h", 1))
    late.seat = dataclasses.replace(a.seat, generation=5, members=(Seated(late.identity, a.seat.members[0].standing),))
    late.hangs = True
    world.actors.append(late)
    world.connect(late)
    assert late.ended
    a.over = True
    world.join(a)
    world.read(a)
    assert a.seat.generation == 6


def test_a_proposal_that_is_refused_is_made_again_twice_as_far_and_rests_after_ten():
    world = formed(1, 2, 1)
    (a,) = world.actors
    world.come(1)
    world.join(world.actors[1])
    steps = []
    while a.inbox and len(steps) < 50:
        message = a.inbox.popleft()
        if isinstance(message, Proposal):
            steps.append(message.step)
            world.rules.answer(a.identity.id, message.number, yes=False, step=0, now=world.now)
            world.deliver()
    assert steps == [2 * 2**i for i in range(10)]
    world.wait(1.25)
    assert [message.step for message in a.inbox if isinstance(message, Proposal)] == [2]


def test_a_restarted_server_closes_nothing_before_all_members_have_come_back_or_are_given_up():
    world = formed(1, 2, 2)
    a, b = world.actors
    a.over = True
    world.join(a)
    b.hangs = True
    world.restart()
    world.read(a)
    assert a.joining is not None
    b.hangs = False
    world.connect(b)
    world.read(b)
    assert b.over
    world.join(b)
    assert (a.inbox[-1].seat.size, a.inbox[-1].seat.generation) == (2, 2)


def test_nothing_is_confirmed_before_all_have_said_yes():
    world = formed(1, 3, 2)
    a, b = world.actors
    world.come(2)
    world.join(world.actors[2])
    world.read(a)
    world.wait(1.0)
    world.read(a)
    assert a.promise is not None
    assert not a.confirmed
    world.read(b)
    world.read(a)
    world.read(b)
    assert a.confirmed
    assert b.confirmed
