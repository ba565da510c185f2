"""From a spec to its data, in the form that its recipe trains on: one case a recipe."""

from __future__ import annotations

from thinwire.contract.spec import BertRecipe, Digits, GptRecipe, PythonStdlib, ResnetRecipe, TextFile, TrainSpec
from thinwire.workers.data.batches import Data
from thinwire.workers.data.corpus import load_corpus
from thinwire.workers.data.digits import digit_images
from thinwire.workers.data.masked import masked_bytes
from thinwire.workers.data.windows import next_bytes


def load(spec: TrainSpec) -> Data:
    """Read the data of a spec, whole, into memory. Raises: DataError."""
    sizes = spec.global_batch, spec.evaluation.windows, spec.seed
    match spec.recipe, spec.data:
        case GptRecipe(context=context), PythonStdlib() | TextFile() as text:
            return next_bytes(load_corpus(text), context, *sizes)
        case BertRecipe(context=context), PythonStdlib() | TextFile() as text:
            return masked_bytes(load_corpus(text), context, *sizes)
        case ResnetRecipe(shift=shift), Digits(validation_fraction=fraction):
            return digit_images(fraction, shift, *sizes)
    raise ValueError(f"no data for {spec.recipe!r} from {spec.data!r}; a spec that was validated has none such")
