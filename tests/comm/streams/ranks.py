"""Run the exchange of every rank on late devices, or as it runs on a CPU: the same code, the same numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.comm.streams.device import Device, Died, LateKernels, World
from tests.comm.streams.group import LateGroup
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange import node_first, pipeline, sign
from thinwire.comm.exchange.alone import Results
from thinwire.comm.exchange.reducer import Reducer, flat_reducer, node_first_reducer
from thinwire.comm.groups.nodes import nodes_of
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.layout import VectorLayout

LAYOUT = VectorLayout(3008, ((0, 1603), (1608, 3001)), ((0, 1608), (1608, 3008)))
here = threading.local()
"""device: of the rank whose thread this is."""


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what is made in a rank's thread is made for its late device."""
    kernels = LateKernels(CpuKernels(), lambda: here.device)
    monkeypatch.setattr(sign, "kernels_for", lambda *_: kernels)
    monkeypatch.setattr(node_first, "kernels_for", lambda *_: kernels)
    monkeypatch.setattr(pipeline, "streams_for", lambda _: here.device)
    make = pipeline.DeviceGate.__init__

    def make_gate(self: pipeline.DeviceGate, *given: Any) -> None:
        make(self, *given)
        here.device.meant.add(self.closed.data_ptr())

    monkeypatch.setattr(pipeline.DeviceGate, "__init__", make_gate)
    over = BlockTable.over  # the host's own work, on memory of the host
    monkeypatch.setattr(BlockTable, "over", lambda *given: _on_the_host(lambda: over(*given)))


def run_late(world: World, work: Callable[[LateGroup], Any]) -> list[Any]:
    """work(group) on a thread a rank. What each returned or raised, in order of rank."""
    told: list[Any] = [None] * len(world.devices)

    def body(group: LateGroup) -> None:
        here.device = group.device
        try:
            told[group.rank] = work(group)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            told[group.rank] = error
            if not isinstance(error, Died):
                with world.lock:
                    world.left.add(group.rank)  # or the others wait for it

    threads = [threading.Thread(target=body, args=(group,), daemon=True) for group in LateGroup.create(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    return told


def reducer_of(
    group: Any, keeps: Keeps = Keeps.NOTHING, device: torch.device | None = None, results: Results = "kept"
) -> Reducer:
    """Of this test's vector, in three buckets."""
    x = torch.zeros(LAYOUT.numel, device=device)
    return flat_reducer(group, LAYOUT, SignCodec(256), x, bucket_elements=1024, keeps=keeps, results=results)


def inputs_of(rank: int, steps: int, seed: int = 0) -> list[torch.Tensor]:
    """What a rank gives, step by step."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    made = []
    for _ in range(steps):
        x = torch.zeros(LAYOUT.numel)
        for start, stop in LAYOUT.live:
            x[start:stop] = torch.randn(stop - start, generator=random)
        made.append(x)
    return made


def exchange(reducer: Any, memory: Any, x: torch.Tensor, given: torch.Tensor, *, lerp: bool) -> None:
    """One of them up to finish(); a bucket's values are written just before it is launched, as backward does."""
    reducer.begin(memory)
    for k, (start, stop) in enumerate(reducer.buckets.spans):
        x[start:stop].copy_(given[start:stop])
        if lerp:
            reducer.launch_lerp(k, x, 0.1)
        else:
            reducer.launch_sum(k, x)
    reducer.finish()


def by_node_first(group: Any) -> Reducer:
    """The same where ranks are in boxes."""
    nodes = nodes_of(group)
    assert not isinstance(nodes, str)
    return node_first_reducer(nodes, LAYOUT, SignCodec(256), torch.zeros(LAYOUT.numel), bucket_elements=1024)


def steps_on(
    group: Any,
    steps: int,
    keeps: Keeps = Keeps.NOTHING,
    make: Callable[..., Any] = reducer_of,
    results: Results = "kept",
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """So many exchanges. Returns their results, and R. Of results that are read alone none begins from the last."""
    reducer = make(group, keeps, results=results) if make is reducer_of else make(group)
    memory, x, outs = reducer.new_memory(), torch.zeros(LAYOUT.numel), []
    device, inputs = getattr(group, "device", None), inputs_of(group.rank, steps)
    with device if isinstance(device, Device) else nullcontext():
        for step, given in enumerate(inputs):
            exchange(reducer, memory, x, given, lerp=step > 0 and results == "kept")
            out, result = torch.empty(LAYOUT.numel), reducer.result
            if results == "read":
                reducer.commit()  # it is there until the next one
            result.decode_(out)
            outs.append(out.clone())
            if results == "kept":
                reducer.commit()
            x.fill_(torch.nan)  # the caller's again: backward writes it anew
            out.fill_(torch.nan)
        part_N = done(group, lambda: memory.share(group.size))
        group.start_sum_(part_N).wait()
    return outs, done(group, lambda: part_N)


def done(group: Any, work: Callable[[], Any]) -> Any:
    """What work() gives when all that was queued on this rank's device has run."""
    if isinstance(getattr(group, "device", None), Device):
        group.world.finish(group.device)
    return _on_the_host(work)


def _on_the_host(work: Callable[[], Any]) -> Any:
    with _disable_current_modes():
        return work()
