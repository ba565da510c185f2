"""A snapshot of a GPU's tensors: copied through pinned memory, whole when save() returns; loaded onto the GPU."""

import pytest
import torch

from tests.workers.checkpoints.states import GENERATION, assert_same, state
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Content, Writer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on(device, content):
    moved = ({name: tensor.to(device) for name, tensor in part.items()} for part in (content.flat, content.buffers))
    return Content(*moved, content.plain)


@pytest.mark.parametrize("size", [1, 3])
def test_what_a_gpu_held_when_save_returned_comes_back_to_it(tmp_path, size):
    store, which = CheckpointStore(tmp_path, keep=1), CheckpointId(GENERATION, 10)
    content = on("cuda", state(10))
    content.flat["large"] = torch.arange(50_000_000, device="cuda", dtype=torch.float32)
    kept = on("cpu", content)
    writers = [Writer(store) for _ in range(size)]
    tickets = [writer.save(which, rank, size, content) for rank, writer in enumerate(writers)]
    for tensor in content.flat.values():
        tensor.zero_()
    assert tickets[0].wait(60)
    loaded = store.load(which, torch.device("cuda"))
    assert all(tensor.is_cuda for tensor in (*loaded.flat.values(), *loaded.buffers.values()))
    assert_same(on("cpu", loaded), kept)
    assert all(writer.close(10) for writer in writers)
