"""Labels of a job: pairs of words by which people find their jobs again. Torch-free.

Keys and values are as Kubernetes has them, because the launcher kuberay puts them on what it makes of a job. They say
nothing of the run: they may change while it trains and after its end, and a submission that is repeated with other
labels is the same submission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

from pydantic import Field

from thinwire.contract.redaction import redacted

MOST_LABELS: Final = 32
KEY: Final = (
    r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
)
VALUE: Final = r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$"
LONGEST_KEY: Final = 238
"""Kubernetes takes 253 characters before a slash: there is room for what `on_kubernetes` puts behind them."""
LabelKey = Annotated[str, Field(min_length=1, max_length=LONGEST_KEY, pattern=KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=VALUE)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=MOST_LABELS)]
LabelsChange = Annotated[dict[LabelKey, LabelValue | None], Field(max_length=2 * MOST_LABELS)]
"""Null takes a label away; what is not named stays."""

_DOMAIN: Final = "label.thinwire"
_OF_METADATA: Final = "label:"


def changed(labels: Mapping[str, str], change: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after a change (RFC 7396, of one level): those in it are set, or taken away by None."""
    found = {**labels, **change}
    return {key: value for key, value in found.items() if value is not None}


def secrets_in(labels: Mapping[str, str | None]) -> Iterator[tuple[str, object, str]]:
    """Which labels hold what looks like a secret, as (path, value without it, what is allowed)."""
    for key, value in labels.items():
        if value is not None and (shown := redacted(value, key)) != value:
            yield f"labels.{key}", shown, "no secret: everybody who sees the job, and its cluster, sees its labels"


def in_metadata(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels as they stand in what a launcher is told of an attempt."""
    return {f"{_OF_METADATA}{key}": value for key, value in labels.items()}


def of_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Those that `in_metadata` has put there."""
    found = metadata.items()
    return {name.removeprefix(_OF_METADATA): value for name, value in found if name.startswith(_OF_METADATA)}


def on_kubernetes(key: str) -> str:
    """The key of a Kubernetes label: `team` is `label.thinwire/team`, `example.com/team` is
    `example.com.label.thinwire/team`.

    All of them are in domains below `label.thinwire`, so that nobody's label is one by which Kueue or KubeRay go.
    """
    domain, slash, name = key.rpartition("/")
    return f"{domain}.{_DOMAIN}/{name}" if slash else f"{_DOMAIN}/{name}"


def label_of(text: str) -> tuple[str, str]:
    """The label that `team=vision` names. Raises ValueError, in words, where it names none."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError("must be KEY=VALUE, such as team=vision")
    return key, value
