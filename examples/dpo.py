"""Direct preference optimization by TRL's DPOTrainer, at one bit a value.

python examples/dpo.py                              one worker, nothing is sent
torchrun --nproc-per-node 2 examples/dpo.py         two workers on this machine
thinwire submit examples/dpo.py --min 1 --max 4     a job, whose workers may die, come and leave

- trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=data)
+ with session() as run:
+     trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=data)
+     trainer = with_thinwire(trainer, OneBitAdam, run=run, warmup=15)

The reference model is frozen and stays on its worker: only what is trained is sent.
"""

import copy
import os
import tempfile

import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL tells the hub of each run

from datasets import Dataset
from small import answer, evasion, question, small_model, small_tokenizer
from trl import DPOConfig, DPOTrainer

from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import OneBitAdam
from thinwire.train import session

data = Dataset.from_list([{"prompt": question(n), "chosen": answer(n), "rejected": evasion(n)} for n in range(400)])

with session() as run, tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        folder,
        max_steps=45,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=15,
        bf16=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    model = small_model()
    trainer = DPOTrainer(
        model, ref_model=copy.deepcopy(model), args=args, train_dataset=data, processing_class=small_tokenizer()
    )
    trainer = with_thinwire(trainer, OneBitAdam, run=run, warmup=15)
    trainer.train()
    if run.rank == 0:
        optimizer = trainer.optimizer.optimizer
        print(f"trained {optimizer.space.layout.num_live:,} values, sent {optimizer.stats()['sent_bytes']:,} bytes")
