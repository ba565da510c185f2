"""What the trainers' integrations use of a thinwire.train.session, whose package stands above theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from thinwire.comm.protocol import Group


class Run(Protocol):
    """A session: see thinwire.train.session, and docs/your-script.md."""

    @property
    def group(self) -> Group:
        """The ranks of now."""

    @property
    def rank(self) -> int:
        """This rank among them."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def step_is_lost(self) -> bool:
        """Was the step lost that was made just now?"""

    def register(self, **objects: Any) -> None:
        """Name what the loop changes."""

    def report(self, **numbers: Any) -> None:
        """Numbers of this step."""

    def finish(self) -> None:
        """The last step was made."""

    def batches(self, dataset: Any, **how: Any) -> Iterator[Any]:
        """This rank's share of each step."""
