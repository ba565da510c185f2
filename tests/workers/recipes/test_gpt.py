import math
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


def values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("recipe", [SMALL, GptRecipe()])
def test_first_loss_is_that_of_a_uniform_guess(recipe: GptRecipe) -> None:
    loss = gpt.build(recipe, 0)(*windows(8, recipe))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_same_seed_same_bits_other_seed_other_values() -> None:
    one, same, other = (values(gpt.build(SMALL, seed)) for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_build_neither_uses_nor_moves_the_global_rng() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = values(gpt.build(SMALL, 5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(values(gpt.build(SMALL, 5)), one)


@pytest.mark.parametrize("recipe", [SMALL, GptRecipe(), GptRecipe(layers=1, width=8, heads=1, context=2)])
def test_parameter_count_is_that_of_the_built_model(recipe: GptRecipe) -> None:
    assert gpt.num_parameters(recipe) == values(gpt.build(recipe, 0)).numel()


def test_default_recipe_has_two_to_four_million_parameters() -> None:
    assert 2e6 <= gpt.num_parameters(GptRecipe()) <= 4e6


def test_every_value_is_initialised_as_declared() -> None:
    model = gpt.build(GptRecipe(), 0)
    residual = 0.02 / math.sqrt(2 * GptRecipe().layers)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.device.type == "cpu"
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            wanted = residual if name.endswith(("attention.out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name


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


def test_every_parameter_gets_a_gradient() -> None:
    model = gpt.build(SMALL, 0)
    model(*windows(4)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_loss_falls_under_plain_adam() -> None:
    model = gpt.build(SMALL, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, targets = windows(4)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 2.0


def test_threads_with_a_copy_each_get_the_gradients_of_one_thread() -> None:
    def gradient(_: int) -> torch.Tensor:
        model = gpt.build(SMALL, 0)
        model(*windows(4)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    alone = gradient(0)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(gradient, range(8)):
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-7)


def test_window_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 bytes does not fit recipe.context = 16"):
        gpt.build(SMALL, 0)(torch.zeros(1, 17, dtype=torch.int64))
