"""Where a run's figures go beside the service: files of TensorBoard, a server of MLflow, Weights & Biases. Torch-free.

Tokens have no place here: the job file is stored and shown. The tools' own variables have them, in the environment of
Ray on the boxes (MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_USERNAME and _PASSWORD, WANDB_API_KEY).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from thinwire.contract import stores
from thinwire.contract.fields import Frozen, Impossible

_Name = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f/:\s]([^\x00-\x1f\x7f/:]*[^\x00-\x1f\x7f/:\s])?$"),
]


class MlflowTracking(Frozen):
    """A tracking server of MLflow."""

    uri: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="http://host:port of the server; null: MLFLOW_TRACKING_URI of the boxes",
    )
    experiment: _Name = Field("thinwire", description="the experiment that the run belongs to; made if it is not there")


class WandbTracking(Frozen):
    """Weights & Biases."""

    project: _Name = "thinwire"
    entity: _Name | None = Field(None, description="a user or a team; null: WANDB_ENTITY of the boxes, or the default")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: files in the run folder, for `wandb sync`; online: sent as the job runs"
    )


class Tracking(Frozen):
    """The same figures to each that is named, from the rank 0 of the time."""

    tensorboard: bool = Field(True, description="event files in the run folder, tensorboard/")
    mlflow: MlflowTracking | None = None
    wandb: WandbTracking | None = None


def impossible(tracking: Tracking) -> Iterator[Impossible]:
    """What cannot be, as (path, value, what is allowed)."""
    uri = None if tracking.mlflow is None else tracking.mlflow.uri
    if uri is None:
        return
    path = "tracking.mlflow.uri"
    if words := stores.any_credentials(uri):
        yield path, uri, words
        return
    try:
        parts = urlsplit(uri)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits or not uri.isprintable() or " " in uri or parts.query or parts.fragment:
        yield path, uri, "the address of a tracking server, such as http://10.0.0.9:5000, without query"
