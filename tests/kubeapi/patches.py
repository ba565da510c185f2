"""JSON patches (RFC 6902) and merge patches (RFC 7386), and what an API server answers to those that do not apply."""

from __future__ import annotations

from typing import Any

import jsonpatch
import jsonpointer

from tests.kubeapi.answers import bad_request, patch_does_not_apply, unsupported_type
from tests.kubeapi.kinds import Object

JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"


def patched(found: Object, content_type: str, patch: Any) -> Object:
    """The object with this patch applied. Raises Refused: 400, 415, or 422 where a test or a path of it fails."""
    if content_type == MERGE_PATCH:
        if not isinstance(patch, dict):
            raise bad_request("error decoding patch: a merge patch is an object")
        merged: Object = _merge(found, patch)
        return merged
    if content_type != JSON_PATCH:
        raise unsupported_type(content_type)
    try:
        operations = jsonpatch.JsonPatch(patch)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as error:
        raise bad_request(f"error decoding patch: {error}") from error
    try:
        changed: Object = operations.apply(found)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
        raise patch_does_not_apply() from error
    return changed


def _merge(found: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged
