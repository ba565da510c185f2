"""What the scripts here share: optimizers by name, texts in files, a step in parts, numbers drawn by the sample."""

import argparse
import csv
import io
import json
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from thinwire.optim import OPTIMIZERS, LambBounds, named

KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
KINDS |= {".csv": "csv", ".tsv": "csv"}
"""What `datasets` calls a file, by its ending; of a compressed one by the ending before `.gz` or `.zst`."""

SHAKESPEARE = Path(__file__).parents[2] / "tests" / "data" / "tinyshakespeare.txt"

RATES = {"lamb": 3, "onebit_lamb": 3, "muon": 3, "onebit_muon": 3, "sgd": 100, "onebit_sgd": 100, "sketched_sgd": 100}
"""Times a preset's rate, which is that of Adam, for steps of another size: where a search begins, see --lr-times."""
BERT_BOUNDS = LambBounds(max_coeff=0.3, min_coeff=0.01)
"""Of LAMB's trust ratio, in the settings that 1-bit LAMB was published with (arXiv 2104.06069)."""


def add_flags(parser, presets, *, optimizer=None, memory=True):
    """Say in `parser` what all scripts here take alike. optimizer: if left out; memory: also what saves memory."""
    told = "left out: the preset's"
    parser.add_argument("--preset", choices=presets, default="small")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=optimizer, help="as in job files")
    parser.add_argument("--lr", type=float, help=f"the highest; {told}")
    parser.add_argument("--lr-times", type=_positive, default=1.0, help="times that rate: to search for a better one")
    parser.add_argument("--steps", type=_natural, help=told)
    parser.add_argument("--batch", type=_natural, help=f"samples of a step, over all workers; {told}")
    if memory:
        parser.add_argument("--micro", type=_natural, help="samples that a worker computes at once; left out: all")
        again = "compute activations again: less memory, more time"
        parser.add_argument("--checkpointing", action="store_true", help=again)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where torch's autocast does")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--loaders", type=int, default=0, help="processes that prepare samples, on each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where checkpoints are kept; left out: nowhere. A job says it itself")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="leave there what was trained")
    parser.add_argument("--out", type=Path, metavar="FILE", help="what the run has come to, as JSON")


def model_folder(text):
    """What --weights says: a folder of a model, or a name that from_pretrained knows. Raises: ArgumentTypeError."""
    if text.startswith(("/", ".", "~")) and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder; bert_pretrain.py --save FOLDER makes one")
    if Path(text).is_dir() and not (Path(text) / "config.json").is_file():
        told = f"bert_pretrain.py --describe {text} writes it and the pieces beside the weights"
        raise argparse.ArgumentTypeError(f"{text}: there is no config.json in it; {told}")
    return text


def a_file(text):
    """What an option says that takes a file; of a folder that --save has left its model.safetensors.

    Raises: ArgumentTypeError for no file.
    """
    inside = Path(text) / "model.safetensors"
    file = inside if inside.is_file() else Path(text)
    if not file.is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return file


def _positive(text):
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def _natural(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: give a number from 1")
    return number


def rate_of(given, lr, own="adam", rates=None):
    """The highest rate: --lr, or else `lr`, which is for the optimizer `own`, times what that of --optimizer takes.

    rates: by optimizer, where a preset has more than one. All of it times --lr-times.
    """
    usual = (rates or {}).get(given.optimizer, lr * RATES.get(given.optimizer, 1) / RATES.get(own, 1))
    return given.lr_times * (usual if given.lr is None else given.lr)


def in_groups(model, weight_decay):
    """Matrices decay, biases and norms do not: as BERT (arXiv 1810.04805) and Megatron-LM have it."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def bert_optimizer(given, model, run, *, lr, steps, rise, warmup="auto", weight_decay=0.01):
    """The optimizer of --optimizer over the run's workers, for `steps` steps whose rate rises over the first `rise`.

    warmup: steps in full before one bit; "auto": the optimizer finds out. The gradient is clipped to a norm of 1.
    """
    options = {"model": model, "max_grad_norm": 1.0, "group": run.group}
    if given.optimizer in ("lamb", "onebit_lamb"):
        options["bounds"] = BERT_BOUNDS
    if warmup != "auto" and given.optimizer in ("onebit_adam", "onebit_lamb"):
        options["warmup"] = warmup
    if warmup != "auto" and given.optimizer == "zero_one_adam":
        options["var_freeze_step"] = rise
    groups = in_groups(model, weight_decay)
    return named(given.optimizer, groups, lr, total_steps=steps, lr_warmup_steps=rise, **options)


def risen_and_fallen(rise, steps):
    """Of a step, counted from 0, the part of the highest rate: linear up over `rise` steps, linear down to the last."""
    return lambda step: min((step + 1) / max(1, rise), (steps - step) / max(1, steps - rise))


BESIDE_ARROW = {"state.json", "dataset_info.json", "dataset_dict.json"}
"""What `save_to_disk` leaves beside the rows."""


def files_in(paths):
    """These files, in place of a folder all files in it that hold rows, in order of their names: its shards.

    Raises: ValueError for a folder without any.
    """
    found = []
    for path in map(Path, paths):
        inside = [path]
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if ending(one) and one.name not in BESIDE_ARROW)
            if not inside:
                raise ValueError(f"{path}: there is no file in it whose ending is one of {', '.join(KINDS)}")
        found += inside
    return found


def rows_of(files, stream=False, **how):
    """The rows of local files of one kind: text, JSONL, parquet, arrow, CSV or TSV, as `datasets` reads them.

    files: or folders of them. stream: they are read as they are needed, and never all there at once. how: arguments of
    `load_dataset`.
    Raises: ValueError for files that are not there, of a kind that is not known, broken, or without a row.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    files = files_in(files)
    for file in files:
        if ending(file) is None:
            raise ValueError(f"{file}: give files whose ending is one of {', '.join(KINDS)}, also with .gz or .zst")
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file")
    endings = sorted({ending(file) for file in files})
    if len({KINDS[one] for one in endings}) != 1:
        raise ValueError(f"{', '.join(map(str, files))}: give files of one kind, not {' and '.join(endings)}")
    if ".tsv" in endings:
        how = {"sep": "\t", "quoting": csv.QUOTE_NONE, **how}  # as GLUE writes them: a quotation mark is a letter
    files = sorted(map(str, files))
    try:
        rows = load_dataset(KINDS[endings[0]], data_files=files, split="train", streaming=stream, **how)
        is_empty = next(iter(rows), None) is None
    except StopIteration:  # as `datasets` says it of an empty JSONL
        is_empty = True
    except (DatasetGenerationError, ValueError) as error:
        is_empty = "corresponds to no data" in str(error)  # as it says it of a parquet
        if not is_empty:
            raise ValueError(f"{', '.join(files)}: cannot be read: {error.__cause__ or error}") from error
    if is_empty:
        raise ValueError(f"{', '.join(files)}: there is no row in it")
    return rows


def ending(file):
    """Which of KINDS a file is, by its name; None: none of them."""
    names = [one.lower() for one in Path(file).suffixes]
    return next((one for one in reversed(names) if one in KINDS), None)


def texts_of(files, column="text", stream=False, **how):
    """Rows with a `text` each: of the column of that name, or of text files. how: of text files, for `load_dataset`.

    Raises: ValueError for files that have no such column, or no row.
    """
    files = files_in(files)
    is_text = KINDS.get(ending(files[0])) == "text"
    rows = rows_of(files, stream, **(how if is_text else {}))
    column = "text" if is_text else column
    names = rows.column_names or list(next(iter(rows), {}))
    if column not in names:
        raise ValueError(f"--column {column}: {files[0]} has {', '.join(names) or 'no row'}")
    rows = rows.select_columns(column)
    kind = getattr((rows.features or {}).get(column), "dtype", None) or type(next(iter(rows))[column]).__name__
    if kind not in ("string", "large_string", "str"):
        raise ValueError(f"--column {column}: {files[0]} has {kind} there: give a column of text")
    return rows if column == "text" else rows.rename_column(column, "text")


def documents(files, column="text", stream=False):
    """The same, or Shakespeare where there are no files. Of text files a row is what stands between empty lines."""
    if files:
        return texts_of(files, column, stream, sample_by="paragraph")
    from datasets import Dataset

    return Dataset.from_dict({"text": scenes()})


def speeches():
    """(speaker, text) of Shakespeare's plays, as far as the repository has them, in order.

    Raises: ValueError where the script was copied out of the repository.
    """
    if not SHAKESPEARE.is_file():
        raise ValueError(
            f"without --data this script takes {SHAKESPEARE.name} of its repository, which is not there: give --data "
            "FILE, or submit it with `--working-dir .` in the repository's folder"
        )
    found = [speech.split(":\n", 1) for speech in SHAKESPEARE.read_text().split("\n\n")]
    return [(one[0].strip(), one[1].strip()) for one in found if len(one) == 2 and one[1].strip()]


def scenes(speeches_in_one=24):
    """The same text in documents of so many speeches each."""
    all_speeches = [f"{speaker}:\n{said}" for speaker, said in speeches()]
    return ["\n".join(all_speeches[i : i + speeches_in_one]) for i in range(0, len(all_speeches), speeches_in_one)]


def opened(image):
    """The image in RGB. image: a path, or what `datasets` has of one that is not decoded: its "path" and its "bytes".

    Raises: ValueError, which says which file cannot be read.
    """
    from PIL import Image

    where, inside = (image["path"], image["bytes"]) if isinstance(image, dict) else (image, None)
    try:
        with Image.open(where if inside is None else io.BytesIO(inside)) as found:
            return found.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where}: is no image that can be read: {error}") from error


def sentences(text):
    """Its lines, and where there is only one its sentences."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) > 1 else [one for one in re.split(r"(?<=[.!?])\s+", text.strip()) if one]


def seed_of(*numbers):
    """One 32-bit number out of several: a seed that follows from a sample or from a step, and is drawn by no state."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def seed_step(run, seed):
    """Dropout from here on follows from the step and the rank: a step that is repeated or resumed draws the same."""
    torch.manual_seed(seed_of(seed, run.step_number, run.rank))


def in_parts(batch, micro):
    """A batch, a dict of tensors, cut along its first dimension into parts of at most `micro` samples."""
    samples = len(next(iter(batch.values())))
    size = micro or samples
    return [{name: value[i : i + size] for name, value in batch.items()} for i in range(0, samples, size)]


def backward(loss_of, batch, given, device, count=lambda part: len(next(iter(part.values())))):
    """Gradients of the mean loss over a batch, part by part (`given.micro`); returns that loss, a tensor.

    loss_of(part) is the mean over what count(part) counts.
    """
    parts = in_parts(batch, given.micro)
    counts = [float(count(part)) for part in parts]
    whole = sum(counts) or 1.0
    total = torch.zeros((), device=device)
    for part, counted in zip(parts, counts, strict=True):
        if not counted:
            continue  # the mean over nothing is no number
        with torch.autocast(device.type, torch.bfloat16) if given.bf16 else nullcontext():
            loss = loss_of({name: value.to(device) for name, value in part.items()})
        loss = loss * (counted / whole)
        loss.backward()
        total += loss.detach()
    return total


def step(optimizer, *given_to_backward):
    """A step of the optimizer on a batch, for arguments as those of backward(); returns the loss.

    The gradient is computed by a closure, for CADA asks for it at two places.
    """

    def gradient():
        optimizer.zero_grad()
        return backward(*given_to_backward)

    return optimizer.step(gradient)


def prepared(model, given):
    """The model as it is called: with --checkpointing and --compile. What is registered and saved is `model` itself."""
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return torch.compile(model) if given.compile else model


def tell(given, workload, run, optimizers, score, unit, *, higher_is_better, began, **other):
    """Print what the run has come to, and write it to --out: on rank 0, at the end. began: of time.monotonic().

    optimizers: one, or several over the run's group. bytes: what this worker has sent; dense_bytes: what
    it would have sent for the mean of all gradients in float32, by a ring. Both 0 with one worker.
    """
    optimizers = optimizers if isinstance(optimizers, tuple) else (optimizers,)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    elements = sum(p.numel() for group in groups for p in group["params"])
    workers, steps = run.world_size, run.step_number
    found = {
        "workload": workload,
        "optimizer": given.optimizer,
        "seed": given.seed,
        "score": score,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "other": {**other, "workers": workers},
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "bytes": optimizers[0].stats()["sent_bytes"],  # of the group: all optimizers over it count together
        "dense_bytes": round(2 * (workers - 1) / workers * 4 * elements) * steps,
    }
    print(f"{workload}, {given.optimizer}: {score:.4g} {unit} after {steps} steps, {workers} workers", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found) + "\n")


def save(given, *what):
    """A model and its tokenizer, to --save."""
    for one in what if given.save else ():
        one.save_pretrained(given.save)
