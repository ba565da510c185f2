"""The command `thinwire manifest`: what Kubernetes would be given for a job, before it is given anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from thinwire.cli.job_file import JobFileError, explain_rejection, read_job_file
from thinwire.contract.jobs import Problem
from thinwire.contract.spec import ScriptSpec, read_spec


def manifest(
    file: Annotated[Path, typer.Argument(help="A job file, as for `thinwire submit`.", show_default=False)],
    template: Annotated[
        Path | None,
        typer.Option(
            help="A RayJob to fill in. Default: the service's own, or $THINWIRE_KUBERAY_TEMPLATE.",
            envvar="THINWIRE_KUBERAY_TEMPLATE",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Of head and workers. Default: those of the template.", envvar="THINWIRE_KUBERAY_IMAGE"),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of the RayJob.", envvar="THINWIRE_KUBERAY_NAMESPACE")] = "default",
) -> None:
    """Print the RayJob that a service with the launcher kuberay makes of a job file. Nothing is started.

    For reading, and as the beginning of a template of your own (docs/kubernetes.md). The words in capitals, such as
    TICKET, are filled in by the service when it submits an attempt: a RayJob applied by hand would be refused by it.

    Example: `thinwire manifest examples/quickstart.yaml | kubectl apply --dry-run=server -f -`
    """
    from thinwire.service.launch.driver import command_line
    from thinwire.service.launch.kuberay.manifest import Attempt, TemplateRefused, printed, rayjob, read_template
    from thinwire.service.launch.protocol import Code

    try:
        spec = read_spec(read_job_file(file))
    except ValidationError as error:
        problems = [
            Problem(path=".".join(map(str, one["loc"][1:])), value=None, message=one["msg"]) for one in error.errors()
        ]
        raise explain_rejection(file, "it is no job", problems) from None
    code = package = None
    job_id = f"{spec.name}-SUFFIX"
    if isinstance(spec, ScriptSpec):
        code = Code(None, None, spec.recipe.working_dir, spec.recipe.pip, spec.recipe.env_vars)
        if spec.recipe.package is not None or spec.recipe.working_dir is None:
            package = spec.recipe.package or "SHA256"
    try:
        made = rayjob(
            read_template(template, image),
            Attempt(
                service_id="SERVICE",
                submission_id=job_id,
                entrypoint=command_line("URL", job_id, 1, "TICKET", code, package),
                metadata={"job_id": job_id, "job_name": spec.name, "attempt": "1"},
                spec=spec,
                least=spec.workers.min,
                most=spec.workers.max,
                code=code,
                namespace=namespace,
            ),
        )
    except TemplateRefused as error:
        raise JobFileError(str(error)) from None
    typer.echo(printed(made), nl=False)
