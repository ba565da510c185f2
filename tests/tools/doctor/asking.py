"""`thinwire doctor` under another host name: python -m tests.tools.doctor.asking NAME ARGUMENT..."""

import sys

from tests.tools.doctor.box import named
from thinwire.cli.doctor import app

if __name__ == "__main__":
    named(sys.argv[1])
    app(sys.argv[2:])
