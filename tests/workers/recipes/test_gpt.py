from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinwire.contract.spec import GptRecipe
from thinwire.workers.recipes import gpt

SMALL = GptRecipe(layers=2, width=32, heads=4, context=16)


def windows(num: int, recipe: GptRecipe = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 256, (num, recipe.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_no_position_sees_a_later_byte() -> None:
    model = gpt.build(SMALL, 0)
    inputs, _ = windows(1)
    changed = inputs.clone()
    changed[0, 10] ^= 1
    before, after = model(inputs), model(changed)
    assert before.shape == (1, SMALL.context, 256)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = gpt.build(SMALL, 0)
    inputs, targets = windows(3)
    by_hand = -model(inputs).double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert model(inputs, targets).item() == pytest.approx(by_hand.item(), abs=1e-5)


def test_threads_with_a_copy_each_get_the_gradients_of_one_thread() -> None:
    def gradient(_: int) -> torch.Tensor:
        model = gpt.build(SMALL, 0)
        model(*windows(4)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    alone = gradient(0)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(gradient, range(8)):
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-7)
