"""Whether an object may be stored: its metadata by the rules of Kubernetes, the rest by the schema of its kind.

Of RayJob and RayCluster it is KubeRay's CRD that decides, with its defaults filled in; a field that it does not know is
refused, as with fieldValidation=Strict. Built-in kinds are checked against the newest schema of Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import kubernetes_validate.utils as kubernetes
from jsonschema import ValidationError

from tests.deploy.schemas import KUBERAY, NEWEST, crd
from tests.kubeapi.answers import Cause, bad_request, invalid, unknown_fields
from tests.kubeapi.kinds import Kind, Object

_LABEL_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_ANNOTATIONS_BYTES = 256 * 1024
_SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_WORDS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_KEY_WORDS = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


def check(kind: Kind, body: Object) -> None:
    """Raises Refused with 422, or with 400 for fields that are unknown."""
    name = body["metadata"].get("name", "")
    causes = list(_of_metadata(kind, body["metadata"]))
    if kind.kind in KUBERAY:
        errors = list(crd(kind.kind).iter_errors(body))
        if extra := [path for error in errors for path in _unknown(error)]:
            raise unknown_fields(kind, extra)
        causes += [_cause(error) for error in errors]
    elif not kind.is_custom:
        causes += _of_built_in(kind, body)
    if causes:
        raise invalid(kind, name, causes)


def with_defaults(kind: Kind, body: Object) -> Object:
    """The same object, modified: what the CRD's schema has a default for and the object does not name."""
    if kind.kind in KUBERAY:
        _fill(crd(kind.kind).schema, body)
    return body


def _fill(schema: Any, found: Any) -> None:
    if isinstance(found, list) and isinstance(schema.get("items"), dict):
        for each in found:
            _fill(schema["items"], each)
    if not isinstance(found, dict):
        return
    for key, inner in (schema.get("properties") or {}).items():
        if key not in found and "default" in inner:
            found[key] = inner["default"]
        if key in found:
            _fill(inner, found[key])


def _of_metadata(kind: Kind, metadata: Object) -> Iterator[Cause]:
    name = metadata.get("name", "")
    is_label = kind.plural in ("services", "namespaces")
    if not name:
        yield Cause("FieldValueRequired", "metadata.name", "Required value: name or generateName is required")
    elif len(name) > (63 if is_label else 253):
        longest = 63 if is_label else 253
        yield Cause(
            "FieldValueInvalid", "metadata.name", f'Invalid value: "{name}": must be no more than {longest} bytes'
        )
    elif not (_LABEL if is_label else _SUBDOMAIN).fullmatch(name):
        yield Cause("FieldValueInvalid", "metadata.name", f'Invalid value: "{name}": {_SUBDOMAIN_WORDS}')
    for path in ("labels", "annotations"):
        for key, value in (metadata.get(path) or {}).items():
            where = f"metadata.{path}"
            prefix, _, part = key.rpartition("/")
            if not _LABEL_PART.fullmatch(part) or (prefix and not _SUBDOMAIN.fullmatch(prefix)):
                yield Cause("FieldValueInvalid", where, f'Invalid value: "{key}": {_KEY_WORDS}')
            elif len(part) > 63 or len(prefix) > 253:
                yield Cause(
                    "FieldValueInvalid", where, f'Invalid value: "{key}": name part must be no more than 63 bytes'
                )
            if not isinstance(value, str):
                raise bad_request(f"{kind.kind}: {where}.{key} is {value!r}, and must be a string")
            if path == "labels" and len(value) > 63:
                yield Cause("FieldValueInvalid", where, f'Invalid value: "{value}": must be no more than 63 bytes')
            elif path == "labels" and value and not _LABEL_PART.fullmatch(value):
                yield Cause("FieldValueInvalid", where, f'Invalid value: "{value}": {_LABEL_WORDS}')
    size = sum(len(key) + len(value) for key, value in (metadata.get("annotations") or {}).items())
    if size > _ANNOTATIONS_BYTES:
        words = f"Too long: may not be more than {_ANNOTATIONS_BYTES} bytes"
        yield Cause("FieldValueTooLong", "metadata.annotations", words)


def _of_built_in(kind: Kind, body: Object) -> list[Cause]:
    try:
        kubernetes.validate({"apiVersion": kind.api_version, "kind": kind.kind} | body, NEWEST, strict=True)
    except kubernetes.ValidationError as error:
        return [Cause("FieldValueInvalid", ".".join(map(str, error.path)), f"Invalid value: {error.message}")]
    return []


def _path(parts: Iterable[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _unknown(error: ValidationError) -> list[str]:
    if error.validator != "additionalProperties" or error.validator_value is not False:
        return []
    known = error.schema.get("properties", {})
    return [_path([*error.absolute_path, key]) for key in error.instance if key not in known]


def _cause(error: ValidationError) -> Cause:
    path, value = _path(error.absolute_path), error.instance
    shown = f'"{value}"' if isinstance(value, str) else value
    if error.validator == "required":
        missing = next(name for name in error.validator_value if name not in value)
        return Cause("FieldValueRequired", _path([*error.absolute_path, missing]), "Required value")
    if error.validator == "enum":
        known = ", ".join(f'"{each}"' for each in error.validator_value)
        return Cause("FieldValueNotSupported", path, f"Unsupported value: {shown}: supported values: {known}")
    if error.validator == "type":
        found = {str: "string", int: "integer", bool: "boolean", dict: "object", list: "array", float: "number"}
        words = f'Invalid value: "{found.get(type(value), "null")}": {path} in body must be of type '
        return Cause(
            "FieldValueTypeInvalid", path, f'{words}{error.validator_value}: "{found.get(type(value), "null")}"'
        )
    return Cause("FieldValueInvalid", path, f"Invalid value: {shown}: {path} in body: {error.message}")
