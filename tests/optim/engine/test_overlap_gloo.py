"""Overlap over real processes: collectives run in the background while hooks go on, and the result is the same."""

import pytest

from tests.comm.gloo_ranks import said, start

TRAIN = """
import copy
from tests.optim.reference.written_out import bits
from tests.optim.engine.test_overlap import NETS, WARMUP, backward, make, train
from thinwire.optim.engine.state import replicated
join()
group = TorchGroup()
name = "NAME"
nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
plain, ours = (make(name, net, group, overlap=on) for net, on in zip(nets, (False, True)))
for step in range(1, WARMUP + 7):
    train(nets[0], plain, 1, rank, parts=1 + step % 2)
    told = train(nets[1], ours, 1, rank, parts=1 + step % 2)[0]
    same = torch.equal(bits(plain.space.p_N, *replicated(plain.vectors).values()),
                       bits(ours.space.p_N, *replicated(ours.vectors).values()))
    assert same, (name, step)
    assert (told["in_backward"] > 0) == (step > 1), told
backward(nets[1], 50, rank)  # a batch that is skipped
ours.zero_grad()
train(nets[1], ours, 3, rank)
say(name, bits(ours.space.p_N).tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow  # threads show the same in test_overlap.py and test_overlap_undone.py
@pytest.mark.parametrize("name", ["onebit_adam", "adam", "onebit_lamb"])
def test_over_gloo_overlap_is_bit_equal_and_a_skipped_batch_leaves_replicas_equal(tmp_path, name):
    ranks = start(TRAIN.replace("NAME", name), 2, tmp_path, timeout_s=120)
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    assert said(tmp_path, 0, name) == said(tmp_path, 1, name)
