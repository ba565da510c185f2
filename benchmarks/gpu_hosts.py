"""Steps over NCCL, ranks of one GPU as hosts of a lab: `python -m benchmarks.gpu_hosts`, a part of `make bench-gpu`.

`thinwire bench gpu` is the same command (thinwire/tools/gpu); this one says of which commit a result is.
"""

from __future__ import annotations

import sys

from benchmarks.provenance import ROOT, ProvenanceError, provenance
from thinwire.tools.gpu.run import main

RESULTS = ROOT / "benchmarks" / "results" / "gpu-hosts"


if __name__ == "__main__":
    try:
        commit = provenance((*("comm", "optim", "thinwire/tools"), "benchmarks/gpu_hosts.py", ":!*.md")).commit
    except ProvenanceError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(prog="python -m benchmarks.gpu_hosts", folder=RESULTS, made_by={"commit": commit}))
