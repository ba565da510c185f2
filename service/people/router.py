"""The routes of people's tokens and of the audit, for operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import JsonValue
from sqlalchemy.exc import SQLAlchemyError

from thinwire.contract.people import (
    AuditList,
    IssuerName,
    IssuerPersonList,
    MadeToken,
    NewToken,
    PersonName,
    RotatedToken,
    TokenChange,
    TokenItem,
    TokenList,
    TokenName,
)
from thinwire.contract.projects import PROJECT_HEADER, NewProject, Project, ProjectList, ProjectName, QuotaList
from thinwire.service.auth import InProject, operator, person
from thinwire.service.cursors import LONGEST
from thinwire.service.db import Database
from thinwire.service.errors import (
    BodyTooLarge,
    PersonNotFound,
    ProjectExists,
    ProjectInUse,
    ProjectNotFound,
    TokenExists,
    TokenFromElsewhere,
    TokenNotFound,
    Unavailable,
    UnsupportedMediaType,
    documented,
)
from thinwire.service.people.audit import Audit, Change, change_of
from thinwire.service.people.oidc_people import IssuerPeople
from thinwire.service.people.projects import Projects
from thinwire.service.people.quotas import Quotas
from thinwire.service.people.tokens import OperatorToken, Tokens
from thinwire.service.requests import ALWAYS, json_body, known_query, of_plane

LARGEST_NUMBER = 2**31 - 1

people = APIRouter(
    prefix="/v1",
    dependencies=[Depends(operator), Depends(known_query)],
    responses=ALWAYS,
    tags=["people"],
)
members = APIRouter(
    prefix="/v1", dependencies=[Depends(person), Depends(known_query)], responses=ALWAYS, tags=["people"]
)


AllTokens = Annotated[Tokens, of_plane("tokens")]
Asked = Annotated[Change, Depends(change_of)]
AllProjects = Annotated[Projects, of_plane("projects")]
Named = Annotated[TokenName, Path(description="of the token")]
AllPeople = Annotated[IssuerPeople, of_plane("people")]
Somebody = Annotated[IssuerName, Path()]
OneProject = Annotated[ProjectName, Path(description="of the project")]
After = Annotated[str | None, Query(max_length=LONGEST, description="`next` of an earlier answer")]


@people.post(
    "/tokens",
    status_code=201,
    dependencies=[Depends(json_body)],
    responses=documented(TokenExists, BodyTooLarge, UnsupportedMediaType),
)
def create_token(asked: NewToken, tokens: AllTokens, change: Asked, project: InProject) -> MadeToken:
    """Make a token for a person or a program. Its text is in this answer and nowhere else.

    A name that has a valid token is a conflict, whatever its project: names are of the whole service.
    """
    return tokens.create(asked, change, project)


@people.get("/tokens")
def list_tokens(
    tokens: AllTokens,
    project: InProject,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: After = None,
) -> TokenList:
    """Everybody's tokens, by name: role, project, when made, last used, over. Not the operator's in the home."""
    return tokens.list(limit, after, project)


@people.patch(
    "/tokens/{name}",
    dependencies=[Depends(json_body)],
    responses=documented(TokenNotFound, BodyTooLarge, UnsupportedMediaType),
)
def move_token(name: Named, wanted: TokenChange, tokens: AllTokens, change: Asked) -> TokenItem:
    """Let a token be for another project from now on, or for all. Jobs of its owner stay in theirs, and go on."""
    return tokens.move(name, wanted.project, change)


@people.delete("/tokens/{name}", status_code=204, responses=documented(TokenNotFound))
def revoke_token(name: Named, tokens: AllTokens, change: Asked, project: InProject) -> None:
    """Refuse the token of this name from now on. Asking again is fine. Jobs of its owner go on."""
    tokens.revoke(name, change, project)


@people.post("/tokens/operator/rotate", responses=documented(TokenFromElsewhere))
def rotate_token(request: Request, change: Asked) -> RotatedToken:
    """Put a new operator's token into the home of the service that answers. The one before is refused at once."""
    if (source := request.app.state.plane.operator_token_from) is not None:
        raise TokenFromElsewhere(source)
    db: Database = request.app.state.plane.db
    held: OperatorToken = request.app.state.plane.operator_token
    try:
        with db.write() as session:
            change.write(session, about="operator")
            return RotatedToken(token=held.rotate())
    except OSError as error:
        raise Unavailable(
            f"the token file in the home cannot be written ({error.strerror or error}): the token is as it was"
        ) from error
    except SQLAlchemyError as error:
        raise Unavailable(
            "the database did not answer, and the token may have changed all the same: see the file 'token' in the home"
        ) from error


@people.get("/people")
def list_people(
    everybody: AllPeople,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: Annotated[str | None, Query(max_length=LONGEST, description="`next` of an earlier answer")] = None,
) -> IssuerPersonList:
    """Who has come by the issuer of OpenID Connect, by name: role, when, blocked or not."""
    return everybody.list(limit, after)


@people.put("/people/{name}/block", status_code=204)
def block_person(name: Somebody, everybody: AllPeople, change: Asked) -> None:
    """Refuse this person of the issuer from now on, in all their sessions and with any token. Their jobs go on.

    Also one who has not come yet. Asking again is fine.
    """
    everybody.block(name, change)


@people.delete("/people/{name}/block", status_code=204, responses=documented(PersonNotFound))
def unblock_person(name: Somebody, everybody: AllPeople, change: Asked) -> None:
    """Take this person again. Asking again is fine."""
    everybody.unblock(name, change)


@people.delete("/people/{name}", status_code=204, responses=documented(PersonNotFound))
def release_person(name: Somebody, everybody: AllPeople, change: Asked) -> None:
    """Forget which of the issuer's subjects has this name: the next who comes with it has it, and their sessions end.

    For somebody who has another account now, or another issuer; what is kept under the name is theirs then.
    """
    everybody.release(name, change)


@people.get("/audit")
def read_audit(
    audit: Annotated[Audit, of_plane("audit")],
    project: InProject,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, le=LARGEST_NUMBER, description="`next` of an earlier answer")] = None,
    who: Annotated[PersonName | None, Query(description="only what this one has asked for")] = None,
    job_id: Annotated[
        str | None, Query(pattern=r"^[\x21-\x7e]{1,80}$", description="only what was asked of this job")
    ] = None,
) -> AuditList:
    """Who has changed what, newest first."""
    return audit.lines(limit, before, who, job_id, project)


@people.post(
    "/projects",
    status_code=201,
    dependencies=[Depends(json_body)],
    responses=documented(ProjectExists, BodyTooLarge, UnsupportedMediaType),
)
def create_project(asked: NewProject, projects: AllProjects, change: Asked) -> Project:
    """Make a project. Tokens are then made for it, or moved to it."""
    return projects.create(asked, change)


@members.get("/projects")
def list_projects(
    request: Request,
    projects: AllProjects,
    project: InProject,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: After = None,
) -> ProjectList:
    """The projects that the caller is of, by name, with what an operator has said of each."""
    named = request.query_params.get("project") or request.headers.get(PROJECT_HEADER)
    of_all: list[str] | None = request.state.caller.person.projects
    return projects.list(limit, after, of_all if named is None or project is None else [project])


@members.get("/quotas")
def show_quotas(
    request: Request,
    quotas: Annotated[Quotas, of_plane("quotas")],
    project: InProject,
    person: Annotated[PersonName | None, Query(description="of whom; by default of who asks")] = None,
) -> QuotaList:
    """What the project, or each of them, uses of what it may, and one person in it."""
    return quotas.of(project, person or request.state.caller.person.name)


@people.patch(
    "/projects/{name}",
    dependencies=[Depends(json_body)],
    responses=documented(ProjectNotFound, BodyTooLarge, UnsupportedMediaType),
)
def change_project(name: OneProject, changes: dict[str, JsonValue], projects: AllProjects, change: Asked) -> Project:
    """Change what is said of a project: a JSON merge patch, where null stands for what a new one has.

    A limit below what is used ends nothing: jobs go on, and new ones are refused.
    """
    return projects.change(name, changes, change)


@people.delete("/projects/{name}", status_code=204, responses=documented(ProjectNotFound, ProjectInUse))
def delete_project(name: OneProject, projects: AllProjects, change: Asked) -> None:
    """Remove a project of which nothing is any more: no job, over or not, no valid token, no package."""
    projects.delete(name, change)
