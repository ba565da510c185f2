"""The command: python -m benchmarks.same_scripts. The scripts that people have, with AdamW under DDP and with ours.

Four ways to write a training (Hugging Face's Trainer, Accelerate, Lightning, a plain loop), one small GPT-2 made on the
spot, two processes over gloo. A script is the same for all methods but for the lines that choose one:

    ddp             torch.optim.AdamW under DistributedDataParallel
    adam            thinwire's Adam: nothing compressed
    onebit_adam     thinwire's 1-bit Adam, whose warm-up is a quarter of the run

Final loss on the same held-out text; compared in pairs of one seed, by the rule of benchmarks/paired.py.
 Bytes are payload that rank 0 has sent: counted by the transport, together with the
parameters that it sends at the start; for DDP those of a ring for the gradients, computed. Times are not looked at.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.paired import interval, judge
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from thinwire.contract.figures import ring_bytes
from thinwire.optim import Adam, OneBitAdam

OUT = ROOT / "benchmarks" / "results" / "same-scripts"
TEXT = ROOT / "tests" / "data" / "tinyshakespeare.txt"
SIZE, STEPS, BATCH, CONTEXT = 2, 200, 8, 32
HELD_OUT = 128
LR, WEIGHT_DECAY = 3e-3, 0.01
WARMUP = STEPS // 4
METHODS = ("ddp", "adam", "onebit_adam")
PACKAGES = ("transformers", "accelerate", "lightning", "torch")


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text, one byte a token, end to end."""

    def __init__(self, first: int, count: int) -> None:
        text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
        self.rows = text[first * CONTEXT : (first + count) * CONTEXT].view(count, CONTEXT).long()

    def __len__(self) -> int:
        """Windows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One, as the library's models take it."""
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train_windows() -> Windows:
    """As many as the steps take."""
    return Windows(HELD_OUT, SIZE * BATCH * STEPS)


def gpt(seed: int) -> Any:
    """Two layers, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": CONTEXT, "vocab_size": 128}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


@torch.no_grad()
def held_out_loss(model: Any) -> float:
    """Mean over the held-out windows, in nats a byte."""
    model.eval()
    rows = Windows(0, HELD_OUT).rows
    return float(model(input_ids=rows, labels=rows).loss)


def optimizer_for(method: str, params: Any) -> torch.optim.Optimizer:
    """What a script makes of its parameters."""
    if method == "ddp":
        return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)
    if method == "adam":
        return Adam(params, lr=LR, weight_decay=WEIGHT_DECAY)
    return OneBitAdam(params, lr=LR, weight_decay=WEIGHT_DECAY, warmup=WARMUP)


def plain_loop(method: str, seed: int, folder: Path) -> tuple[Any, Any]:
    """PyTorch alone. Returns the model and its optimizer, as every script here."""
    model = gpt(seed)
    wrapped = DistributedDataParallel(model) if method == "ddp" else model
    optimizer = optimizer_for(method, wrapped.parameters())
    windows = train_windows()
    for batch in DataLoader(windows, BATCH, sampler=DistributedSampler(windows, seed=seed)):
        optimizer.zero_grad()
        wrapped(**batch).loss.backward()
        optimizer.step()
    return model, optimizer


def trainer(method: str, seed: int, folder: Path) -> tuple[Any, Any]:
    """transformers.Trainer."""
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import with_thinwire

    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    made = Trainer(gpt(seed), arguments, train_dataset=train_windows())
    if method == "adam":
        made = with_thinwire(made, Adam)
    elif method == "onebit_adam":
        made = with_thinwire(made, OneBitAdam, warmup=WARMUP)
    made.train()
    return made.model, getattr(made.optimizer, "optimizer", made.optimizer)


def accelerate(method: str, seed: int, folder: Path) -> tuple[Any, Any]:
    """A loop with Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    from thinwire.integrations.accelerate import with_thinwire

    AcceleratorState._reset_state(True)  # a process makes one run after the other
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    if method != "ddp":
        accelerator = with_thinwire(accelerator)
    set_seed(seed)
    model = gpt(seed)
    optimizer = optimizer_for(method, model.parameters())
    loader = DataLoader(train_windows(), BATCH, shuffle=True)
    wrapped, prepared, batches = accelerator.prepare(model, optimizer, loader)
    for batch in batches:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(**batch).loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
    return accelerator.unwrap_model(wrapped), optimizer


def lightning(method: str, seed: int, folder: Path) -> tuple[Any, Any]:
    """Lightning's Trainer."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    from thinwire.integrations.lightning import ThinwireStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt(seed)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.gpt(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_for(method, self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    module = Module()
    made = L.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=DDPStrategy() if method == "ddp" else ThinwireStrategy(),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    made.fit(module, DataLoader(train_windows(), BATCH, shuffle=True))
    return module.gpt, made.optimizers[0]


Script = Callable[[str, int, Path], tuple[Any, Any]]
SCRIPTS: dict[str, Script] = {
    "plain loop": plain_loop,
    "Accelerate": accelerate,
    "Trainer": trainer,
    "Lightning": lightning,
}


def run_as(rank: int, seeds: int, store: str, lines: Path) -> None:
    """One of the two processes: all runs, one after the other; rank 0 writes a line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    for name, script in SCRIPTS.items():
        for seed in range(seeds):
            for method in METHODS:
                with TemporaryDirectory() as folder:
                    model, optimizer = script(method, seed, Path(folder))
                told = {"script": name, "method": method, "seed": seed, "loss": held_out_loss(model)}
                parameters = sum(param.numel() for param in model.parameters())
                if method == "ddp":
                    told["sent_bytes"] = round(STEPS * ring_bytes(parameters, SIZE, 4))
                else:
                    stats = optimizer.stats()
                    assert stats["num_steps"] == STEPS, stats
                    told |= {"sent_bytes": stats["sent_bytes"], "frozen_at": stats["frozen_at"]}
                if rank == 0:
                    with lines.open("a") as file:
                        file.write(json.dumps({**told, "parameters": parameters}) + "\n")
    dist.destroy_process_group()


def main(
    seeds: Annotated[int, typer.Option(help="From 0; a pair is compared seed by seed.")] = 3,
    out: Annotated[Path, typer.Option(help="Where runs.json and README.md go.")] = OUT,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    store: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Train every script by every method, and print the final losses side by side."""
    if rank >= 0:
        run_as(rank, seeds, store, Path(store + ".lines"))
        return
    made_by = provenance()
    with TemporaryDirectory() as folder:
        ranks = [_start(rank, seeds, os.path.join(folder, "store")) for rank in range(SIZE)]
        for process in ranks:
            process.wait()
        if any(process.returncode for process in ranks):
            raise typer.Exit(1)
        lines = Path(folder, "store.lines").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    out.mkdir(parents=True, exist_ok=True)
    given = {"steps": STEPS, "ranks": SIZE, "batch": BATCH, "context": CONTEXT, "lr": LR, "weight_decay": WEIGHT_DECAY}
    result = {
        "command": f"python -m benchmarks.same_scripts --seeds {seeds}",
        "commit": made_by.commit,
        "versions": {**made_by.versions, **{name: version(name) for name in PACKAGES}},
        "hardware": made_by.hardware,
        "configuration": {**given, "warmup": WARMUP, "held_out_windows": HELD_OUT},
        "runs": runs,
    }
    (out / "runs.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(table(runs))
    (out / "README.md").write_text(HEAD.format(command=result["command"], commit=made_by.commit) + text + "\n")
    typer.echo(text)


HEAD = """# The same scripts, by AdamW under DDP and by ours

`{command}` at commit {commit}.
Versions, hardware and every run are in [runs.json](runs.json); what is compared is in
[same_scripts.py](../../same_scripts.py). Losses are those of the held-out text in nats a byte, means over seeds; the
difference is of pairs of one seed, in per cent of the loss under DDP, with its 95 % interval. Verdicts are those of
benchmarks/paired.py: "same" needs an interval of at most 1 % to each side, which ends at or below +1 %.

"""


def table(runs: list[dict[str, Any]]) -> list[str]:
    """A row for each script and method, in the order of the runs."""
    columns = ("script", "method", "final loss", "range over seeds", "minus DDP", "verdict", "bytes a rank", "of DDP's")
    rows = []
    for script in dict.fromkeys(run["script"] for run in runs):
        of = {method: [r for r in runs if (r["script"], r["method"]) == (script, method)] for method in METHODS}
        base = [run["loss"] for run in of["ddp"]]
        for method, ours in of.items():
            losses, sent = [run["loss"] for run in ours], ours[0]["sent_bytes"]
            apart, verdict = "", ""
            if method != "ddp":
                worse = interval([100 * (mine - theirs) / theirs for mine, theirs in zip(losses, base, strict=True)])
                apart, verdict = f"{worse.mean:+.2f} % ({worse.low:+.2f} to {worse.high:+.2f})", judge(worse).value
            share, ends = sent / of["ddp"][0]["sent_bytes"], f"{min(losses):.4f} to {max(losses):.4f}"
            rows.append((script, method, f"{fmean(losses):.4f}", ends, apart, verdict, f"{sent:,}", f"{share:.3f}"))
    return pipes(columns, rows)


def _start(rank: int, seeds: int, store: str) -> subprocess.Popen[bytes]:
    """One of the processes, as torchrun would start it, and without a hub."""
    environment = {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(SIZE)},
        **{"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"},
        **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "GLOO_SOCKET_IFNAME": "lo"},
    }
    arguments = ("--seeds", str(seeds), "--rank", str(rank), "--store", store)
    return subprocess.Popen([sys.executable, "-m", "benchmarks.same_scripts", *arguments], env=environment)


if __name__ == "__main__":
    typer.run(main)
