"""The ranks of a box, which hold the other shards of the same tensors: what is of whole tensors is found with them.

A norm, a trust ratio, whether a gradient is finite, when a variance is frozen: what a rank computes of its shards alone
would differ from the next one's, and each would step otherwise. So partial results are gathered, a few bytes, and each
rank adds them up in one order. Replicas in other boxes hold the same shards, so that they find the same, bit for bit,
whatever algorithm their library takes for a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.default import over
from thinwire.comm.protocol import Group, Leavable
from thinwire.optim.engine.local import is_dtensor, lay_in, sharders
from thinwire.optim.engine.parameters import is_trained, labels

LINES = (
    'mesh = init_device_mesh(device, (boxes, ranks_of_a_box), mesh_dim_names=("replicate", "shard")); '
    'fully_shard(model, mesh=mesh["shard"]); OneBitAdam(model.parameters(), group=mesh["replicate"].get_group())'
)
"""How a model is sharded inside of a box, and replicated over boxes."""
Together = Callable[[Tensor], Tensor]
"""Makes one of the rows that the ranks have given, [ranks, ...]."""


class Box:
    """The ranks that hold the other shards of these tensors. Every rank of a box calls alike.

    meshes: of each mesh which of the tensors lie on it, and a group for each of its dimensions. counts_T: 1, or 0 where
    the same shard is on several ranks of this box and another one counts it. copies: which tensors are so, and the
    group of the ranks that have the same.
    """

    def __init__(
        self,
        meshes: Sequence[tuple[Tensor, Sequence[Group]]],
        counts_T: Tensor,
        copies: Sequence[tuple[Sequence[int], Group]],
        sharders: Sequence[Any],
    ) -> None:
        self._meshes, self._counts_T, self._copies, self._sharders = meshes, counts_T, copies, sharders
        self._gatherers = {id(one.sharded_param): one for group in sharders for one in group.fsdp_params}
        self.found: Tensor | None = None
        """Has this rank found something that all of the box are to know with the next least()? A bool, 0-dim."""
        self.found_by_any = False
        """Had any rank of the box at the last least()?"""

    @classmethod
    def of(cls, params: Sequence[Any]) -> Box | None:
        """That of these parameters, in flat order. None where they are no DTensors."""
        if not any(is_dtensor(param) for param in params):
            return None
        of_mesh: dict[Any, list[int]] = {}
        counts = []
        for i, param in enumerate(params):
            of_mesh.setdefault(param.device_mesh, []).append(i)
            at = zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
            counts.append(float(all(place == 0 or not placement.is_replicate() for place, placement in at)))
        device, meshes, copies = params[0].device, [], []
        for mesh, inside in of_mesh.items():
            groups = {d: over(mesh.get_group(d)) for d in range(mesh.ndim) if mesh.size(d) > 1}
            meshes.append((torch.tensor(inside, dtype=torch.int64, device=device), list(groups.values())))
            for d, group in groups.items():
                alike = [i for i in inside if params[i].placements[d].is_replicate()]
                copies += [(alike, group)] if alike else []
        return cls(meshes, torch.tensor(counts, dtype=torch.float64, device=device), copies, sharders(params))

    def held_back(self, is_untouched: bool) -> Tensor | None:
        """A parameter of whose gradient FSDP has a part that it has not reduced; None: of none, as far as is known.

        That of backwards under set_requires_gradient_sync(False), which the next one without it adds. Looks where that
        is set now, or where no gradient has come (is_untouched). Local.
        """
        for sharder in self._sharders:
            if is_untouched or not sharder.reduce_grads:
                for one in sharder.fsdp_params:
                    own = getattr(one, "_unsharded_param", None)  # none before the first forward
                    if one.unsharded_accumulated_grad is not None or (own is not None and own.grad is not None):
                        held: Tensor = one.sharded_param
                        return held
        return None

    def lay_in(self, here: Tensor, param: Any) -> bool:
        """As local.lay_in, of a parameter that FSDP may gather. Local."""
        return lay_in(here, param, self._gatherers.get(id(param)))

    @property
    def num_tensors(self) -> int:
        """T."""
        return len(self._counts_T)

    def sums(self, values_T: Tensor) -> Tensor:
        """Sums over the shards of each tensor, float[..., T]: of what is here of each. Collective."""
        own = torch.where(self._counts_T > 0, values_T, 0.0)  # not a product: what is not counted may be infinite
        return self._of_tensors(own, lambda rows: rows.sum(0))

    def maxima(self, values_T: Tensor) -> Tensor:
        """The largest of the shards of each tensor, float[..., T]. Collective."""
        return self._of_tensors(values_T, lambda rows: rows.amax(0))

    def total(self, values_T: Tensor) -> Tensor:
        """The sum over all shards of all tensors, 0-dim. Collective."""
        return self.sums(values_T).sum()

    def equalise_(self, values: Sequence[Tensor]) -> None:
        """Of tensors that several ranks of the box have alike, as norms beside tensor parallelism: the first one's.

        values: of each tensor what is here; modified. Each of these ranks exchanges with ranks of its own, where such a
        tensor may share a scale with others, so that what is compressed comes out otherwise. Collective.
        """
        for alike, group in self._copies:
            passed = torch.cat([values[i].reshape(-1) for i in alike])
            group.broadcast_(passed)
            parts = torch.split(passed, [values[i].numel() for i in alike])
            torch._foreach_copy_(
                [values[i] for i in alike],
                [x.view(values[i].shape) for i, x in zip(alike, parts, strict=True)],
            )

    def least(self, here: int) -> int:
        """The least of what the ranks of the box say. Collective; waits for the device. Modifies found_by_any."""
        found = self._counts_T.new_tensor([here, 0 if self.found is None else -int(self.found)])
        for _, groups in self._meshes:
            found = _over(groups, found, lambda rows: rows.amin(0))
        least, negated = found.tolist()
        self.found_by_any = negated < 0
        return int(least)

    def leave(self, reason: str) -> None:
        """This rank goes on with nobody: the others of the box raise PeerLost where they wait for it, for good."""
        for _, groups in self._meshes:
            for group in groups:
                if isinstance(group, Leavable):
                    group.leave(reason)

    def _of_tensors(self, values_T: Tensor, together: Together) -> Tensor:
        found_T = values_T.clone()
        for inside, groups in self._meshes:
            found_T[..., inside] = _over(groups, values_T[..., inside], together)
        return found_T


def refuse_other_mesh(group: Group, param_groups: Sequence[dict[str, Any]]) -> None:
    """See that nobody in the group has another shard of a tensor, or averages its gradients inside of its mesh. Local.

    Raises: ValueError, naming the parameter, with the lines to write; alike on every rank, as the ranks build alike.
    """
    others = set(getattr(group, "ranks", ()))
    for each, called in zip(param_groups, labels(list(param_groups)), strict=True):
        for param, label in zip(each["params"], called, strict=True):
            if is_trained(param) and is_dtensor(param):
                _refuse_dtensor(group, others, param, label)


def _refuse_dtensor(group: Group, others: set[int], param: Any, label: str) -> None:
    mesh = param.device_mesh
    for d, placement in enumerate(param.placements):
        ranks = over(mesh.get_group(d)).ranks if mesh.size(d) > 1 else []
        if len(others.intersection(ranks)) < 2:
            continue
        if not placement.is_replicate():
            raise ValueError(
                f"{label}: ranks {ranks} of the world have a shard of it each, and group= has ranks {sorted(others)}, "
                "which would exchange different shards as if they were the same. Its ranks must be those that hold the "
                f"same shard in other boxes: {LINES}"
            )
        raise ValueError(
            f"{label}: is {placement} over ranks {ranks} of the world, which group= has too: its mesh is of several "
            "boxes, so that FSDP averages gradients over them itself, in full, and group= would do it once more. Give "
            f"fully_shard the mesh of one box: {LINES}"
        )
    carries = getattr(group, "carries", None)
    if carries is not None and not carries(param.device):
        raise ValueError(
            f"{label}: is on {param.device}, as CPUOffloadPolicy leaves it, where group= has no backend for it: call "
            'init_process_group("cpu:gloo,cuda:nccl"), or leave CPUOffloadPolicy out'
        )


def _over(groups: Sequence[Group], x: Tensor, together: Together) -> Tensor:
    """What the ranks of these groups have, made one, a group after another; in float64."""
    found = x.double()
    for group in groups:
        rows = found.new_empty(group.size, *found.shape)
        group.all_gather(rows.view(group.size, -1).view(torch.uint8), found.contiguous().view(-1).view(torch.uint8))
        found = together(rows)
    return found.to(x.dtype)
