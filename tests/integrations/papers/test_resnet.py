"""ResNet's script: formats that people have, augmentation that is resumed exactly, the model that the papers mean."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import datasets

from tests.covering import parametrize
from tests.integrations.papers.script import script
from thinwire.optim import OPTIMIZERS
from thinwire.train import seeded

resnet = script("resnet")
SMALL = ("--steps", "3", "--batch", "8")


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    """A hundredth of ResNet-18, on the first digits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(resnet.SHAPES, 18, ("basic", [1, 1], [8, 16]))
    made = resnet.ResNetConfig
    monkeypatch.setattr(resnet, "ResNetConfig", lambda **given: made(**{**given, "embedding_size": 64}))
    digits = resnet.digits

    def few():
        training, held_out, classes = digits()
        held_out.labels = held_out.labels[:40]
        return training, held_out, classes

    monkeypatch.setattr(resnet, "digits", few)


def pixels(number, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, 3, 32, 32), dtype=np.uint8)


def cifar_files(folder, binary):
    folder.mkdir()
    images, labels = pixels(12), np.arange(12) % 10
    for name, at in (("data_batch_1", slice(0, 5)), ("data_batch_2", slice(5, 9)), ("test_batch", slice(9, 12))):
        if binary:
            rows = np.concatenate([labels[at, None].astype(np.uint8), images[at].reshape(-1, 3072)], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            batch = {"data": images[at].reshape(-1, 3072), "labels": labels[at].tolist(), "batch_label": name}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return images, labels


def write_images(folder, classes=("cat", "dog"), number=10, side=(40, 30)):
    for at, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(number):
            image = Image.linear_gradient("L").resize(side).rotate(90 * at)
            image.convert("RGB" if i % 2 else "L").save(folder / name / f"{i}.{'png' if i % 3 else 'jpg'}")


def test_the_presets_are_the_papers():
    cifar, imagenet = resnet.PRESETS["cifar"], resnet.PRESETS["imagenet"]
    assert (cifar.layers, cifar.global_batch, cifar.epochs, cifar.warmup_epochs) == (18, 1024, 200, 13)
    assert (cifar.lr, cifar.drops, cifar.stem, cifar.side) == (1e-4, (100,), "cifar", 32)
    assert (imagenet.layers, imagenet.global_batch, imagenet.epochs, imagenet.side) == (18, 256, 90, 224)


@pytest.mark.parametrize(("layers", "values"), [(18, 11_689_512), (50, 25_557_032)])
def test_the_models_are_those_of_the_paper(layers, values, monkeypatch):
    """As many values as torchvision's, of a thousand classes."""
    monkeypatch.setitem(resnet.SHAPES, 18, ("basic", [2, 2, 2, 2], [64, 128, 256, 512]))
    with torch.device("meta"):
        model = resnet.make_model(layers, 1000, "imagenet", 3)
    assert sum(p.numel() for p in model.parameters()) == values


def test_the_stem_for_small_images_keeps_their_size():
    inside = resnet.make_model(18, 10, "cifar", 3).resnet.embedder(torch.rand(2, 3, 32, 32))
    assert inside.shape == (2, 64, 32, 32)
    assert resnet.make_model(18, 10, "imagenet", 3).resnet.embedder(torch.rand(2, 3, 32, 32)).shape == (2, 64, 8, 8)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_both_kinds_of_cifar_files_are_read(tmp_path, binary, inside):
    folder = tmp_path / f"cifar-10-batches-{'bin' if binary else 'py'}"
    images, labels = cifar_files(folder, binary)
    given = resnet.arguments(["--data", str(tmp_path if inside else folder)])
    training, held_out, classes = resnet.read(given, 32)
    assert classes == 10
    assert torch.equal(training.pixels, torch.from_numpy(images[:9]))
    assert training.labels.tolist() == labels[:9].tolist()
    image, label = held_out[1]
    red = (images[10, 0] / 255 - 0.4914) / 0.247
    assert image[0].numpy() == pytest.approx(red, abs=1e-5)
    assert label == labels[10]


def test_a_pickle_that_is_more_than_arrays_is_not_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return print, ("run",)

    folder = tmp_path / "cifar-10-batches-py"
    cifar_files(folder, binary=False)
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": Harm()}))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        resnet.cifar(folder)


def test_a_torn_binary_file_is_said(tmp_path):
    folder = tmp_path / "cifar"
    cifar_files(folder, binary=True)
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"test_batch\.bin: has 3 bytes"):
        resnet.cifar(folder)


def test_image_folders_are_read_as_imagenet_is_laid_out_and_by_class(tmp_path):
    write_images(tmp_path / "laid" / "train")
    write_images(tmp_path / "laid" / "val", number=3)
    training, held_out, classes = resnet.image_folder(tmp_path / "laid", 24)
    assert (len(training), len(held_out), classes) == (20, 6, 2)
    write_images(tmp_path / "flat")
    training, held_out, classes = resnet.image_folder(tmp_path / "flat", 24)
    assert (len(training), len(held_out), classes) == (18, 2, 2)
    for image, label in (training[0], held_out[0]):
        assert image.shape == (3, 24, 24)
        assert image.dtype == torch.float32
        assert label in (0, 1)
    assert {label for _, label in (held_out[0], held_out[1])} == {0, 1}


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        resnet.read(resnet.arguments(["--data", str(tmp_path / "none")]), 24)
    write_images(tmp_path / "odd" / "train")
    write_images(tmp_path / "odd" / "val", classes=("cat", "cow"))
    with pytest.raises(ValueError, match="no image to train on is of class cow"):
        resnet.image_folder(tmp_path / "odd", 24)


def test_images_of_any_size_and_mode_are_read_and_a_broken_one_is_named(tmp_path):
    write_images(tmp_path, number=10)
    for at, (mode, side) in enumerate(
        [("RGBA", (5, 5)), ("L", (1, 1)), ("P", (300, 7)), ("1", (9, 9)), ("I;16", (4, 4))]
    ):
        Image.new(mode, side).save(tmp_path / "cat" / f"odd-{at}.png")
    training, held_out, _ = resnet.image_folder(tmp_path, 24)
    assert {image.shape for part in (training, held_out) for image, _ in part} == {(3, 24, 24)}
    for file in (tmp_path / "dog").iterdir():
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"dog/\d\.(png|jpg): is no image that can be read"):
        list(training)


def test_random_parts_lie_inside_of_the_image_and_are_those_of_the_number_of_the_sample(tmp_path):
    for width, height in ((40, 30), (7, 300), (1, 1)):
        for _ in range(50):
            left, upper, right, lower = resnet.part_of(width, height)
            assert 0 <= left < right <= width + 1e-9
            assert 0 <= upper < lower <= height + 1e-9
    write_images(tmp_path / "train")
    write_images(tmp_path / "val", number=1)
    drawn = seeded(resnet.image_folder(tmp_path, 24)[0], 3)
    first = drawn.visit(2, 7)[0]
    torch.rand(3)
    assert torch.equal(drawn.visit(2, 7)[0], first)
    assert any(not torch.equal(drawn.visit(2, n)[0], first) for n in range(8, 12))


def test_checkpointed_stages_have_the_same_gradients_and_count_statistics_once():
    def made(checkpointed):
        torch.manual_seed(1)
        model = resnet.make_model(18, 10, "cifar", 1).train()
        if checkpointed:
            resnet.checkpoint_stages(model)
        images = torch.rand(6, 1, 8, 8)
        torch.nn.functional.cross_entropy(model(images).logits, torch.arange(6)).backward()
        return model

    plain, kept = made(False), made(True)
    for (name, a), (_, b) in zip(plain.named_parameters(), kept.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(plain.named_buffers(), kept.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert dict(kept.named_buffers())["resnet.encoder.stages.0.layers.0.layer.0.normalization.running_mean"].any()


def test_top_1_and_top_5_are_counted():
    class Says(torch.nn.Module):
        """Class k in the first place, k + 1 in the second, and so on."""

        def forward(self, images):
            order = (torch.arange(10) - images[:, 0, 0, 0, None].long()) % 10
            return type("Out", (), {"logits": -order.float()})()

    images = [(torch.full((1, 1, 1), float(k)), label) for k, label in ((0, 0), (3, 7), (3, 8), (9, 0))]
    found = resnet.evaluate(Says(), images, "cpu", batch=3)
    assert (found["top1"], found["top5"]) == (0.25, 0.75)
    nats = math.log(sum(math.exp(-k) for k in range(10)))
    assert found["loss"] == pytest.approx(nats + (0 + 4 + 5 + 1) / 4)


def run(folder, *words):
    """The script, in this process; what it writes."""
    resnet.main([*SMALL, "--out", str(folder / "out.json"), *map(str, words)])
    return json.loads((folder / "out.json").read_text())


def test_a_run_that_is_resumed_equals_one_that_went_on(tmp_path, monkeypatch):
    whole = run(tmp_path, "--folder", tmp_path / "whole", "--steps", 6)
    made, steps = resnet.Pixels.__getitem__, []

    def broken(self, i):
        steps.extend([i] if self.shift else [])
        if self.shift and len(steps) > 1 + 8 * 4 + 3:  # in the fifth step
            raise OSError("no such image")
        return made(self, i)

    monkeypatch.setattr(resnet.Pixels, "__getitem__", broken)
    with pytest.raises(OSError, match="no such image"):
        run(tmp_path, "--folder", tmp_path / "parts", "--steps", 6)
    monkeypatch.setattr(
        resnet.Pixels, "__getitem__", lambda self, i: steps.extend([i] if self.shift else []) or made(self, i)
    )
    steps.clear()
    resumed = run(tmp_path, "--folder", tmp_path / "parts", "--steps", 6)
    assert 8 < len(steps) < 8 * 4  # of the training images of six steps
    assert (resumed["score"], resumed["other"]) == (whole["score"], whole["other"])


@pytest.mark.slow
def test_flags_change_how_it_computes_and_not_what(tmp_path):
    plain = run(tmp_path, "--optimizer", "adam")
    same = run(tmp_path, "--optimizer", "adam", "--checkpointing", "--channels-last")
    assert same["other"]["loss"] == pytest.approx(plain["other"]["loss"], rel=1e-4)
    in_bf16 = run(tmp_path, "--optimizer", "adam", "--bf16")
    assert in_bf16["other"]["loss"] == pytest.approx(plain["other"]["loss"], rel=5e-2)
    assert in_bf16["other"]["loss"] != plain["other"]["loss"]
    assert math.isfinite(run(tmp_path, "--optimizer", "adam", "--micro", 2)["other"]["loss"])


def test_weights_are_taken_with_a_head_of_other_classes_left_out(tmp_path):
    model = resnet.make_model(18, 7, "cifar", 1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    taken = resnet.make_model(18, 10, "cifar", 1, file)
    conv = "resnet.encoder.stages.1.layers.0.layer.0.convolution.weight"
    assert torch.equal(taken.state_dict()[conv], model.state_dict()[conv])
    with pytest.raises(ValueError, match=r"is of another ResNet, as in resnet\.embedder"):
        resnet.make_model(18, 10, "cifar", 3, file)


@parametrize("name", OPTIMIZERS, usual=[0])
def test_every_optimizer_trains_it(tmp_path, name):
    assert math.isfinite(run(tmp_path, "--optimizer", name, "--steps", 8)["other"]["loss"])
