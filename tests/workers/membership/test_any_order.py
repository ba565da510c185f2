"""In whatever order things happen: the laws of a seat hold, and nobody who lives waits for the dead."""

from hypothesis import example, given
from hypothesis import strategies as st

from tests.workers.membership.cuts import TICK_S, Net, Node
from thinwire.workers.membership.attendance import Timing
from thinwire.workers.membership.messages import Notice
from thinwire.workers.membership.seats import Limits

TIMING = Timing(
    start_wait_s=2.0,
    beat_timeout_s=3.0,
    join_timeout_s=3.0,
    adopt_s=1.0,
    quiet_s=1.5,
    return_s=0.5,
    form_s=3.0,
    lease_s=6.0,
)
COMMON = ["come", "come", "wait", "wait", "wait"]
ACTIONS = ["kill", "stop", "hang", "limits", "dismiss", "notice", "restart", "end", "finish"]
RESTARTED_TWICE = [("restart", 0), ("wait", 0), ("kill", 0), ("wait", 2), ("restart", 0)]
"""Where the only member had not read yet that it is in a second generation, its number was given to a third."""
acts = st.tuples(st.sampled_from(COMMON + ACTIONS), st.integers(0, 5))


def act(net: Net, what: str, number: int) -> tuple[str, str] | None:
    """Do it, where it can be done. What was done, and to whom, where a test must know."""
    done = None
    living = [node for node in net.nodes if node.alive]
    node = living[number % len(living)] if living else None
    match what:
        case "come" if all(one.slot != number for one in living):
            net.add(number)
        case "wait":
            net.run(0.25 * (number + 1) ** 2 / 4)
        case "limits":
            net.limits = Limits(1 + number % 2, 2 + number // 2)
            net.rules.set_limits(net.limits, net.now)
        case "dismiss":
            net.rules.dismiss(number, "asked to", net.now)
        case "restart":
            net.restart()
        case "notice" if node is not None and node.state.notice is None:
            node.state.notice = "told to go"
            node.say(Notice(reason=node.state.notice))
        case "kill" if node is not None:
            net.kill(node)
        case "stop" if node is not None:
            node.stopped = True
        case "hang" if node is not None:
            node.hangs = True
        case "end" if node is not None and node.connected and not node.stopped:
            net.end_connection(node)
            done = what, node.id
        case "finish" if node is not None and number == 5 and not node.stopped:
            node.finish()
            done = what, node.id
    net.deliver()
    return done


def well(net: Net) -> list[Node]:
    return [node for node in net.nodes if node.alive and not node.stopped and not node.hangs]


@example(1, 2, [("come", 0), ("come", 1), ("come", 2), ("wait", 0), ("hang", 0)])
@example(1, 2, [("come", 0), ("wait", 5), ("end", 0), ("wait", 0), *RESTARTED_TWICE])
@example(1, 2, [("come", 0), ("wait", 5), ("stop", 0), ("wait", 4), ("kill", 0)])
@given(st.integers(1, 2), st.integers(2, 4), st.lists(acts, max_size=40) | st.lists(acts, min_size=60, max_size=120))
def test_nobody_has_two_seats_and_nobody_waits_for_the_dead(least, most, actions):
    net = Net(least, most, TIMING)
    done = [act(net, what, number) for what, number in actions]
    came_back = {one[1] for one in done if one is not None and one[0] == "end"}
    net.run(120 * TICK_S)
    sick = {node.id for node in net.nodes if node.stopped or node.hangs}
    fenced = [id for id, refusal in net.refused.items() if refusal.verdict == "fenced"]
    assert set(fenced) <= sick | {node.id for node in net.nodes if not node.alive}
    living = well(net)
    if net.rules.finished:  # all have made the last step: one whose connection broke meanwhile comes to its end itself
        assert {node.id for node in living} <= came_back
        return
    if any(one is not None and one[0] == "finish" for one in done):
        return  # nothing is planned once a member has come to a clean end
    for first in (100, 200, 300):  # newcomers take the place of the dead; one that was asked to leave leaves then
        if len(living) < net.limits.min:
            net.add(*range(first, first + net.limits.min - len(living)))
            net.run(120 * TICK_S)
            living = well(net)
    snapshot = net.rules.snapshot(0)
    training = [node for node in living if node.trains]
    seated = {member.id for member in snapshot.members}
    hanging = sum(node.hangs and node.id in seated for node in net.nodes)  # until a regroup nobody misses them here
    if seated and seated <= sick:
        return  # all may live, cut off from this server: nobody takes their places
    assert len(training) == min(len(living), net.limits.max - hanging), snapshot.status_text
    assert {node.generation for node in training} == {snapshot.generation}
