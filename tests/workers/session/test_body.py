"""Bodies of a script's loop, opened and closed by themselves."""

import threading

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.comm import SoloGroup
from thinwire.optim import Adam
from thinwire.workers.data.feed import Share
from thinwire.workers.session.body import Bodies
from thinwire.workers.session.registered import Registered


def parameter():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


def made():
    param = parameter()
    optimizer = Adam([param], lr=0.1, group=SoloGroup())
    param.grad = torch.ones(3)
    return optimizer, Bodies(Registered(optimizer))


def test_a_body_that_begins_or_ends_beside_another_optimizers_step_does_not_break_that():
    """Torch goes through the hooks of all optimizers there, and fails where one is added or taken away meanwhile."""
    _, bodies = made()

    def beside(*_):
        def work():
            with bodies.open(Share(0, None, 1.0)):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    handles = [register_optimizer_step_post_hook(hook) for hook in (beside, lambda *_: None)]
    try:
        torch.optim.SGD([parameter()], lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()


def test_who_steps_in_another_thread_is_no_stranger_to_this_body():
    optimizer, bodies = made()
    with bodies.open(Share(0, None, 1.0)):
        thread = threading.Thread(target=torch.optim.SGD([parameter()], lr=0.1).step)
        thread.start()
        thread.join()
        optimizer.step()
    assert bodies.close().optimizer_s > 0
