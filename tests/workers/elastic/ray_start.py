"""`ray start` where others hold the cores: a raylet waits 15 s for its agent to tell a port, and then it ends.

Ray knows no longer time, and waits even for a port that was given; so it is told here, at once.
"""

import inspect
import sys

from ray._private import services
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port
from ray.scripts.scripts import main

_start_raylet = services.start_raylet


def _start_raylet_told(*arguments, **options):
    given = inspect.signature(_start_raylet).bind(*arguments, **options).arguments
    port = given["dashboard_agent_listen_port"]
    persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
    return _start_raylet(*arguments, **options)


if __name__ == "__main__":
    services.start_raylet = _start_raylet_told
    sys.exit(main())
