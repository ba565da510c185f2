import pytest
import torch

from thinwire.contract.spec import ResnetRecipe
from thinwire.workers.recipes import resnet

SMALL = ResnetRecipe(name="resnet", widths=(4, 8, 16), blocks=2)


def images(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand((num, 1, 8, 8), generator=generator), torch.randint(0, 10, (num,), generator=generator)


def test_an_image_is_judged_the_same_whatever_else_is_in_its_batch() -> None:
    model = resnet.build(SMALL, 0).double()
    inputs, _ = images(6)
    together = model(inputs)
    assert together.shape == (6, 10)
    for row in range(6):
        torch.testing.assert_close(model(inputs[row : row + 1])[0], together[row], rtol=1e-12, atol=1e-12)


def test_no_state_is_kept_but_the_parameters() -> None:
    model = resnet.build(SMALL, 0)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_shortcuts_are_projections_only_where_the_shape_changes() -> None:
    model = resnet.build(SMALL, 0)
    kinds = [isinstance(block.projection, torch.nn.Identity) for block in model.blocks]
    assert kinds == [True, True, False, True, False, True]


def test_every_stage_but_the_first_halves_the_image() -> None:
    model = resnet.build(SMALL, 0)
    x = model.stem(images(1)[0])
    sides = []
    for block in model.blocks:
        x = block(x)
        sides.append(tuple(x.shape[1:]))
    assert sides == [(4, 8, 8)] * 2 + [(8, 4, 4)] * 2 + [(16, 2, 2)] * 2


@pytest.mark.parametrize("widths", [(1, 2, 3), (16, 32, 64), (5, 12, 100)])
def test_channels_that_eight_groups_do_not_divide_are_grouped_all_the_same(widths: tuple[int, int, int]) -> None:
    model = resnet.build(ResnetRecipe(name="resnet", widths=widths, blocks=1), 0)
    assert bool(model(*images(2)).isfinite())


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = resnet.build(SMALL, 0)
    inputs, targets = images(5)
    by_hand = -model(inputs).double().log_softmax(-1).gather(-1, targets[:, None]).mean()
    assert model(inputs, targets).item() == pytest.approx(by_hand.item(), abs=1e-5)
