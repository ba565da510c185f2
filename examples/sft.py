"""Supervised fine-tuning by TRL's SFTTrainer: all weights at one bit a value, or LoRA's adapters as they are.

python examples/sft.py                                     one worker, nothing is sent
torchrun --nproc-per-node 2 examples/sft.py                two workers, all weights are trained: one bit a value
torchrun --nproc-per-node 2 examples/sft.py --lora         two workers, adapters are trained: too little to compress
thinwire submit examples/sft.py --min 1 --max 4            a job, whose workers may die, come and leave

- trainer = SFTTrainer(model, args, train_dataset=data)
+ with session() as run:
+     trainer = with_thinwire(SFTTrainer(model, args, train_dataset=data), OneBitAdam, run=run, warmup=20)

A step has per_device_train_batch_size samples, however many workers share them; its loss is the mean over their tokens.
"""

import argparse
import os
import tempfile

import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL tells the hub of each run

from datasets import Dataset
from peft import LoraConfig
from small import answer, question, small_model, small_tokenizer
from trl import SFTConfig, SFTTrainer

from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import Adam, OneBitAdam
from thinwire.train import session

parser = argparse.ArgumentParser()
parser.add_argument("--lora", action="store_true", help="train adapters of rank 8 in place of all weights")
parser.add_argument("--steps", type=int, default=60)
given = parser.parse_args()

data = Dataset.from_list([{"prompt": question(n), "completion": answer(n)} for n in range(400)])
adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if given.lora else None

with session() as run, tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder,
        max_steps=given.steps,
        per_device_train_batch_size=16,
        learning_rate=2e-2 if given.lora else 5e-3,
        logging_steps=20,
        bf16=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        small_model(), args, train_dataset=data, processing_class=small_tokenizer(), peft_config=adapters
    )
    if given.lora:
        trainer = with_thinwire(trainer, Adam, run=run)
    else:
        trainer = with_thinwire(trainer, OneBitAdam, run=run, warmup=20)
    trainer.train()
    if run.rank == 0:
        optimizer = trainer.optimizer.optimizer
        print(f"trained {optimizer.space.layout.num_live:,} values, sent {optimizer.stats()['sent_bytes']:,} bytes")
