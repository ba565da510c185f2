"""A Hugging Face Trainer that sends one bit a value, and that a lost worker costs no step.

python examples/transformers_trainer.py                         one worker, nothing is sent
torchrun --nproc-per-node 2 examples/transformers_trainer.py    two workers on this machine; with --muon by Muon
thinwire submit examples/transformers_trainer.py --min 1 --max 4    a job, whose workers may die, come and leave

- trainer = Trainer(model, args, train_dataset=data)
+ with session() as run:
+     trainer = with_thinwire(Trainer(model, args, train_dataset=data), OneBitAdam, run=run, warmup=20)

A step has per_device_train_batch_size samples, however many workers share them.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import OneBitAdam, OneBitMuon
from thinwire.train import session

VOCABULARY, LENGTH = 64, 16

parser = argparse.ArgumentParser()
parser.add_argument(
    "--muon", action="store_true", help="1-bit Muon: one bit a value from the first step on, no warm-up"
)
given = parser.parse_args()


class Bytes(TrainerCallback):
    """Says what rank 0 has sent."""

    def on_log(self, args, state, control, optimizer=None, logs=None, **kwargs):
        """Called by Trainer with what it logs."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            stats = optimizer.optimizer.stats()
            print(
                f"step {state.global_step:3d}  next phase {stats['phase']:10s}  loss {logs['loss']:.4f}  "
                f"sent {stats['sent_bytes']:,} bytes",
                flush=True,
            )


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Arithmetic progressions: the next number follows from the two before it."""
    rows = [(torch.arange(LENGTH) * (1 + i % 7) + i) % VOCABULARY for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


with session() as run, tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=80,
        per_device_train_batch_size=16,
        learning_rate=2e-2 if given.muon else 5e-3,
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=sequences(256), callbacks=[Bytes()])
    if given.muon:
        trainer = with_thinwire(trainer, OneBitMuon, run=run)
    else:
        trainer = with_thinwire(trainer, OneBitAdam, run=run, warmup=20)
    trainer.train()
