"""A service in a pod does not run jobs beside itself, unless it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.service.config import Settings
from thinwire.service.launch.kuberay.by_project import ByProject
from thinwire.service.server import ServeRefused, make_launcher


@pytest.mark.parametrize(
    ("named", "shared", "refused"),
    [(None, False, True), ("control", False, True), ("jobs", False, False), (None, True, False)],
)
def test_the_namespace_of_its_own_pod_is_refused_unless_asked_for(
    named: str | None, shared: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "namespace").write_text("control\n")
    monkeypatch.setattr("thinwire.service.launch.kuberay.kube._NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    settings = Settings(
        home=tmp_path,
        launcher="kuberay",
        public_url="http://a:1",
        kuberay_namespace=named,
        kuberay_shared_namespace=shared,
    )
    if refused:
        with pytest.raises(ServeRefused, match=r"own pod is in control: .*THINWIRE_KUBERAY_SHARED_NAMESPACE=true"):
            make_launcher(settings)
    else:
        assert make_launcher(settings).name == "kuberay"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")  # outside of a pod kubectl's context says where
    assert make_launcher(settings).name == "kuberay"


def test_projects_have_namespaces_and_none_has_that_of_the_services_own_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "namespace").write_text("control\n")
    monkeypatch.setattr("thinwire.service.launch.kuberay.kube._NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(
        "THINWIRE_KUBERAY_NAMESPACES", '{"vision": "ml", "text": "ml", "old": "jobs"}'
    )  # as the chart does
    settings = Settings(home=tmp_path, launcher="kuberay", public_url="http://a:1", kuberay_namespace="jobs")
    launcher = make_launcher(settings)
    assert isinstance(launcher, ByProject)
    assert [one._namespace for one in launcher._all] == ["jobs", "ml"]
    wrong = settings.model_copy(update={"kuberay_namespaces": {"vision": "control"}})
    with pytest.raises(ServeRefused, match=r"the project vision the namespace of the service's own pod, control"):
        make_launcher(wrong)
    assert make_launcher(wrong.model_copy(update={"kuberay_shared_namespace": True})).name == "kuberay"
