"""What recipes over windows of a text share: the text, and the windows to validate on."""

from __future__ import annotations

from functools import cached_property

from thinwire.contract.spec import PythonStdlib, TextFile, TextRecipe
from thinwire.workers.data.corpus import Corpus, load_corpus
from thinwire.workers.data.windows import Sample, Windows, spread
from thinwire.workers.recipes.of_job import OfJob


class OverText(OfJob):
    """A recipe over the bytes of a text."""

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read when it is first asked for. Raises: DataError."""
        data = self.spec.data
        assert isinstance(data, PythonStdlib | TextFile), "a spec that was validated has no other"
        return load_corpus(data)

    @property
    def context(self) -> int:
        """Bytes of a window."""
        assert isinstance(self.spec.recipe, TextRecipe)
        return self.spec.recipe.context

    def validation(self) -> list[Sample]:
        """Windows of the text's other part. Raises: DataError."""
        return spread(Windows(self.corpus, self.context, "validation"), self.spec.evaluation.windows)
