"""A client of the service's REST API, for Python programs and for the command line.

    from thinwire.client import Client

    with Client() as client:
        job = client.submit({"steps": 60, "global_batch": 8, "optimizer": {"name": "adam"}})
        print(client.wait([job.id])[job.id].state)

`Client` waits for each answer; `AsyncClient` has the same methods, to be awaited. Without an argument both ask the
service that THINWIRE_URL and THINWIRE_TOKEN name, else that of THINWIRE_HOME; `Client(Server(url, token))` asks another
one. Answers are models of thinwire.contract; errors are in `errors`. It needs no more than the package's core.
"""

from __future__ import annotations

from thinwire.client import calls
from thinwire.client.asking import Awaiting, Blocking, Call
from thinwire.client.errors import (
    AmbiguousId,
    ApiError,
    BadAnswer,
    ClientError,
    NoText,
    NotFound,
    Rejected,
    TokenEndsSoon,
    Unauthorized,
    Unreachable,
    WrongEnvironment,
)
from thinwire.client.servers import Server, find_server, home, server_of

__all__ = [
    "AmbiguousId",
    "ApiError",
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "NoText",
    "NotFound",
    "Rejected",
    "Server",
    "TokenEndsSoon",
    "Unauthorized",
    "Unreachable",
    "WrongEnvironment",
    "find_server",
    "home",
    "server_of",
]


class Calls:
    """The methods of both clients. What each takes, gives and raises is said in `calls`."""

    submit = Call(calls.submit)
    validate = Call(calls.validate)
    clone = Call(calls.clone)
    jobs = Call(calls.jobs)
    jobs_page = Call(calls.jobs_page)
    job = Call(calls.job)
    resolve = Call(calls.resolve)
    beginning = Call(calls.beginning)
    resize = Call(calls.resize)
    label = Call(calls.label)
    cancel = Call(calls.cancel)
    delete = Call(calls.delete)
    wait = Call(calls.wait)
    logs = Call(calls.logs)
    history = Call(calls.history)
    history_page = Call(calls.history_page)
    events = Call(calls.events)
    told = Call(calls.told)
    told_of_job = Call(calls.told_of_job)
    log_told = Call(calls.log_told)
    checkpoints = Call(calls.checkpoints)
    checkpoint_file = Call(calls.checkpoint_file)
    targets = Call(calls.targets)
    package = Call(calls.package)
    has_package = Call(calls.has_package)
    packages = Call(calls.packages)
    put_package = Call(calls.put_package)
    me = Call(calls.me)
    create_token = Call(calls.create_token)
    tokens = Call(calls.tokens)
    move_token = Call(calls.move_token)
    revoke_token = Call(calls.revoke_token)
    rotate_token = Call(calls.rotate_token)
    projects = Call(calls.projects)
    create_project = Call(calls.create_project)
    change_project = Call(calls.change_project)
    delete_project = Call(calls.delete_project)
    quotas = Call(calls.quotas)
    audit = Call(calls.audit)
    not_ready = Call(calls.not_ready)
    alive = Call(calls.alive)
    metrics = Call(calls.metrics)


class Client(Calls, Blocking):
    """Calls of the REST API that wait for the answer. Each raises ClientError. Close it, or use it with `with`."""


class AsyncClient(Calls, Awaiting):
    """The same calls, to be awaited. Close it, or use it with `async with`."""
