"""What an API server does with a request: paths, verbs, rights, discovery. No sockets, and no faults."""

from __future__ import annotations

import base64
import copy
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.kubeapi import answers, selectors
from tests.kubeapi.faults import Request
from tests.kubeapi.kinds import GROUPS, KINDS, NAMESPACES, PODS, Kind, Object
from tests.kubeapi.patches import patched
from tests.kubeapi.store import Deletion, Store

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
_NAMESPACE_PATH = re.compile(r"/api/v1/namespaces(?:/(?P<name>[^/]+)(?:/(?P<sub>status))?)?")
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_BODY_BYTES: Final = 3 * 1024 * 1024
VERSION: Final = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.2",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2025-11-11T19:00:00Z",
    "goVersion": "go1.24.9",
    "compiler": "gc",
    "platform": "linux/amd64",
}
_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]

Query = Mapping[str, str]


@dataclass
class Rights:
    """What the one account may do: everything but what is denied. resource: rayjobs, pods/log, rayjobs/status..."""

    user: str = "system:serviceaccount:thinwire:thinwire"
    denied: set[tuple[str, str]] = field(default_factory=set)

    def deny(self, verb: str, resource: str) -> None:
        """Take the right away; verb `*`: all of that resource."""
        self.denied.add((verb, resource))

    def allows(self, verb: str, resource: str) -> bool:
        return not self.denied & {(verb, resource), ("*", resource)}


@dataclass(frozen=True)
class Asked:
    """A request to a kind that is there."""

    request: Request
    kind: Kind
    query: Query

    @property
    def namespace(self) -> str | None:
        """None: of every namespace, or of none."""
        return self.request.namespace or None

    def matches(self, found: Object) -> bool:
        """Is the object in what its selectors select?"""
        return self.selected(found)

    @property
    def selected(self) -> selectors.Matches:
        """Raises Refused where a selector cannot be read."""
        by_label = selectors.labels(self.query.get("labelSelector", ""))
        by_field = selectors.fields(self.kind, self.query.get("fieldSelector", ""))
        return lambda found: by_label(found) and by_field(found)

    @property
    def since(self) -> int | None:
        """The resourceVersion of a list or watch; None: the newest. Raises Refused."""
        given = self.query.get("resourceVersion", "")
        if not given:
            return None
        if not given.isdecimal():
            raise answers.bad_request(f'resourceVersion: Invalid value: "{given}": strconv.ParseUint: invalid syntax')
        return int(given)


class Api:
    """One API server over a store. groups: which APIs beside the core are installed."""

    def __init__(self, store: Store, rights: Rights, groups: frozenset[str] = GROUPS) -> None:
        self.store, self.rights, self.groups = store, rights, groups
        self._pages: dict[str, tuple[list[Object], int]] = {}

    def asked(self, method: str, path: str, query: Query) -> Asked | None:
        """What a request asks for; None: nothing of a kind (discovery, reviews). Raises Refused with 404 and 405."""
        found = _NAMESPACE_PATH.fullmatch(path)
        if found is not None:
            kind: Kind | None = NAMESPACES
            namespace, name, sub = "", found["name"] or "", found["sub"] or ""
        elif found := _PATH.fullmatch(path):
            group = found["group"] or ""
            kind = self._kind(group, found["version"], found["plural"])
            namespace, name, sub = found["namespace"] or "", found["name"] or "", found["sub"] or ""
        else:
            return None
        if kind is None:
            return None
        if sub and not ((sub == "status" and kind.has_status) or (sub == "log" and kind is PODS)):
            raise answers.no_such_path()
        if kind.namespaced and name and not namespace:
            raise answers.no_such_path()
        verb = self._verb(method, bool(name), query)
        return Asked(Request(verb, kind.group, kind.plural, sub, namespace, name), kind, query)

    def other(self, method: str, path: str, body: bytes) -> tuple[int, Object]:
        """An answer to what asks for nothing of a kind. Raises Refused."""
        if path == _REVIEWS and method == "POST":
            return 201, self._review(_parsed(body))
        if method != "GET":
            raise answers.no_such_path()
        found = self._discovery().get(path.rstrip("/") or "/")
        if found is None:
            raise answers.no_such_path()
        return 200, found

    def answer(self, asked: Asked, content_type: str, body: bytes) -> tuple[int, Object | bytes]:
        """Do it: code and body; bytes are a log. A watch is another's. Raises Refused."""
        request, kind = asked.request, asked.kind
        self.check_right(request, kind)
        if asked.query.get("dryRun"):
            raise answers.bad_request("dryRun: this server for tests has none")
        if len(body) > _BODY_BYTES:
            message = f"Request entity too large: limit is {_BODY_BYTES}"
            raise answers.Refused(413, "RequestEntityTooLarge", message)
        if request.subresource == "log":
            return 200, self._log(asked)
        if request.verb == "get":
            return 200, self.store.get(kind, asked.namespace, request.name)
        if request.verb == "list":
            return 200, self._list(asked)
        if request.verb == "create":
            return 201, self.store.create(kind, asked.namespace, self._body(asked, body))
        if request.verb in ("update", "patch"):
            return 200, self._change(asked, content_type, body)
        wanted = self._deletion(asked.query, body)
        if request.verb == "delete":
            return 200, self._delete(kind, asked.namespace, request.name, wanted)
        return 200, self._delete_all(asked, wanted)

    def check_right(self, request: Request, kind: Kind) -> None:
        """Raises Refused with 403."""
        resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
        if self.rights.allows(request.verb, resource):
            return
        where = f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
        why = (
            f'User "{self.rights.user}" cannot {request.verb} resource "{resource}" in API group "{request.group}" '
            f"{where}"
        )
        raise answers.forbidden(kind, request.name, why)

    # verbs

    def _list(self, asked: Asked) -> Object:
        kind, query = asked.kind, asked.query
        matches = asked.selected
        limit = int(query.get("limit") or 0)
        if token := query.get("continue"):
            rest, version = self._page(token)
        else:
            self._check_version(asked)
            with self.store.changed:
                rest, version = self.store.all(kind, asked.namespace, matches), self.store.version
        items, rest = (rest[:limit], rest[limit:]) if limit else (rest, [])
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = self._keep_page(rest, version)
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                metadata["remainingItemCount"] = len(rest)
        if not kind.is_custom:  # lists of built-in kinds say the kind once
            items = [{key: value for key, value in one.items() if key not in ("apiVersion", "kind")} for one in items]
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": items}

    def _check_version(self, asked: Asked) -> None:
        since, newest = asked.since, self.store.version
        if since is not None and since > newest:
            raise answers.too_new(since, newest)
        if since and asked.query.get("resourceVersionMatch") == "Exact" and since != newest:
            self.store.since(since)
            raise answers.bad_request("resourceVersionMatch=Exact: this server for tests has the newest version only")

    def _keep_page(self, rest: list[Object], version: int) -> str:
        token = {"v": "meta.k8s.io/v1", "rv": version, "start": rest[0]["metadata"]["name"], "page": str(uuid.uuid4())}
        coded = base64.urlsafe_b64encode(json.dumps(token).encode()).decode().rstrip("=")
        self._pages[coded] = (rest, version)
        return coded

    def _page(self, token: str) -> tuple[list[Object], int]:
        kept = self._pages.get(token)
        if kept is None:
            raise answers.bad_request("continue key is not valid: it was not given out by this server")
        try:
            self.store.since(kept[1])
        except answers.Refused as gone:
            raise answers.page_too_old(token) from gone
        return kept

    def _body(self, asked: Asked, body: bytes) -> Object:
        """The object that is sent, where it is of this kind and place. Raises Refused with 400."""
        found, kind = _parsed(body), asked.kind
        if not isinstance(found.get("metadata", {}), dict):
            raise answers.bad_request("metadata is no object")
        sent = (found.get("apiVersion") or kind.api_version, found.get("kind") or kind.kind)
        if kind.is_custom and (found.get("apiVersion"), found.get("kind")) != (kind.api_version, kind.kind):
            sent = (str(found.get("apiVersion")), str(found.get("kind")))
        if sent != (kind.api_version, kind.kind):
            raise answers.bad_request(
                f"the API version and kind in the data ({sent[0]}, {sent[1]}) do not match the expected ones "
                f"({kind.api_version}, {kind.kind})"
            )
        if found.setdefault("metadata", {}).get("namespace", asked.request.namespace) != asked.request.namespace:
            raise answers.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        return found

    def _change(self, asked: Asked, content_type: str, body: bytes) -> Object:
        request, kind = asked.request, asked.kind
        if request.verb == "update":
            new = self._body(asked, body)
            if kind.is_custom and not new["metadata"].get("resourceVersion"):
                cause = answers.Cause(
                    "FieldValueInvalid",
                    "metadata.resourceVersion",
                    "Invalid value: 0: must be specified for an update",
                )
                raise answers.invalid(kind, request.name, [cause])
            return self.store.update(kind, asked.namespace, request.name, lambda old: new, request.subresource)
        patch = _parsed(body, of=(dict, list))
        return self.store.update(
            kind, asked.namespace, request.name, lambda old: patched(old, content_type, patch), request.subresource
        )

    def _delete(self, kind: Kind, namespace: str | None, name: str, wanted: Deletion) -> Object:
        old = self.store.get(kind, namespace, name)
        left = self.store.delete(kind, namespace, name, wanted)
        if left is not None:
            return left
        if kind is PODS:  # of a pod its last state is the answer
            return old
        details: Object = {"name": name, "kind": kind.plural, "uid": old["metadata"]["uid"]}
        if kind.group:
            details["group"] = kind.group
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _delete_all(self, asked: Asked, wanted: Deletion) -> Object:
        kind = asked.kind
        with self.store.changed:
            found = self.store.all(kind, asked.namespace, asked.selected)
            for one in found:
                if self.store.find(kind, one["metadata"].get("namespace"), one["metadata"]["name"]) is not None:
                    self.store.delete(kind, one["metadata"].get("namespace"), one["metadata"]["name"], wanted)
            metadata = {"resourceVersion": str(self.store.version)}
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": found}

    def _deletion(self, query: Query, body: bytes) -> Deletion:
        options = _parsed(body) if body else {}
        before = options.get("preconditions") or {}
        policy = options.get("propagationPolicy") or query.get("propagationPolicy") or "Background"
        if policy not in ("Background", "Foreground", "Orphan"):
            raise answers.bad_request(f'propagationPolicy: Unsupported value: "{policy}"')
        grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        return Deletion(policy, before.get("uid"), before.get("resourceVersion"), None if grace is None else int(grace))

    def _log(self, asked: Asked) -> bytes:
        request, query = asked.request, asked.query
        pod = self.store.get(PODS, asked.namespace, request.name)
        names = [one["name"] for one in pod["spec"]["containers"]]
        container = query.get("container") or (names[0] if len(names) == 1 else "")
        if not container:
            raise answers.bad_request(
                f"a container name must be specified for pod {request.name}, choose one of: [{' '.join(names)}]"
            )
        if container not in names:
            raise answers.bad_request(f"container {container} is not valid for pod {request.name}")
        if flag(query, "follow"):
            raise answers.bad_request("follow: this server for tests has none")
        states = {one["name"]: one.get("state") or {} for one in pod.get("status", {}).get("containerStatuses", ())}
        state = states.get(container, {"waiting": {"reason": "ContainerCreating"}})
        if "waiting" in state:
            why = state["waiting"]["reason"]
            pulls = why in ("ErrImagePull", "ImagePullBackOff")
            words = "trying and failing to pull image" if pulls else why
            raise answers.bad_request(f'container "{container}" in pod "{request.name}" is waiting to start: {words}')
        text = self.store.logs.get((request.namespace, request.name, container), b"")
        if tail := query.get("tailLines"):
            lines = text.splitlines(keepends=True)
            text = b"".join(lines[len(lines) - min(int(tail), len(lines)) :])
        return text[: int(query["limitBytes"])] if query.get("limitBytes") else text

    # what is there

    def _kind(self, group: str, version: str, plural: str) -> Kind | None:
        for kind in KINDS:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return kind if not group or group in self.groups else None
        return None

    def _verb(self, method: str, has_name: bool, query: Query) -> str:
        if method == "GET":
            if flag(query, "watch"):
                return "watch"
            return "get" if has_name else "list"
        verbs = {("POST", False): "create", ("PUT", True): "update", ("PATCH", True): "patch"}
        verbs |= {("DELETE", True): "delete", ("DELETE", False): "deletecollection"}
        verb = verbs.get((method, has_name))
        if verb is None:
            raise answers.not_allowed()
        return verb

    def _review(self, body: Object) -> Object:
        wanted = (body.get("spec") or {}).get("resourceAttributes") or {}
        resource = wanted.get("resource", "")
        if wanted.get("subresource"):
            resource += f"/{wanted['subresource']}"
        allowed = self.rights.allows(wanted.get("verb", ""), resource)
        answer = copy.deepcopy(body)
        answer |= {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer["status"] = {"allowed": allowed, **({"reason": "RBAC: allowed by RoleBinding"} if allowed else {})}
        return answer

    def _discovery(self) -> dict[str, Object]:
        found: dict[str, Object] = {
            "/version": dict(VERSION),
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": self._resources("", "v1"),
        }
        groups = []
        for group in sorted(self.groups):
            version = next(kind.version for kind in KINDS if kind.group == group)
            named = {"groupVersion": f"{group}/{version}", "version": version}
            about = {"name": group, "versions": [named], "preferredVersion": named}
            groups.append(about)
            found[f"/apis/{group}"] = {"kind": "APIGroup", "apiVersion": "v1"} | about
            found[f"/apis/{group}/{version}"] = self._resources(group, version)
        found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        return found

    def _resources(self, group: str, version: str) -> Object:
        rows: list[Object] = []
        for kind in KINDS:
            if kind.group == group:
                row = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced}
                rows.append(row | {"kind": kind.kind, "verbs": _VERBS})
                if kind.has_status:
                    rows.append(row | {"name": f"{kind.plural}/status", "verbs": ["get", "patch", "update"]})
        named = f"{group}/{version}" if group else version
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": named, "resources": rows}


def flag(query: Query, name: str) -> bool:
    """A parameter that is on or off: the Python client writes `True`, and Kubernetes takes all but `false` and `0`."""
    return query.get(name, "false").lower() not in ("false", "0")


def _parsed(body: bytes, of: Any = dict) -> Any:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise answers.bad_request(f"the object provided is unrecognized (must be of type JSON): {error}") from error
    if not isinstance(found, of):
        raise answers.bad_request(f"the object provided is unrecognized: {type(found).__name__}")
    return found
