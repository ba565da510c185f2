"""Who may use a service, and who has changed what: people's tokens and the audit, as the REST API shows them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from thinwire.contract.projects import DEFAULT, EVERY, ProjectName

OPERATOR: Final = "operator"
"""The name that goes with the token in the service's home; no other token may be called so."""
LONGEST_DAYS: Final = 3650.0
SOON_S: Final = 7 * 86_400.0
"""A token that ends within so long says so in each answer."""
EXPIRES_HEADER: Final = "Thinwire-Token-Expires"
"""Of an answer: when the token ends that was sent, where that is soon; ISO 8601, in UTC."""


class Role(StrEnum):
    """What a person may do. Each may do what those before it may."""

    VIEWER = "viewer"
    """reads"""
    USER = "user"
    """does everything to jobs"""
    OPERATOR = "operator"
    """hands out tokens and reads the audit"""

    def allows(self, needed: Role) -> bool:
        """May it do what takes `needed`?"""
        order = list(Role)
        return order.index(self) >= order.index(needed)


OfProject = ProjectName | Annotated[Literal["*"], WithJsonSchema({"type": "string", "enum": [EVERY]})]
"""A project, or all of them."""
TOKEN_NAME: Final = r"^[a-z0-9][a-z0-9._-]{0,62}$"
TokenName = Annotated[str, Field(pattern=TOKEN_NAME, description="whose it is, in lower case")]


_PART = r"[a-z0-9][a-z0-9._-]*"
PersonName = Annotated[
    str,
    Field(
        max_length=63,
        pattern=rf"^{_PART}(@{_PART})?$",
        description="the name of a token, or with an @ of somebody whom an issuer knows",
    ),
]
IssuerName = Annotated[
    str, Field(max_length=63, pattern=rf"^{_PART}@{_PART}$", description="somebody whom an issuer knows")
]


class NewToken(BaseModel):
    """POST /v1/tokens: a token for a person or a program."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: TokenName
    role: Annotated[Role, Field(strict=False)] = Role.USER
    days: float | None = Field(
        None, gt=0.0, le=LONGEST_DAYS, allow_inf_nan=False, description="it expires after so long; null: never"
    )
    project: OfProject | None = Field(
        None,
        description=f"whose jobs it sees and changes; {EVERY}: those of all. null: the project of who asks; if that is "
        f"all of them, {EVERY} for an operator and {DEFAULT} for others",
    )


class TokenChange(BaseModel):
    """PATCH /v1/tokens/{name}: what it is for from now on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    project: OfProject


class TokenItem(BaseModel):
    """A token as a list shows it: all but the token."""

    name: str
    role: Role
    project: str = Field(DEFAULT, description=f"whose jobs it sees and changes; {EVERY}: those of all")
    created_at: datetime
    created_by: str
    last_used_at: datetime | None = Field(None, description="to about ten minutes; null: never so far")
    expires_at: datetime | None = Field(None, description="null: never")
    revoked_at: datetime | None = None
    valid: bool = Field(description="neither revoked nor expired")


class MadeToken(TokenItem):
    """A token that has just been made. Its text is shown this once: the service keeps its SHA-256 alone."""

    token: str


class TokenList(BaseModel):
    """GET /v1/tokens, by name; of one name the newest first."""

    tokens: list[TokenItem]
    next: str | None = Field(
        None, description="ask again with after=<this> for those that follow; null: there are none"
    )


class SignOn(BaseModel):
    """GET /v1/sign-on: which issuer people may sign on with, and what a program of theirs needs to do so."""

    issuer: str | None = Field(None, description="of OpenID Connect; null: only tokens of this service are taken")
    name: str | None = Field(None, description="what it is called here")
    client_id: str | None = Field(
        None, description="of programs on people's own machines; null: there is none for them"
    )
    scopes: str | None = Field(None, description="to ask for")
    authorization_endpoint: str | None = Field(None, description="of the issuer; null: it has not answered yet")
    token_endpoint: str | None = None
    device_authorization_endpoint: str | None = Field(None, description="null: it gives devices no codes (RFC 8628)")
    revocation_endpoint: str | None = Field(None, description="where a refresh token is given back (RFC 7009)")
    page_url: str | None = Field(None, description="where people's browsers find the page")
    trouble: bool = Field(False, description="the issuer did not answer the last time it was asked")


class IssuerPerson(BaseModel):
    """Somebody who has come by the issuer, or who was blocked before they did."""

    name: str
    issuer: str
    subject: str | None = Field(None, description="who they are to the issuer; null: nobody has come with this name")
    role: Role | None = Field(None, description="when they came last")
    first_at: datetime = Field(description="when they came first, or were blocked")
    last_at: datetime | None = Field(None, description="to about ten minutes")
    blocked_at: datetime | None = None
    blocked_by: str | None = None


class IssuerPersonList(BaseModel):
    """GET /v1/people, by name."""

    people: list[IssuerPerson]
    next: str | None = Field(
        None, description="ask again with after=<this> for those that follow; null: there are none"
    )


class SignedIn(BaseModel):
    """GET /v1/session: who asks, and what the page shows around their jobs."""

    name: str
    role: Role
    project: str = Field(DEFAULT, description=f"whose jobs are seen and changed; {EVERY}: those of all")
    projects: list[str] = Field(
        [], description="of which one may be named instead, by `project` or Thinwire-Project, in order of name"
    )
    expires_at: datetime | None = Field(None, description="of the session; null: the request came with a token")
    token_expires_at: datetime | None = Field(None, description="of the token, whose sessions end with it; null: never")
    issuer_signs_out: bool = Field(False, description="after signing out a browser goes on to /v1/sign-off")
    version: str = Field(description="of the service")
    grafana_url: str | None = Field(None, description="where its dashboards are, if anywhere")


class RotatedToken(BaseModel):
    """POST /v1/tokens/operator/rotate: the operator's new token, which is in the home too."""

    token: str


class AuditLine(BaseModel):
    """One change that a person has asked for, done or refused."""

    number: int = Field(description="in the order in which they were written")
    time: datetime
    who: str = Field(
        description="the name of the token or of the issuer's person; 'service' for what the service did by itself"
    )
    issuer: str | None = Field(None, description="of OpenID Connect, whom the service has the person's name from")
    role: Role | None = Field(None, description="of the token at that time; null: the service itself")
    what: str = Field(description="the operation: submit, change, cancel, delete, create_token, ...")
    project: str | None = Field(None, description="whose it is; null: of none, or an earlier version did not note it")
    job_id: str | None = Field(None, description="which job; it may be gone by now")
    about: str | None = Field(None, description="of whom or what else: the token, the package, the new limits")
    address: str | None = Field(None, description="from where the request came; behind a proxy, the proxy's")
    status: int = Field(description="what was answered: below 400 it was done, else refused")


class AuditList(BaseModel):
    """GET /v1/audit, newest first."""

    lines: list[AuditLine]
    next: int | None = Field(None, description="ask again with before=<this> for older ones; null: there are none")
