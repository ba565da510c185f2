"""A script of the user's own as a recipe: where its files are, how it is called, what it needs. Torch-free.

A script makes its own model, data and optimizer, and says itself how long it trains. What it may not be given here is a
secret: the job file is stored, shown by the service and written into run folders, and Ray shows env_vars to all
who may look at a job. `secrets` names where each box finds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from thinwire.contract import stores
from thinwire.contract.redaction import HIDDEN, names_secret, redacted
from thinwire.contract.start import Start

SHA256 = r"^[0-9a-f]{64}$"
MOST_ARGS = 1000
MOST_NAMES = 200
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
ABSOLUTE = r"^/[^\x00-\x1f\x7f]*$"
REQUIREMENT = r"^[^\x00-\x20\x7f#-]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f\\])?$"
VariableName = Annotated[str, Field(min_length=1, max_length=255, pattern=VARIABLE)]
AbsolutePath = Annotated[str, Field(min_length=1, max_length=4096, pattern=ABSOLUTE)]
Argument = Annotated[str, Field(max_length=32768)]
Requirement = Annotated[str, Field(min_length=1, max_length=1024, pattern=REQUIREMENT)]


class SecretSource(BaseModel):
    """Where the boxes have the value of a secret: exactly one of both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: VariableName | None = Field(None, description="a variable of the environment of Ray on each box")
    file: AbsolutePath | None = Field(
        None, description="an absolute path on each box; its text, without the last newline"
    )


class ScriptRecipe(BaseModel):
    """A script, its files, its arguments and what it needs. Exactly one of package and working_dir says where it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["script"]
    entry: str = Field(min_length=1, max_length=1024, description="the script, relative to its folder, as train.py")
    args: tuple[Argument, ...] = Field((), max_length=MOST_ARGS, description="its arguments, each a text")
    package: str | None = Field(
        None, pattern=SHA256, description="sha256 of the zip of its folder, as PUT /v1/packages/{sha256} has taken it"
    )
    working_dir: AbsolutePath | None = Field(None, description="its folder, where that is on all boxes or in the image")
    pip: tuple[Requirement, ...] = Field(
        (),
        max_length=MOST_NAMES,
        description="requirements, as `pip install` takes them, that Ray installs on each box",
    )
    env_vars: dict[VariableName, Argument] = Field(
        default_factory=dict, max_length=MOST_NAMES, description="environment of the script; seen by all: no secrets"
    )
    secrets: dict[VariableName, SecretSource] = Field(
        default_factory=dict,
        max_length=MOST_NAMES,
        description="environment of the script that each box finds for itself, just before the script starts",
    )

    @field_validator("entry")
    @classmethod
    def _inside(cls, entry: str) -> str:
        parts = entry.split("/")
        if entry.startswith("/") or any(part in ("", ".", "..") for part in parts) or not entry.isprintable():
            raise ValueError(
                "must be a path inside of the script's folder, with / and without .., such as src/train.py"
            )
        return entry

    @field_validator("args")
    @classmethod
    def _for_a_process(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in one for one in args):
            raise ValueError("must be texts without the character NUL: no process can be given one")
        return args


def runtime_environment(working_dir: str | None, pip: Sequence[str], env_vars: Mapping[str, str]) -> dict[str, object]:
    """What Ray is to make of it on each machine, without a package, which comes in a way of its own."""
    found: dict[str, object] = {"working_dir": f"local://{working_dir}"} if working_dir is not None else {}
    if pip:
        found["pip"] = list(pip)
    if env_vars:
        found["env_vars"] = dict(env_vars)
    return found


def impossible(recipe: ScriptRecipe) -> Iterator[tuple[str, object, str]]:
    """What of a recipe cannot stand together, as (path, value, what is allowed)."""
    if (recipe.package is None) == (recipe.working_dir is None):
        given = "neither is" if recipe.package is None else "both are"
        yield (
            "recipe.package",
            recipe.package,
            f"given where recipe.working_dir is not, and only there; {given} given. `thinwire submit train.py` uploads "
            "the folder of a script and names the package",
        )
    for name in recipe.env_vars:
        path = f"recipe.env_vars.{name}"
        if reason := _taken(name):
            yield path, recipe.env_vars[name], f"left out: {reason}"
        elif "\0" in recipe.env_vars[name]:
            yield path, recipe.env_vars[name], "text without the character NUL"
    for name, source in recipe.secrets.items():
        path = f"recipe.secrets.{name}"
        if (source.env is None) == (source.file is None):
            yield path, source.model_dump(exclude_none=True), "{env: VARIABLE} or {file: /a/path}, one of both"
        if name in recipe.env_vars:
            yield path, source.model_dump(exclude_none=True), f"given once: recipe.env_vars has {name} too"
        elif reason := _taken(name):
            yield path, source.model_dump(exclude_none=True), f"left out: {reason}"


def secrets_in(
    store: str | None, start: Start | None, recipe: ScriptRecipe | None
) -> Iterator[tuple[str, object, str]]:
    """Which secrets a job holds that have a better place, as (path, value without them, what is allowed).

    store: of its checkpoints. Those in args, and a signature in a start's URL, have none where nothing else would do:
    they are hidden where the job is shown.
    """
    if store is not None and (words := stores.any_credentials(store)):
        yield "checkpoint.store", store, words
    if start is not None:
        path, place = start.place
        if place is not None and (words := stores.credentials(place)):
            yield path, place, words
    if recipe is not None:
        yield from _secrets_of(recipe)


def _secrets_of(recipe: ScriptRecipe) -> Iterator[tuple[str, object, str]]:
    for index, requirement in enumerate(recipe.pip):
        if (shown := redacted(requirement)) != requirement:
            yield (
                f"recipe.pip.{index}",
                shown,
                "without credentials, which everybody who sees the job would read: give them to pip on the boxes, in "
                "~/.netrc or pip.conf",
            )
    for name, value in recipe.env_vars.items():
        path, where = f"recipe.env_vars.{name}", f"secrets: {{{name}: {{env: {name}}}}} takes it from each box"
        if value == HIDDEN or _taken(name):
            continue
        if names_secret(name):
            words = "under recipe.secrets, for by its name it is a secret, and everybody who sees the job sees env_vars"
            yield path, HIDDEN, f"{words}: {where}"
        elif (shown := redacted(value)) != value:
            words = "under recipe.secrets, for there is a secret in it, and everybody who sees the job sees env_vars"
            yield path, shown, f"{words}: {where}"


def _taken(name: str) -> str | None:
    """Why a script may not set this variable; None where it may."""
    owner = next((owner for prefix, owner in _OWNERS.items() if name.upper().startswith(prefix)), None)
    return owner and f"variables that begin so belong to {owner}, and it would not find its own"


_OWNERS = {"RAY_": "Ray", "THINWIRE_": "Thinwire"}
