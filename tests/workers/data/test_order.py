import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.order import Order, generator, share


def visited(order: Order, step: int, global_batch: int) -> torch.Tensor:
    return order.samples(range((step - 1) * global_batch, step * global_batch))


@given(global_batch=st.integers(1, 200), world_size=st.integers(1, 64))
def test_shares_cut_the_batch_in_order_and_differ_by_at_most_one(global_batch: int, world_size: int) -> None:
    shares = [share(global_batch, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(global_batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_share_of_a_rank_that_is_not_there_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of world_size = {world_size}"):
        share(4, rank, world_size)


@given(
    num_samples=st.integers(1, 40),
    global_batch=st.integers(1, 50),
    num_epochs=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_every_sample_is_used_exactly_once_an_epoch(
    num_samples: int, global_batch: int, num_epochs: int, seed: int
) -> None:
    order = Order(num_samples, seed)
    num_steps = -(-num_samples * num_epochs // global_batch)
    used = torch.cat([visited(order, step, global_batch) for step in range(1, num_steps + 1)])
    for epoch in range(num_epochs):
        in_epoch = used[epoch * num_samples : (epoch + 1) * num_samples]
        assert in_epoch.sort().values.tolist() == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(visited(Order(100, seed), step, 100).tolist()) for seed in (0, 1, 2) for step in (1, 2, 3)}
    assert len(orders) == 9


def test_position_is_a_function_of_seed_and_step_alone() -> None:
    asked_in_order = Order(124, seed=1)
    in_order = [visited(asked_in_order, step, 50) for step in range(1, 30)]
    resumed = Order(124, seed=1)
    for step in (29, 3, 17, 1, 28, 2):
        assert torch.equal(visited(resumed, step, 50), in_order[step - 1])


def test_global_rng_is_neither_used_nor_moved() -> None:
    torch.manual_seed(1)
    first, state = visited(Order(124, seed=1), 1, 5), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(visited(Order(124, seed=1), 1, 5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_of_different_words_draw_different_numbers() -> None:
    words = [(0, 11), (1, 1), (0, 1, 1), (0, "mask", 1), (0, "shift", 1), (1, "mask", 0)]
    assert len({int(torch.randint(2**40, (1,), generator=generator(*one))) for one in words}) == len(words)
