import pytest
import torch

from thinwire.contract.spec import BertRecipe
from thinwire.workers.data.order import generator
from thinwire.workers.recipes import bert
from thinwire.workers.recipes.bert import IGNORED, mask

SMALL = BertRecipe(name="bert", layers=2, width=32, heads=4, context=16)


def windows(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 256, (num, SMALL.context), generator=torch.Generator().manual_seed(7))
    masked = [mask(window, generator(number)) for number, window in enumerate(text)]
    return torch.stack([inputs for inputs, _ in masked]), torch.stack([targets for _, targets in masked])


def test_query_key_and_value_have_weights_and_biases_of_their_own() -> None:
    names = {name for name, _ in bert.build(SMALL, 0).named_parameters()}
    for layer in ("query", "key", "value"):
        assert {f"blocks.0.attention.{layer}.weight", f"blocks.0.attention.{layer}.bias"} <= names


def test_the_key_bias_has_no_gradient_but_for_rounding() -> None:
    model = bert.build(SMALL, 0).double()
    model(*windows(4)).backward()
    attention = model.get_submodule("blocks.0.attention")
    largest = {name: parameter.grad.abs().max().item() for name, parameter in attention.named_parameters()}
    assert largest["key.bias"] < 1e-15 < 1e-6 < largest["query.weight"]
    assert largest["key.weight"] > 1e-6


def test_the_head_is_tied_to_the_embedding() -> None:
    model = bert.build(SMALL, 0)
    inputs, _ = windows(1)
    unread = next(byte for byte in range(256) if byte not in inputs)
    before = model(inputs).detach()
    with torch.no_grad():
        model.bytes.weight[unread] += 1.0
    after = model(inputs).detach()
    assert not torch.equal(after[..., unread], before[..., unread])
    others = torch.arange(257) != unread
    assert torch.equal(after[..., others], before[..., others])


def test_every_position_sees_every_other() -> None:
    model = bert.build(SMALL, 0)
    inputs, _ = windows(1)
    changed = inputs.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(inputs), model(changed)
    assert before.shape == (1, SMALL.context, 257)
    assert bool((before != after).any(dim=-1).all())


def test_the_loss_is_the_mean_cross_entropy_over_the_masked_bytes() -> None:
    model = bert.build(SMALL, 0)
    inputs, targets = windows(3)
    logs = model(inputs).double().log_softmax(-1)
    by_hand = [
        -logs[row, at, targets[row, at]].item()
        for row in range(3)
        for at in range(SMALL.context)
        if targets[row, at] != IGNORED
    ]
    assert model(inputs, targets).item() == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5)


def test_the_loss_of_a_batch_is_the_mean_of_its_windows() -> None:
    model = bert.build(SMALL, 0).double()
    inputs, targets = windows(5)
    alone = [model(inputs[row : row + 1], targets[row : row + 1]) for row in range(5)]
    assert model(inputs, targets).item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-12)
