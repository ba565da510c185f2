"""In whatever order things happen: the laws of a seat hold, and nobody who lives waits for the dead."""

from hypothesis import example, given
from hypothesis import strategies as st

from tests.workers.membership.cuts import TICK_S, Net
from thinwire.workers.membership import Limits
from thinwire.workers.membership.attendance import Timing
from thinwire.workers.membership.messages import Notice

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
acts = st.tuples(st.sampled_from(COMMON + ACTIONS), st.integers(0, 5))


def act(net: Net, what: str, number: int) -> None:
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
        case "finish" if node is not None and number == 5 and not node.stopped:
            node.finish()
    net.deliver()


@example(1, 2, [("come", 0), ("wait", 5), ("stop", 0), ("wait", 4), ("kill", 0)])
@given(st.integers(1, 2), st.integers(2, 4), st.lists(acts, max_size=40) | st.lists(acts, min_size=60, max_size=120))
def test_nobody_has_two_seats_and_nobody_waits_for_the_dead(least, most, actions):
    net = Net(least, most, TIMING)
    for what, number in actions:
        act(net, what, number)
    net.run(120 * TICK_S)
    sick = {node.id for node in net.nodes if node.stopped or node.hangs}
    fenced = [id for id, refusal in net.refused.items() if refusal.verdict == "fenced"]
    assert set(fenced) <= sick | {node.id for node in net.nodes if not node.alive}
    living = [node for node in net.nodes if node.alive and node.id not in sick]
    if net.rules.finished:
        assert not living
        return
    if any(what == "finish" for what, _ in actions):
        return  # nothing is planned once a member has come to a clean end
    if len(living) < net.limits.min:  # newcomers take the place of the dead, as many as it takes
        living += net.add(*range(100, 100 + net.limits.min - len(living)))
        net.run(120 * TICK_S)
    snapshot = net.rules.snapshot(0)
    training = [node for node in living if node.trains]
    assert len(training) == min(len(living), net.limits.max), snapshot.status_text
    assert {node.generation for node in training} == {snapshot.generation}
