"""The few calls of the Kubernetes API that the launcher makes, with time-outs and one kind of error.

The official client does the talking: configuration of a pod or of kubectl, tokens that are renewed, TLS. It retries
nothing here: the reconciler does, and it must know what has been answered.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import kubernetes.client
import kubernetes.config
import kubernetes.watch
import urllib3
import yaml
from kubernetes.client.rest import ApiException

from thinwire.service.launch.kuberay.pods import Object
from thinwire.service.launch.protocol import LauncherError

logger = logging.getLogger(__name__)

CONNECT_S, ANSWER_S = 5.0, 15.0
WATCH_S: Final = 60
"""The API server ends a watch after so long; the next goes on where it ended."""
WATCH_SILENT_S: Final = WATCH_S + 30.0
"""A watch that neither says something nor ends for so long has lost its server."""
PAGE: Final = 500
"""Objects in an answer to a list."""
KUEUE_VERSIONS: Final = ("v1beta2", "v1beta1")
NEEDED: Final = (
    ("ray.io", "rayjobs", ("get", "list", "watch", "create", "delete")),
    ("ray.io", "rayclusters", ("get", "list", "watch", "patch")),
    ("", "pods", ("list",)),
    ("", "events", ("list",)),
)
"""Group, resource and verbs that the launcher cannot do without, as deploy/chart gives them."""
POLICIES: Final = ("networking.k8s.io", "networkpolicies", ("create",))
"""The same, where it keeps jobs apart."""


_UNREADABLE: Final = (kubernetes.config.ConfigException, OSError, yaml.YAMLError, TypeError, AttributeError, ValueError)
"""What the client raises of a kubeconfig that is none: of its form it asks nothing."""
_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FILE: Final = "the file that KUBECONFIG names, by default ~/.kube/config, is no kubeconfig"


_WRONG_NAME: Final = frozenset({62, 64})
_NOT_NOW: Final = frozenset({9, 10})
"""Codes of OpenSSL (X509_V_ERR_...): of another host or address; not yet or no longer valid. Others: of another CA."""
_OTHER_CA: Final = (
    "give it the CA that has signed that certificate: in a pod Kubernetes does so (kube-root-ca.crt, mounted as "
    "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt), elsewhere certificate-authority of the cluster in the "
    "kubeconfig"
)
_OTHER_NAME: Final = (
    "name the API server in the kubeconfig as its certificate does, or add tls-server-name to the cluster there"
)
_OTHER_TIME: Final = "renew the certificate, or set the clock of this machine"


class KubeError(LauncherError):
    """The API server refused, or did not answer.

    status: of HTTP; None without an answer. reason: as Kubernetes names it; "" where it does not.
    """

    def __init__(self, message: str, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Expired(KubeError):
    """What a list or a watch was to go on from is gone (410): list again."""


class Kube:
    """A client of one API server and one namespace. Threads may share it, but for a watch, which has one of its own."""

    def __init__(self, configuration: kubernetes.client.Configuration, namespace: str) -> None:
        configuration.retries = urllib3.Retry(0)
        self.url, self.namespace = configuration.host, namespace
        self._api = kubernetes.client.ApiClient(configuration)
        self._custom = kubernetes.client.CustomObjectsApi(self._api)
        self._core = kubernetes.client.CoreV1Api(self._api)
        self._watches: set[kubernetes.watch.Watch] = set()
        self._authorization = kubernetes.client.AuthorizationV1Api(self._api)

    def close(self) -> None:
        """Drop the connections; a watch that is under way ends."""
        for watch in tuple(self._watches):
            watch.stop()
        self._api.close()

    # what there is

    def missing(self, *further: tuple[str, str, Sequence[str]]) -> str | None:
        """What keeps the launcher from working here, in a sentence: no KubeRay, or rights that are not given.

        further: beside NEEDED.
        Raises: KubeError where that cannot be found out.
        """
        try:
            self._call("list RayJobs", self._custom.list_namespaced_custom_object, *_ray("rayjobs", self), limit=1)
        except KubeError as error:
            if error.status == 404:
                return f"the API server {self.url} knows no rayjobs.ray.io/v1: install KubeRay 1.7"
            if error.status not in (401, 403):
                raise
        if lacking := [
            words for group, resource, verbs in (*NEEDED, *further) for words in self._lacks(group, resource, verbs)
        ]:
            return (
                f"the service's account may not {', '.join(lacking)} in namespace {self.namespace!r}: give it the Role "
                "of deploy/chart/templates/rbac.yaml there"
            )
        return None

    def _lacks(self, group: str, resource: str, verbs: Sequence[str]) -> Iterator[str]:
        for verb in verbs:
            attributes = {"namespace": self.namespace, "group": group, "resource": resource, "verb": verb}
            body = {"spec": {"resourceAttributes": attributes}}
            answer = self._call("ask for its own rights", self._authorization.create_self_subject_access_review, body)
            if not answer.status.allowed:
                yield f"{verb} {resource}{'.' + group if group else ''}"

    def all(self, plural: str, selector: str) -> tuple[list[Object], str]:
        """All of them with these labels, and the version that they are of. Raises KubeError, Expired."""
        ask = self._custom.list_namespaced_custom_object
        return self._list(f"list {plural}", ask, *_ray(plural, self), label_selector=selector)

    def watch(self, plural: str, selector: str, version: str) -> Iterator[tuple[str, Object]]:
        """What has changed since this version: ADDED, MODIFIED, DELETED, BOOKMARK, each with the object. It ends by
        itself after WATCH_S. Raises: KubeError, Expired.
        """
        watch = kubernetes.watch.Watch()
        stream = watch.stream(
            self._custom.list_namespaced_custom_object,
            *_ray(plural, self),
            label_selector=selector,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CONNECT_S, WATCH_SILENT_S),
        )
        self._watches.add(watch)
        try:
            for event in stream:
                if event is not None:  # None: a line that broke off
                    yield event["type"], event["raw_object"]
        except Exception as error:
            raise _as_ours(error, f"watch {plural}", self.url) from error
        finally:
            self._watches.discard(watch)

    def get(self, plural: str, name: str) -> Object | None:
        """The object; None where it is not there. Raises KubeError."""
        try:
            found: Object = self._call(
                f"get {plural}/{name}", self._custom.get_namespaced_custom_object, *_ray(plural, self), name
            )
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return found

    def create(self, plural: str, body: Object) -> None:
        """Make it. One of this name that is there already is a success. Raises KubeError."""
        name, (group, _, version) = body["metadata"]["name"], body["apiVersion"].partition("/")
        where = group, version, self.namespace, plural
        try:
            self._call(f"create {plural}/{name}", self._custom.create_namespaced_custom_object, *where, body)
        except KubeError as error:
            # A conflict is a 409 as well: a quota that counts RayJobs was changed meanwhile, and nothing was made.
            if error.reason != "AlreadyExists":
                raise

    def delete(self, plural: str, name: str, uid: str | None = None) -> None:
        """Delete it, with what it owns. One that is not there, or of another uid, is a success. Raises KubeError."""
        body = kubernetes.client.V1DeleteOptions(propagation_policy="Background")
        if uid is not None:
            body.preconditions = kubernetes.client.V1Preconditions(uid=uid)
        try:
            self._call(
                f"delete {plural}/{name}",
                self._custom.delete_namespaced_custom_object,
                *_ray(plural, self),
                name,
                body=body,
            )
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def patch(self, plural: str, name: str, patch: Sequence[Object]) -> bool:
        """Change it by a JSON patch. False where it is not there any more, or not as a `test` of the patch says.

        Raises: KubeError.
        """
        try:
            self._call(
                f"patch {plural}/{name}",
                self._custom.patch_namespaced_custom_object,
                *_ray(plural, self),
                name,
                list(patch),
                _content_type="application/json-patch+json",  # or the client says that it is a merge patch
            )
        except KubeError as error:
            if error.status == 404 or (error.status in (409, 422) and _has_tests(patch)):
                return False
            raise
        return True

    def pods(self, selector: str) -> list[Object]:
        """Pods with these labels. Raises KubeError."""
        return self._list("list pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector)[0]

    def warnings(self) -> list[Object]:
        """The Warning events of the namespace. Raises KubeError."""
        ask = self._core.list_namespaced_event
        return self._list("list events", ask, self.namespace, field_selector="type=Warning")[0]

    def workloads(self) -> list[Object]:
        """Kueue's view of the namespace's jobs; none without Kueue, or without the right to ask. Raises KubeError."""
        ask = self._custom.list_namespaced_custom_object
        for version in KUEUE_VERSIONS:
            try:
                return self._list("list workloads", ask, "kueue.x-k8s.io", version, self.namespace, "workloads")[0]
            except KubeError as error:
                if error.status not in (403, 404):
                    raise
        return []

    def log(self, pod: str, container: str, most_bytes: int) -> str:
        """The beginning of what a container has printed. Raises KubeError."""
        answer = self._call(
            f"read the log of pod {pod}",
            self._core.read_namespaced_pod_log,
            pod,
            self.namespace,
            container=container,
            limit_bytes=most_bytes,
            _preload_content=False,
        )
        text: bytes = answer.data
        return text.decode("utf-8", "replace")

    def _list(self, what: str, ask: Any, *arguments: Any, **how: Any) -> tuple[list[Object], str]:
        """All pages of a list, as the server wrote them, and their version. Of built-in kinds three fields are wanted,
        of hundreds.
        """
        found: list[Object] = []
        further: Object = {"limit": PAGE}
        while True:
            try:
                answer = self._call(what, ask, *arguments, _preload_content=False, **how, **further)
            except Expired:
                if "_continue" not in further:
                    raise
                found, further = [], {}  # the server has forgotten the rest of its pages: all in one
                continue
            page = json.loads(answer.data)
            found += page["items"]
            if not (token := page["metadata"].get("continue")):
                return found, page["metadata"]["resourceVersion"]
            further = {"limit": PAGE, "_continue": token}

    def _call(self, what: str, ask: Any, *arguments: Any, **how: Any) -> Any:
        try:
            return ask(*arguments, _request_timeout=(CONNECT_S, ANSWER_S), **how)
        except Exception as error:
            raise _as_ours(error, what, self.url) from error


class _Configuration(kubernetes.client.Configuration):  # type: ignore[misc]  # it has no types
    """Of the client's. A file with a token may end its line, and no header can have that."""

    def get_api_key_with_prefix(self, identifier: str, alias: str | None = None) -> str | None:
        found: str | None = super().get_api_key_with_prefix(identifier, alias)
        return None if found is None else found.strip()


def own_namespace() -> str | None:
    """Of the pod that this runs in; None outside of one."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    try:
        return _NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:  # without an account there is no way to the API either: `connect` says so
        return None


def connect(namespace: str | None) -> Kube:
    """With the account of the pod that this runs in, else as kubectl would. namespace: None, of pod or context.

    Raises: LauncherError where there is neither.
    """
    configuration = _Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
            own = _NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            kubernetes.config.load_kube_config(client_configuration=configuration)
            own = kubernetes.config.list_kube_config_contexts()[1]["context"].get("namespace") or "default"
    except _UNREADABLE as error:
        words = (
            error
            if isinstance(error, (kubernetes.config.ConfigException, OSError))
            else f"{_FILE}: {' '.join(str(error).split())}"
        )
        raise LauncherError(
            f"no way to the Kubernetes API: {words}. In a pod give it a service account with a token; elsewhere set "
            "KUBECONFIG to the file that kubectl uses"
        ) from error
    return Kube(configuration, namespace or own)


def _has_tests(patch: Sequence[Object]) -> bool:
    return any(one["op"] == "test" for one in patch)


def _ray(plural: str, kube: Kube) -> tuple[str, str, str, str]:
    return "ray.io", "v1", kube.namespace, plural


def _as_ours(error: Exception, what: str, url: str) -> Exception:
    """What the client raised, as an error of ours; what is none of its own stays as it is."""
    if isinstance(error, ApiException):
        message, reason = _said(error)
        kind = Expired if error.status == 410 else KubeError
        return kind(f"the Kubernetes API at {url} did not {what} ({error.status}: {message})", error.status, reason)
    if (why := _no_tls(getattr(error, "reason", None))) is not None:
        return KubeError(f"no TLS with the Kubernetes API at {url}, asked to {what}: {why}")
    if isinstance(error, (urllib3.exceptions.HTTPError, OSError)):
        words = str(getattr(error, "reason", None) or error) or type(error).__name__
        return KubeError(f"the Kubernetes API at {url} does not answer, asked to {what} ({words[:300]})")
    return error


def _no_tls(error: object) -> str | None:
    """What is wrong with certificates, and what to do; None where this is no error of TLS."""
    if not isinstance(error, urllib3.exceptions.SSLError):
        return None
    cause = error.args[0] if error.args else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        code = cause.verify_code
        do = _OTHER_NAME if code in _WRONG_NAME else _OTHER_TIME if code in _NOT_NOW else _OTHER_CA
        return f"its certificate is not trusted ({cause.verify_message}); {do}"
    if getattr(cause, "reason", None) == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS there; is the port right, or http:// meant?"
    if isinstance(cause, FileNotFoundError) or getattr(cause, "library", None) == "X509":
        return f"the file with its CA cannot be read ({cause}); {_OTHER_CA}"
    return str(cause)[:300]


def _said(error: ApiException) -> tuple[str, str]:
    """Message and reason of the Status that the server sent; else the beginning of what it did send, and no reason."""
    try:
        status = json.loads(error.body)
        message, reason = status["message"], status.get("reason", "")
    except (TypeError, ValueError, KeyError):
        message, reason = error.reason or error.body or "without a word", ""
    return str(message)[:1000], str(reason)
