"""Random runs of an optimizer whose ranks die, leave and come, in steps, hand-overs and changes of ranks alike.

After each change that succeeds all ranks hold the same bits, and R is the one that was handed over; a change that fails
leaves parameters, moments, step counts and groups as they were.
"""

import random

import pytest
import torch

from tests.optim.reference.written_out import make
from tests.optim.regroup.ranks import Rank, together
from tests.optim.regroup.test_regroup import EPS, HYPER
from thinwire.comm import Keeps, PeerLost
from thinwire.comm.groups.faults import COLLECTIVES, Fault, What, When
from thinwire.optim.regroup import hand_over

EVENTS = ("train", "train", "planned", "death", "death", "look", "save", "hand-over that fails")


class Story:
    """One run, by its seed. ranks: those that go on; said: what has happened, for whoever reads a failure."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.said, self.made, self.views = [], 0, []
        self.build = self._builder()
        self.handed = None
        self.ranks = [self.new() for _ in range(self.draw.choice([1, 2, 3, 4]))]

    def _builder(self):
        draw, more = self.draw, {}
        name = draw.choice(["onebit_adam", "onebit_adam", "onebit_lamb", "zero_one_adam", "onebit_muon"])
        if draw.random() < 0.4:
            more["full_exchange"] = draw.choice(["fp32", "bf16", "int8"])
        if name in ("onebit_adam", "onebit_muon"):
            other = "variance" if name == "onebit_adam" else "momentum"
            more["narrow"] = [one for one in (other, "error_memory") if draw.random() < 0.35]
        if name not in ("zero_one_adam", "onebit_muon") and draw.random() < 0.3:
            more["refresh"] = 0.4
        more |= {"overlap": draw.random() < 0.3, "max_grad_norm": draw.choice([None, None, 0.1])}
        more |= {"warmup": draw.choice([3, 5]), "bucket_elements": draw.choice([8, 64, 64, 1000])}
        keeps, is_narrow, has_groups = draw.choice(list(Keeps)), draw.random() < 0.2, draw.random() < 0.3
        self.said.append((name, more, keeps, is_narrow, has_groups))

        def build(net):
            if is_narrow:
                net.bfloat16()
            params = list(net.parameters())
            groups = [{"params": params, **HYPER}]
            if has_groups:
                other = {**HYPER, "lr": 3e-3, "betas": (0.8, 0.99)}
                groups = [{"params": params[:1], **HYPER}, {"params": params[1:], **other}]
            optimizer = make(name, groups, **more)
            optimizer.keeps = keeps
            return optimizer

        return build

    def new(self):
        """A rank that has no state."""
        self.made += 1
        return Rank(f"w{self.made}", self.build, seed=self.made)

    def fault(self, collectives=COLLECTIVES, most=12):
        """On one of the ranks."""
        draw = self.draw
        what = draw.choice([What.LOSE, What.LOSE, What.ALONE])
        return Fault(
            (draw.randrange(len(self.ranks)),),
            draw.choice(collectives),
            draw.randrange(most),
            draw.choice(list(When)),
            what,
        )

    def change(self):
        """These ranks form a group, whatever fails in between; what fails changes nothing."""
        for tries in range(20):
            before, had_state = [_seen(rank) for rank in self.ranks], [rank.has_state for rank in self.ranks]
            for rank in self.ranks:
                rank.told = None
            fault = self.fault() if len(self.ranks) > 1 and tries < 4 and self.draw.random() < 0.5 else None
            self.said.append(("change", [rank.name for rank in self.ranks], fault))

            def work(rank, group, fault=fault):
                group.arm(*([] if fault is None else [fault]))
                rank.regroup(group)
                group.arm()
                return rank.residual(group), rank.held()

            found = together(self.ranks, work)
            if all(one is not None for one in found):
                self._holds(found)
                return
            for rank, seen in zip(self.ranks, before, strict=True):
                # Who was told has succeeded, and was lost after that. Where nobody had a state nothing is lost.
                if rank.told is None and any(had_state):
                    _refuse_changed(seen, _seen(rank), rank.has_state)
            dead = self.ranks[fault.ranks[0]]
            if self.draw.random() < 0.5 and any(rank.has_state for rank in self.ranks if rank is not dead):
                self.ranks.remove(dead)
            if self.draw.random() < 0.3:
                self.ranks.append(self.new())
            self.draw.shuffle(self.ranks)
        raise AssertionError("no change has succeeded")

    def _holds(self, found):
        (first, held), *others = found
        for residuals, one in others:
            assert torch.equal(one, held)
            assert all(torch.equal(residuals[name], r_N) for name, r_N in first.items())
        assert all(rank.optimizer.space.p_N.isfinite().all() for rank in self.ranks)
        for name, r_N in (self.handed or {}).items():
            assert (first[name] - r_N).abs().max() <= 8 * EPS * r_N.abs().max()
        self.handed = None

    def go_on(self, event):
        """Some steps, or what the event is, over one more group; who comes and goes after it."""
        self.said.append(event)
        if event == "look":  # and keep what is seen
            shown = [rank.optimizer.state[next(rank.net.parameters())] for rank in self.ranks[::2]]
            self.views += [one["exp_avg" if "exp_avg" in one else "momentum_buffer"] for one in shown]
            return
        steps, in_step = self.draw.randrange(1, 5), self.fault(most=40)
        in_hand_over = self.fault(("sum", "all_gather"), most=4)

        def work(rank, group):
            rank.regroup(group)
            if event == "death":
                group.arm(in_step)
            rank.train(group, rank.optimizer.num_steps + steps)
            group.arm(*([in_hand_over] if event == "hand-over that fails" else []))
            if event == "save":
                rank.optimizer.state_dict()
            if event in ("planned", "hand-over that fails"):
                hand_over(rank.optimizer)
                assert not rank.optimizer.space.g_N.any()
            return {name: r_N.clone() for name, r_N in (rank.optimizer.handed_over or {}).items()}

        found = together(self.ranks, work)
        gone = [rank for rank, one in zip(self.ranks, found, strict=True) if one is None]
        if gone:
            assert all(isinstance(rank.lost, PeerLost) for rank in gone)
            dead = self.ranks[(in_step if event == "death" else in_hand_over).ranks[0]]
            if len(self.ranks) > 1 and self.draw.random() < 0.7:
                self.ranks.remove(dead)
        elif event == "planned":
            self.handed = found[0]
            self.draw.shuffle(self.ranks)
            del self.ranks[self.draw.randrange(1, len(self.ranks) + 1) :]
        self.ranks += [self.new() for _ in range(self.draw.choice([0, 0, 1, 2])) if len(self.ranks) < 6]


def _seen(rank):
    optimizer, state = rank.optimizer, rank.optimizer.vectors
    numel = optimizer.space.layout.numel
    in_rows = hasattr(state, "momentum")  # read so that it stays in rows
    return {
        "p": optimizer.space.p_N.clone(),
        "m": state.momentum.part(slice(0, numel)).clone() if in_rows else state.m_N.clone(),
        "v": state.v_N.clone() if hasattr(state, "v_N") else torch.zeros(0),
        "steps": (optimizer.num_steps, optimizer.common_steps),
        "group": optimizer.group,
    }


def _refuse_changed(before, after, has_state):
    assert torch.equal(before["p"], after["p"])
    assert before["group"] is after["group"]
    if has_state:
        assert torch.equal(before["m"], after["m"])
        assert torch.equal(before["v"], after["v"])
        assert before["steps"] == after["steps"]


def tell(seed):
    """All of it. What has happened is in the message where it does not hold."""
    story = Story(seed)
    try:
        story.change()
        for _ in range(story.draw.randrange(3, 6)):
            story.go_on(story.draw.choice(EVENTS))
            story.change()
        story.go_on("train")
        story.change()
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "\n".join(map(str, story.said)))
        raise


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.law
def test_whatever_happens_ranks_hold_the_same_and_a_planned_change_keeps_r(seed):
    tell(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 126))
def test_and_so_in_many_more(seed):
    tell(seed)
