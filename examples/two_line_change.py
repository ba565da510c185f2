"""A plain PyTorch training loop that two changed lines make send one bit a value. It called init_process_group before.

torchrun --nproc-per-node 2 examples/two_line_change.py         two workers on this machine
python examples/two_line_change.py                              one worker, nothing is sent

- model = DistributedDataParallel(model)
- optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
+ optimizer = OneBitAdam(model.parameters(), model=model, lr=2e-3, warmup=40)
"""

import os

import torch
import torch.distributed as dist

from thinwire.optim import OneBitAdam

STEPS = 200

if "RANK" in os.environ:  # set by torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank() if dist.is_initialized() else 0

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64)).requires_grad_(False)
optimizer = OneBitAdam(model.parameters(), model=model, lr=2e-3, warmup=40)

torch.manual_seed(1 + rank)  # every worker has data of its own
start_bytes = warmup_bytes = optimizer.stats()["sent_bytes"]  # rank 0's parameters have gone to all
for step in range(1, STEPS + 1):
    x = torch.randn(64, 64)
    optimizer.zero_grad()
    loss = (model(x) - teacher(x)).square().mean()
    loss.backward()  # gradients stay local: the optimizer does all communication
    optimizer.step()
    if step == optimizer.frozen_at:
        warmup_bytes = optimizer.stats()["sent_bytes"]
    if rank == 0 and (step == 1 or step % 40 == 0):
        stats = optimizer.stats()
        print(
            f"step {step:3d}  next phase {stats['phase']:10s}  loss {loss.item():.4f}  "
            f"sent {stats['sent_bytes']:,} bytes"
        )

if rank == 0:
    sent = optimizer.stats()["sent_bytes"]
    if sent > start_bytes:
        warmup = (warmup_bytes - start_bytes) / optimizer.frozen_at
        compressed = (sent - warmup_bytes) / (STEPS - optimizer.frozen_at)
        print(f"bytes a step: {warmup:,.0f} in warm-up, {compressed:,.0f} compressed")
if dist.is_initialized():
    dist.destroy_process_group()
