"""What tests of several folders here stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """A default process group of this process alone, for meshes of one. Whoever comes after finds none."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
