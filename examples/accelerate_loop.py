"""A loop with Hugging Face Accelerate, in bfloat16: it stays Accelerate's, and a lost worker costs it no step.

python examples/accelerate_loop.py                              one worker
torchrun --nproc-per-node 2 examples/accelerate_loop.py         two workers on this machine
thinwire submit examples/accelerate_loop.py --min 1 --max 4     a job, whose workers may die, come and leave

- accelerator = Accelerator(mixed_precision="bf16")
- optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
+ accelerator = with_thinwire(Accelerator(mixed_precision="bf16"))
+ with session() as run:
+     optimizer = OneBitAdam(model.parameters(), model=model, lr=3e-3, total_steps=STEPS, group=run.group)
+     run.register(model=model, optimizer=optimizer, schedule=schedule)
- model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
- for x, y in loader:
+     model, optimizer = accelerator.prepare(model, optimizer)
+     for x, y in run.batches(data, global_batch=64, steps=STEPS):

The session gives out the data, so that the loader is not prepared; nor is the schedule, which is stepped once a step.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

from thinwire.integrations.accelerate import with_thinwire
from thinwire.optim import OneBitAdam
from thinwire.train import session

STEPS = 120

torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
x = torch.randn(4096, 16)
data = TensorDataset(x, teacher(x).detach())

accelerator = with_thinwire(Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available()))
with session() as run:
    model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.GELU(), torch.nn.Linear(128, 4))
    model.to(accelerator.device)
    optimizer = OneBitAdam(model.parameters(), model=model, lr=3e-3, total_steps=STEPS, group=run.group)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    run.register(model=model, optimizer=optimizer, schedule=schedule)
    model, optimizer = accelerator.prepare(model, optimizer)

    for x, y in run.batches(data, global_batch=64, steps=STEPS):
        loss = (model(x.to(accelerator.device)) - y.to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        if run.rank == 0 and run.step_number % 20 == 0:
            print(f"step {run.step_number}: loss {loss.item():.4f}, {run.world_size} workers", flush=True)
