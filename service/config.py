"""Where the service keeps its state and how it listens: Settings, read once from the environment and the command line.

Every field can be set by an environment variable with the prefix THINWIRE_, for instance THINWIRE_HOME.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from thinwire.contract.files import data_folder
from thinwire.contract.logs import LogFormat
from thinwire.contract.packages import MOST_BYTES
from thinwire.contract.people import OfProject, Role
from thinwire.contract.reports import LEASE_S

IPNetwork = IPv4Network | IPv6Network


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_private(url: str) -> bool:
    """Can nobody on the way read along? With https, or with http on this machine."""
    parts = urlsplit(url)
    return parts.hostname is not None and (
        parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    )


class Settings(BaseSettings):
    """Settings of one service process. Frozen; an unknown argument is refused."""

    model_config = SettingsConfigDict(env_prefix="THINWIRE_", frozen=True, extra="forbid", env_ignore_empty=True)

    home: Path = Field(default_factory=data_folder, description="token, server.json, thinwire.db, runs/")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="0: a free port, written to server.json")
    operator_token_from: str | None = Field(
        None,
        description="where the operator's token comes from, if it is put into home at each start; it is changed there",
    )
    launcher: Literal["local", "ray", "kuberay", "fake"] = "local"
    ray_address: str | None = Field(None, description="launcher ray: the cluster's dashboard, http://head:8265")
    ray_token_file: Path | None = Field(None, description="launcher ray: the file that holds the cluster's token")
    ray_autoscales: bool = Field(
        False, description="launcher ray: the cluster adds machines when jobs wait for them, so none waits in a queue"
    )
    kuberay_namespace: str | None = Field(
        None, description="launcher kuberay: of the RayJobs; default: the service's own, or kubectl's"
    )
    kuberay_namespaces: dict[str, str] = Field(
        {},
        description="launcher kuberay: of the RayJobs of projects, as a JSON object from project to namespace; all "
        "others are in kuberay_namespace",
    )
    kuberay_shared_namespace: bool = Field(
        False,
        description="launcher kuberay: the RayJobs may be in the namespace of the service's own pod, whose pods the "
        "autoscaler of each job can change",
    )
    kuberay_template: Path | None = Field(
        None, description="launcher kuberay: a file with a RayJob; default: the service's own template"
    )
    kuberay_image: str | None = Field(
        None, description="launcher kuberay: of head and workers; default: those of the template"
    )
    kuberay_pods: Path | None = Field(
        None,
        description="launcher kuberay: a file with what is added to the pods of jobs, such as volumes and variables",
    )
    kuberay_jobs_apart: bool = Field(
        False, description="launcher kuberay: each job has a NetworkPolicy, so that no other job's pods reach its own"
    )
    shared_folders: tuple[Path, ...] = Field(
        (), description="launchers ray and kuberay: folders that all machines of the cluster share, as a JSON list"
    )
    public_url: str | None = Field(None, description="the service as workers reach it; default: where it listens")
    peer_host: str | None = Field(
        None,
        pattern=r"^[0-9A-Za-z._:-]+$",
        description="name or address at which other services with the same database reach this one, which then hand on "
        "to it what they cannot answer; default: that of public_url, with its port",
    )
    tls_certificate: Path | None = Field(
        None, description="the service speaks TLS, with this certificate and those that lead to its CA, as PEM"
    )
    tls_key: Path | None = Field(None, description="the key of tls_certificate, as PEM")
    tls_ca: Path | None = Field(
        None,
        description="the CA of the certificate, as PEM, for jobs and for the command line; default: those that every "
        "machine trusts",
    )
    log_format: LogFormat = Field(
        "text", description="of the service's log and those of its jobs: json is one object a line, for programs"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="a collector of OpenTelemetry over HTTP, http://host:4318: traces from submissions to first steps",
    )
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in home")
    owner_lease_s: float = Field(
        10.0,
        ge=1.0,
        le=3600.0,
        description="a service that is silent for so long loses its database to one that stands by",
    )
    reconcile_interval_s: float = Field(1.0, gt=0.0, le=300.0)
    keep_jobs: int | None = Field(None, ge=0, description="jobs that are over and kept; older ones are deleted")
    keep_days: float | None = Field(None, gt=0.0, description="jobs that have been over for longer are deleted")
    audit_days: float = Field(
        90.0, gt=0.0, description="lines of the audit, and tokens that are over, are kept so long"
    )
    packages_folder: Path | None = Field(
        None, description="where packages are kept; default: packages in home. Services on several hosts need one place"
    )
    package_max_bytes: int = Field(
        MOST_BYTES, ge=1, le=MOST_BYTES, description="of one package; Ray takes no larger one than 100 MiB"
    )
    packages_max_bytes: int = Field(10 << 30, ge=1, description="of all packages together")
    package_keep_days: float = Field(1.0, gt=0.0, description="a package that no job names is removed after so long")
    packages_person_max_bytes: int = Field(2 << 30, ge=1, description="of the packages that one person has sent")
    job_max_bytes: int = Field(
        1 << 30, ge=1, description="of one job: its samples, events and log that are kept here; then no more of them is"
    )
    person_max_bytes: int = Field(20 << 30, ge=1, description="the same of all jobs of one person")
    person_max_jobs: int = Field(1000, ge=1, description="jobs of one person that are not over")
    changes_burst: int = Field(300, ge=1, description="requests of one person that may change something, at once")
    changes_per_s: float = Field(5.0, gt=0.0, description="and in the long run")
    job_grace_s: float = Field(
        300.0, ge=0.0, description="after its end a job may say its last words for so long; then its token is refused"
    )
    large_answers: int = Field(8, ge=1, description="answers of up to some MiB that are made and sent at once")
    large_answers_of_one: int = Field(2, ge=1, description="the same to one person or job")
    streams: int = Field(1000, ge=1, description="streams of events and logs that are read at once")
    streams_of_one: int = Field(50, ge=1, description="the same by one person")
    scrape_networks: tuple[IPNetwork, ...] = Field(
        (), description="networks whose addresses jobs may register for Prometheus, beside the sender's own"
    )
    session_hours: float = Field(
        12.0, gt=0.0, le=8760.0, description="who has signed in to the page is signed in for so long"
    )
    grafana_url: str | None = Field(
        None, description="a Grafana with the service's dashboards, which the page links to"
    )
    oidc_issuer: str | None = Field(
        None, max_length=500, description="of OpenID Connect, as it calls itself: whose tokens and sign-on are taken"
    )
    oidc_client_id: str | None = Field(None, min_length=1, description="of the page at the issuer")
    oidc_client_secret_file: Path | None = Field(None, description="its secret; none: it is a public client")
    oidc_cli_client_id: str | None = Field(
        None, description="of `thinwire login` at the issuer, a public client; default: that of the page if it is one"
    )
    oidc_audience: str | None = Field(
        None, min_length=1, description="of access tokens for the service as an API; default: ID tokens alone"
    )
    oidc_scopes: str = Field("openid profile email", pattern=r"^openid( [\x21\x23-\x5b\x5d-\x7e]+)*$")
    oidc_name_claim: str = Field("preferred_username", min_length=1, description="what people are called by")
    oidc_groups_claim: str = Field("groups", min_length=1, description="a list or a text; a path as realm_access.roles")
    oidc_roles: dict[str, Role] = Field(
        {}, description='what groups may do, as JSON: {"ml": "user"}; who is in none of them may nothing'
    )
    oidc_projects: dict[str, OfProject] = Field(
        {},
        description='whose jobs groups see and change, as JSON: {"vision-team": "vision"}; the first that somebody is '
        "in; default: the project default, for operators all",
    )
    oidc_name: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$",
        description="behind the @ of people's names; default: the issuer's host",
    )
    oidc_page_url: str | None = Field(
        None,
        description="the page as browsers reach it, with the path that a proxy puts before it; default: public_url",
    )
    oidc_ca: Path | None = Field(None, description="the CA of the issuer's certificate; default: those of the machine")
    oidc_leeway_s: float = Field(30.0, ge=0.0, le=300.0, description="by which the issuer's clock may differ")
    oidc_session_hours: float = Field(
        8.0, gt=0.0, le=8760.0, description="who has signed on by the issuer is signed in to the page for so long"
    )
    oidc_sign_out: bool = Field(False, description="who signs out of the page is signed out at the issuer, too")
    trusted_proxies: tuple[IPNetwork, ...] = Field(
        (), description="networks of proxies that say by X-Forwarded-For who asks, and from which nobody else can ask"
    )
    worker_lease_s: float = Field(LEASE_S, gt=0.0, description="a silent worker stops being a scrape target after it")

    @field_validator(
        *("home", "packages_folder", "ray_token_file", "kuberay_template", "kuberay_pods"),
        *("tls_certificate", "tls_key", "tls_ca", "oidc_client_secret_file", "oidc_ca"),
    )
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path and path.expanduser().absolute()

    @field_validator("peer_host")
    @classmethod
    def _of_one_machine(cls, host: str | None) -> str | None:
        if host is not None and ":" in host:
            try:
                IPv6Address(host)
            except ValueError as error:
                raise ValueError("must be a name or an address, without a port: the service's own is meant") from error
        return host

    @field_validator("database_url")
    @classmethod
    def _of_a_secret(cls, url: str | None) -> str | None:
        """As Secrets hold it: with a last newline, with libpq's names of the scheme, which name no driver."""
        if url is None:
            return None
        if not (bare := url.strip()):
            raise ValueError("is blank: name a database, or leave it out for SQLite in the home")
        return re.sub(r"\Apostgres(ql)?://", "postgresql+psycopg://", bare)

    @field_validator("ray_address", "public_url", "otlp_endpoint", "grafana_url", "oidc_page_url")
    @classmethod
    def _http(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://a")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError("must be an address such as http://head:8265, without user or query")
        return url and url.rstrip("/")

    @field_validator("trusted_proxies")
    @classmethod
    def _not_everybody(cls, networks: tuple[IPNetwork, ...]) -> tuple[IPNetwork, ...]:
        for network in networks:
            if network.prefixlen == 0:
                raise ValueError(
                    f"{network} is everybody, who could then say to be anybody: name your proxies' networks"
                )
        return networks

    @field_validator("shared_folders")
    @classmethod
    def _absolute_folders(cls, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        for folder in folders:
            if not folder.is_absolute() or folder == Path("/"):
                raise ValueError(f"{folder} must be an absolute folder, and not the root")
        return folders

    @model_validator(mode="after")
    def _cluster_is_reachable(self) -> Settings:
        if self.launcher == "ray" and self.ray_address is None:
            raise ValueError(
                "launcher = ray needs THINWIRE_RAY_ADDRESS, the dashboard of the cluster such as http://head:8265; "
                "`thinwire up --head` starts a cluster and prints it"
            )
        if self.launcher in ("ray", "kuberay") and self.public_url is None:
            raise ValueError(
                f"launcher = {self.launcher} needs THINWIRE_PUBLIC_URL: the service as the machines of the cluster "
                "reach it, such as http://10.0.0.5:8400 (and --host and --port to listen there)"
            )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "THINWIRE_TLS_KEY" if self.tls_key is None else "THINWIRE_TLS_CERTIFICATE"
            raise ValueError(f"{missing} is missing: TLS takes a certificate and its key")
        if self.tls_certificate is not None and (self.public_url or "https:").startswith("http:"):
            raise ValueError(
                f"THINWIRE_PUBLIC_URL is {self.public_url}, and the service speaks TLS: jobs would send their tokens "
                "in clear to a port that does not take them; begin it with https://"
            )
        return self

    @model_validator(mode="after")
    def _sign_on_is_whole(self) -> Settings:
        if self.oidc_issuer is None:
            if named := sorted(name for name in self.model_fields_set if name.startswith("oidc_")):
                raise ValueError(f"THINWIRE_{named[0].upper()} is set, and THINWIRE_OIDC_ISSUER is not")
            return self
        parts = urlsplit(self.oidc_issuer)
        if not is_private(self.oidc_issuer) or parts.query or parts.fragment or parts.username:
            raise ValueError(
                f"THINWIRE_OIDC_ISSUER is {self.oidc_issuer}: it must be an address with https (or http on loopback), "
                "without user, query or fragment"
            )
        if self.oidc_client_id is None and self.oidc_audience is None:
            raise ValueError("THINWIRE_OIDC_CLIENT_ID is missing: what this service is called at the issuer")
        return self

    @property
    def issuer_label(self) -> str:
        """What stands behind the @ in the name of somebody whom the issuer knows by a plain name."""
        return self.oidc_name or urlsplit(self.oidc_issuer or "").hostname or ""

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in use."""
        return self.database_url or f"sqlite:///{self.home / 'thinwire.db'}"

    @property
    def runs(self) -> Path:
        """The folder of the jobs' run folders."""
        return self.home / "runs"

    @property
    def packages(self) -> Path:
        """The folder of the packages of scripts."""
        return self.packages_folder or self.home / "packages"

    @property
    def token_file(self) -> Path:
        """The operator's token, mode 0600."""
        return self.home / "token"

    @property
    def server_file(self) -> Path:
        """Where the running server says its url and pid."""
        return self.home / "server.json"
