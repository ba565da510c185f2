"""What is wrong with a request, field by field: pydantic's errors turned into contract.jobs.Problem.

Pydantic's locations hold more than field names: the tag of a discriminated union ('onebit_adam') and a label for
each branch of a plain union ('constrained-int'), with one error a branch. Walking the JSON schema beside the
location tells the two apart and says what the field allows.

What a field allows is said in words, from the same schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from thinwire.contract.job_names import LABEL, fitting_name
from thinwire.contract.jobs import Problem
from thinwire.contract.labels import KEY, LONGEST_KEY, VALUE
from thinwire.contract.people import TOKEN_NAME
from thinwire.contract.projects import PROJECT_NAME
from thinwire.contract.redaction import redacted_json
from thinwire.contract.script import ABSOLUTE, REQUIREMENT, SHA256, VARIABLE, ScriptRecipe
from thinwire.contract.spec import AnySpec

Schema = Mapping[str, Any]

LONGEST_VALUE = 200
"""Characters of a refused value that are shown back."""


def describe_problems(errors: Sequence[Mapping[str, Any]], body: Schema, document: Schema) -> list[Problem]:
    """One Problem a field, in the order found.

    errors: as pydantic's `errors()`, locations starting with 'body', 'query', 'path' or 'header'.
    body: the JSON schema of the body; document: what its references point into.
    """
    found: dict[str, Problem] = {}
    for error in errors:
        for problem in _one(error, body, document):
            earlier = found.get(problem.path)
            if earlier is None:
                found[problem.path] = problem
            elif problem.message not in earlier.message:
                joined = f"{earlier.message}; {problem.message}"
                found[problem.path] = earlier.model_copy(update={"message": joined})
    return list(found.values())


def problems_of_spec(error: ValidationError) -> list[Problem]:
    """The same of a job that was read outside of a route, by `read_spec` or `read_accepted`."""
    return problems_of(error, _spec())


def problems_of(error: ValidationError, schema: Schema) -> list[Problem]:
    """The same of what was read outside of a route. schema: its JSON schema."""
    return describe_problems([{**one, "loc": ("body", *one["loc"])} for one in error.errors()], schema, schema)


@cache
def _spec() -> Schema:
    return TypeAdapter(AnySpec).json_schema()


def shown(value: Any, name: str = "") -> JsonValue:
    """The value of a field as it can stand in an answer: itself if it is short JSON, else the beginning of its text;
    in both without secrets.
    """
    value = redacted_json(value, name)
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate cannot be sent
    except (TypeError, ValueError):
        text = ascii(value)
        return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."
    if len(text) <= LONGEST_VALUE:
        shown_value: JsonValue = json.loads(text)
        return shown_value
    return text[:LONGEST_VALUE] + "..."


def _one(error: Mapping[str, Any], body: Schema, document: Schema) -> Iterator[Problem]:
    kind, context = error["type"], error.get("ctx") or {}
    where, *loc = error["loc"]
    if kind == "impossible":
        for found in context["problems"]:
            yield _impossible(found["path"], found["value"], found["allowed"], error["input"])
        return
    if kind == "json_invalid":
        at = f", at character {loc[0]}" if loc else ""
        yield Problem(path="", message=f"the body is not JSON: {context.get('error', error['msg'])}{at}")
        return
    if where != "body":
        name = ".".join(map(str, loc))
        yield Problem(path=name, value=shown(error["input"], name), message=error["msg"])
        return
    alternatives = _alternatives(body)
    if loc and loc[0] in alternatives:
        body, loc = alternatives[loc[0]], loc[1:]
    if loc and loc[-1] == "[key]":
        path, _, _ = _walk(loc[:-1], body, document)
        holder = resolve(_walk(loc[:-2], body, document)[1], document)
        names = next(iter(holder.get("patternProperties", {})), "")
        yield Problem(path=".".join(path), value=shown(error["input"]), message=f"must have a name {named(names)}")
        return
    path, node, parent = _walk(loc, body, document)
    value = None if kind == "missing" else shown(error["input"], path[-1] if path else "")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(context["discriminator"]).strip("'")
        tags = _tags(node, tag, document)
        for other in alternatives.values():  # what another kind of body is known by
            tags |= _tags(_walk(loc, other, document)[1], tag, document)
        value = shown(context["tag"]) if "tag" in context else None
        yield Problem(path=".".join([*path, tag]), value=value, message=f"must be one of {', '.join(tags)}")
        return
    if kind == "extra_forbidden":
        fields, whole = (list(resolve(one, document).get("properties", {})) for one in (parent, body))
        message = _unknown_field(path, str(loc[-1]), fields, whole)
    elif kind == "missing":
        message = f"this field is required: {allowed(node, document)}" if loc else "a JSON body is required"
    elif not loc:
        message = "the body must be a mapping of fields, a JSON object"
    elif kind in _OF_OUR_OWN or not (words := allowed(node, document)):
        message = error["msg"]
    elif kind == "string_pattern_mismatch" and node.get("pattern") == LABEL and (fit := fitting_name(error["input"])):
        message = f"must be {words}; such as {fit}"
    elif kind == "finite_number":
        message = f"must be {words.replace('a number', 'a finite number')}"
    else:
        message = f"must be {words}"
    yield Problem(path=".".join(path), value=value, message=message)


def _alternatives(body: Schema) -> dict[str | int, Schema]:
    """The schemas of the kinds of body that a route takes, by their names, which are pydantic's tags too."""
    kinds = body.get("oneOf", ()) if "discriminator" not in body else ()
    return {kind["$ref"].rpartition("/")[2]: kind for kind in kinds if "$ref" in kind}


def _tags(node: Schema, tag: str, document: Schema) -> dict[str, None]:
    """What the field `tag` of this may be, in order."""
    node = resolve(node, document)
    if "discriminator" in node:
        return dict.fromkeys(node["discriminator"]["mapping"])
    const = node.get("properties", {}).get(tag, {}).get("const")
    return {} if const is None else {const: None}


def _unknown_field(path: Sequence[str], name: str, fields: Sequence[str], whole: Sequence[str]) -> str:
    """whole: the fields of the whole body. A name that other tools have is answered with what it is here."""
    known = CALLED_ELSEWHERE.get(name.lower().replace("-", "_"))
    if known is not None and known.partition(".")[0] not in whole:
        known = None
    if known is None and list(path[:-1]) == ["recipe"] and name in ScriptRecipe.model_fields:
        known = f"recipe.{name}"
    if known is None:
        near = next(iter(get_close_matches(name[:LONGEST_VALUE], fields, n=1)), None)
    elif known.rpartition(".")[2] in fields and known.split(".")[:-1] == list(path[:-1]):
        near = known.rpartition(".")[2]
    else:
        of_script = known.startswith("recipe.") and known.partition(".")[2] in ScriptRecipe.model_fields
        near = f"{known}, with recipe.name = script" if of_script else known
    guess = f"there is no such field; did you mean {near}? Allowed" if near else "there is no such field; allowed"
    return f"{guess} here: {', '.join(fields)}"


CALLED_ELSEWHERE = {
    name: path
    for path, names in {
        "global_batch": "batch batch_size train_batch_size per_device_train_batch_size micro_batch_size batchsize",
        "steps": "max_steps num_steps total_steps train_steps max_iters iterations",
        "workers.max": "num_workers world_size nproc_per_node nnodes num_nodes num_gpus gpus replicas",
        "workers.min": "min_workers",
        "workers.device": "accelerator",
        "optimizer.lr": "learning_rate",
        "optimizer.warmup": "freeze_step",
        "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
        "optimizer.eps": "epsilon adam_epsilon",
        "lr_schedule.warmup": "warmup_steps warmup_ratio num_warmup_steps",
        "checkpoint.every_steps": "save_steps save_every checkpoint_every",
        "checkpoint.store": "output_dir checkpoint_dir save_dir",
        "evaluation.every_steps": "eval_steps eval_every",
        "recipe.entry": "script entrypoint entry_point command program main train_file",
        "recipe.args": "argv arguments script_args",
        "recipe.pip": "requirements dependencies packages",
        "recipe.env_vars": "env environment envs",
        "recipe.working_dir": "workdir cwd folder directory",
    }.items()
    for name in names.split()
}
"""What other tools call a field of a job file, and what it is here."""


def _impossible(path: str, value: JsonValue, words: str, body: object) -> Problem:
    """A field that cannot stand beside others. Tells what was not written in `body` but is a default."""

    def marked(match: re.Match[str]) -> str:
        return match[0] if _written(match["path"], body) else f"{match[0]} (the default)"

    message = "must be " + _EQUATION.sub(marked, words)
    if path and not _written(path, body):
        message += f"; {value} is the default"
    return Problem(path=path, value=shown(value, path), message=message)


def _written(path: str, body: object) -> bool:
    """True where the body gives a value at `path`; of what lies in a list, at its place."""
    for name in path.split("."):
        if isinstance(body, list) and name.isdecimal() and int(name) < len(body):
            body = body[int(name)]
        elif isinstance(body, Mapping) and name in body:
            body = body[name]
        else:
            return False
    return True


def _walk(loc: Sequence[str | int], body: Schema, document: Schema) -> tuple[list[str], Schema, Schema]:
    """The names of fields in `loc`, the schema it ends at, and the schema of what holds that field."""
    path: list[str] = []
    parent: Schema = {}
    node: Schema = body
    for part in loc:
        node = resolve(node, document)
        tags = node.get("discriminator", {}).get("mapping", {})
        if part in tags:
            node = {"$ref": tags[part]}
        elif not node or branches(node, document):
            break  # `part` names a branch of a union, or is inside of what may be any JSON
        else:
            path.append(str(part)[:LONGEST_VALUE])
            parent, node = node, _inside(node, part)
    return path, node, parent


def _inside(node: Schema, part: str | int) -> Schema:
    """The schema of one member of an object or an array; empty where nothing is known of it."""
    if isinstance(part, int):
        prefix: Sequence[Schema] = node.get("prefixItems", ())
        found: Any = prefix[part] if part < len(prefix) else node.get("items", {})
    elif part in node.get("properties", {}):
        found = node["properties"][part]
    else:  # a mapping whose names are the user's own
        found = next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties", {}))
    return found if isinstance(found, Mapping) else {}


_OF_OUR_OWN = frozenset({"value_error", "assertion_error"})
"""Errors of validators that say in their own words what is wrong."""
_EQUATION = re.compile(r"(?P<path>[a-z_]+(?:\.[a-z_]+)*) = [^\s,;:]+")


def allowed(node: Schema, document: Schema) -> str:
    """What the field allows, to stand after "must be": "a whole number at least 1". Empty where nothing is known.

    document: what the references of `node` point into.
    """
    node = resolve(node, document)
    if found := branches(node, document):
        return ", or ".join(allowed(branch, document) for branch in found)
    if "discriminator" in node:
        name, tags = node["discriminator"]["propertyName"], list(node["discriminator"]["mapping"])
        return f"a mapping of fields whose {name} is one of {', '.join(tags)}, such as {{{name}: {tags[0]}}}"
    if "const" in node or "enum" in node:
        return "one of " + ", ".join(str(value) for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "")
    if kind == "object":
        return _mapping(node)
    if kind == "string":
        return _text(node)
    if kind == "array":
        return _list(node, document)
    bounds = [f"{words} {_plain(node[key])}" for key, words in _BOUNDS.items() if key in node]
    return " ".join([_NOUNS.get(kind, ""), " and ".join(bounds)]).strip()


def resolve(node: Schema, document: Schema) -> Schema:
    """The schema itself, behind references and behind 'or null'."""
    while True:
        if "$ref" in node:
            target: Any = document
            for name in node["$ref"].removeprefix("#/").split("/"):
                target = target[name]
            node = target
            continue
        some = [branch for branch in node.get("anyOf", ()) if branch.get("type") != "null"]
        if len(some) == 1:
            node = some[0]
            continue
        return node


def branches(node: Schema, document: Schema) -> list[Schema]:
    """The branches of a union that has no tag; empty for anything else."""
    node = resolve(node, document)
    return [] if "discriminator" in node else list(node.get("anyOf", ()))


def _mapping(node: Schema) -> str:
    """A mapping, with its first two fields as they are by default, where they have one, for an example."""
    if "maxProperties" in node:
        return f"a mapping of at most {node['maxProperties']} names"
    defaults = {name: field["default"] for name, field in node.get("properties", {}).items() if "default" in field}
    scalars = [f"{name}: {value}" for name, value in defaults.items() if isinstance(value, str | int | float)]
    if len(scalars) < 2 or node.get("required"):
        return "a mapping of fields"
    return f"a mapping of fields, such as {{{', '.join(scalars[:2])}}}"


def _text(node: Schema) -> str:
    least, most = node.get("minLength", 0), node.get("maxLength")
    length = f" of {least} to {most} characters" if most else " that is not empty" if least else ""
    pattern = node.get("pattern")
    return f"text{length}" + (f": {named(pattern)}" if pattern else "")


def named(pattern: str) -> str:
    """What a pattern asks of a text, in words."""
    return _PATTERNS.get(pattern, f"it must match {pattern}")


def _list(node: Schema, document: Schema) -> str:
    items = [allowed(item, document) for item in node.get("prefixItems", ())]
    if not items:
        return "a list" + (f" of at most {node['maxItems']}" if "maxItems" in node else "")
    return f"a list of {len(items)}: {', then '.join(items)}"


def _plain(bound: float) -> str:
    """A bound as a person writes it: 1000000000, not 1e+09 or 1000000000.0."""
    return str(int(bound)) if bound == int(bound) else str(bound)


_NOUNS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_PATTERNS = {
    KEY: "of up to 63 letters, digits, dots, dashes and underscores, beginning and ending with a letter or digit; "
    f"before it there may be a domain and a slash, such as example.com/team; at most {LONGEST_KEY} characters in all",
    VALUE: "up to 63 letters, digits, dots, dashes and underscores, beginning and ending with a letter or digit; or "
    "nothing",
    LABEL: "lower-case letters, digits, dots and dashes, beginning and ending with a letter or digit",
    TOKEN_NAME: "up to 63 lower-case letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    PROJECT_NAME: "up to 63 lower-case letters, digits and dashes, beginning and ending with a letter or digit",
    SHA256: "the sha256 of a package, 64 hexadecimal digits in lower case",
    VARIABLE: "of letters, digits and underscores, not beginning with a digit",
    ABSOLUTE: "an absolute path",
    REQUIREMENT: "one requirement, such as einops==0.8, without blanks before and behind it; not an option of pip, "
    "which begins with -, and no comment",
}
