from collections.abc import Iterator

import pytest

from tests.workers.membership.crew import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    try:
        yield crew
    finally:
        crew.close()
