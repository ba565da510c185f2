"""The hyperparameters of every optimizer: each one's default, what it may be, and what it is for. Declared once.

Job files (spec.py) and the constructors of thinwire.optim both read it. It imports neither torch nor pydantic, so that
the optimizers alone can be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Number:
    """One number. default: where nothing is said. at_least, above, at_most, below: its range; whole: an int.

    optional: it may be None. about: what it is for, in words for people who write job files.
    """

    name: str
    default: Any
    about: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    whole: bool = False
    optional: bool = False

    @property
    def allowed(self) -> str:
        """Its range in words."""
        parts = [
            f"{word} {limit:g}"
            for word, limit in (
                ("at least", self.at_least),
                ("above", self.above),
                ("at most", self.at_most),
                ("below", self.below),
            )
            if limit is not None
        ]
        kind = "a whole number (int)" if self.whole else "a finite number"
        return ", ".join([kind, *parts]) + (", or None" if self.optional else "")

    def check(self, value: object) -> None:
        """Raises: ValueError naming it, the value and what is allowed. A tensor of one element is a number too."""
        if value is None and self.optional:
            return
        if not self._holds(value):
            raise ValueError(f"{self.name} = {value!r}: must be {self.allowed}")

    def _holds(self, value: Any) -> bool:
        if isinstance(value, bool) or (self.whole and type(value) is not int):
            return False
        if not isinstance(value, Real) and getattr(value, "numel", lambda: 0)() != 1:
            return False
        try:
            number = float(value)
        except OverflowError:  # of an int that is larger than any float
            return False
        return (
            isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


LR = Number("lr", 1e-3, "the learning rate; a schedule may take it down to 0", at_least=0.0)
BETAS = (0.9, 0.999)
BETA1 = Number("betas[0]", BETAS[0], at_least=0.0, below=1.0)
BETA2 = Number("betas[1]", BETAS[1], above=0.0, below=1.0)
EPS = Number("eps", 1e-8, above=0.0)
WEIGHT_DECAY = Number("weight_decay", 0.0, at_least=0.0)
MOMENTUM = Number("momentum", 0.9, at_least=0.0, below=1.0)
DAMPENING = Number(
    "dampening", 0.0, "how much less than itself a gradient counts in the momentum", at_least=0.0, below=1.0
)
ADAM = (LR, EPS, WEIGHT_DECAY)
SGD = (LR, MOMENTUM, WEIGHT_DECAY)
ONEBIT_SGD = (*SGD, DAMPENING)
SKETCH_K = Number(
    "k", None, "values that are applied in a step; null: a 25th of all", at_least=1, whole=True, optional=True
)
SKETCH_ROWS = Number("rows", 1, "sums for each value, an odd number: the median is taken", at_least=1, whole=True)
SKETCH_COLUMNS = Number(
    "columns", None, "sums of a row; null: all rows have 6 for 100 values", at_least=1, whole=True, optional=True
)
SKETCH_SECOND = Number(
    "second", 1, "of how many times k values the exact ones are sent, the largest by the sketch", at_least=1, whole=True
)
SKETCH = (SKETCH_K, SKETCH_ROWS, SKETCH_COLUMNS, SKETCH_SECOND)
MUON_MOMENTUM = Number("momentum", 0.95, at_least=0.0, below=1.0)
MUON_DECAY = Number("weight_decay", 0.1, at_least=0.0)
MUON = (LR, MUON_MOMENTUM, MUON_DECAY)

TOTAL_STEPS = Number("total_steps", None, "of the run", at_least=1, whole=True, optional=True)
LR_WARMUP_STEPS = Number("lr_warmup_steps", None, "of the run", at_least=0, whole=True, optional=True)
VAR_FREEZE_STEP = Number("var_freeze_step", None, at_least=1, whole=True, optional=True)
REFRESH = Number(
    "refresh",
    None,
    "part of its age after which a frozen variance is brought up to date, by one exchange in full; null: 1/16 where "
    "the optimizer finds the freeze by itself, else never",
    above=0.0,
    at_most=1.0,
    optional=True,
)

MAX_COEFF = Number("max_coeff", 10.0, "largest ratio ||x|| / ||u|| of a tensor", above=0.0)
MIN_COEFF = Number("min_coeff", 0.01, "smallest ratio ||x|| / ||u|| of a tensor", above=0.0)
COEFF_BETA = Number("coeff_beta", 0.9, "how slowly the average trust ratio moves", at_least=0.0, below=1.0)
FACTOR_MAX = Number("factor_max", 4.0, "bounds of the ratio of frozen to fresh variance", above=0.0)
FACTOR_MIN = Number("factor_min", 0.5, above=0.0)
FACTOR_THRESHOLD = Number("factor_threshold", 0.1, "how much that ratio may change in a step", above=0.0, below=1.0)
TRUST_RATIO = (MAX_COEFF, MIN_COEFF, COEFF_BETA, FACTOR_MAX, FACTOR_MIN, FACTOR_THRESHOLD)

DENSE_STEPS = Number(
    "dense_steps",
    None,
    "first steps, which are Adam's and uncompressed; null: 1 / (1 - beta2), or where that is fewer a part of the run: "
    "six tenths in 8 bits, four in bf16, two in fp32",
    at_least=0,
    whole=True,
    optional=True,
)
VAR_UPDATE_SCALER = Number(
    "var_update_scaler", 16, "updates of the variance until the gap between them doubles", at_least=1, whole=True
)
LOCAL_STEP_SCALER = Number(
    "local_step_scaler",
    None,
    "steps after which the gap between syncs doubles; null: it follows the learning rate",
    at_least=1,
    whole=True,
    optional=True,
)
LOCAL_STEP_CLIPPER = Number(
    "local_step_clipper",
    None,
    "longest gap between syncs, steps; null: a thousandth of the run, from 1 to 16, and 16 with local_step_scaler",
    at_least=1,
    whole=True,
    optional=True,
)
ZERO_ONE_SCHEDULE = (DENSE_STEPS, VAR_UPDATE_SCALER, LOCAL_STEP_SCALER, LOCAL_STEP_CLIPPER)
CodecName = Literal["sign", "int8", "int4", "topk", "threshold"]
"""How what is exchanged is written: one bit a value; 8; 4; of each 4096 the largest 64, in 2 bits; of all the largest
hundredth, in 16."""
RANK = Number("rank", 2, "columns of the factors of a matrix, of codec powersgd", at_least=1, whole=True)
EVERY = Number("every", 32, "local steps from one exchange to the next", at_least=1, whole=True)
PARTS = Number(
    "parts", 1, "of the model, which are exchanged one after another in the steps of a round", at_least=1, whole=True
)
OUTER_LR = Number("outer.lr", 1.0, "rate of the outer step: 1 goes to the mean of the ranks", above=0.0)
OUTER_MOMENTUM = Number("outer.momentum", 0.0, "of the outer step", at_least=0.0, below=1.0)
OUTER = (OUTER_LR, OUTER_MOMENTUM)
CADA_LR = Number("lr", 5e-4, LR.about, at_least=0.0)
CADA_RULES = (1, 2)
MAX_AGE = Number(
    "max_age", 50, "steps after which a worker sends its gradient whatever it is; 0: every step", at_least=0, whole=True
)
HORIZON = Number("horizon", 10, "last moves of the parameters that a change is compared with", at_least=1, whole=True)
THRESHOLD = Number("threshold", 1.0, "larger: fewer gradients are sent; 0: all", at_least=0.0)
MAX_GRAD_NORM = Number("max_grad_norm", None, above=0.0, optional=True)
