"""A plain loop whose result does not depend on who computed what: exact.py FOLDER STEPS LOADERS."""

import torch
from exact_parts import LOADERS, STEPS, Exact, Samples, keep

from thinwire.optim import Adam
from thinwire.train import session


class Model(Exact, torch.nn.Module):
    def forward(self, x):
        return self.loss(x)


with session() as run:
    model = Model()
    optimizer = Adam(model.parameters(), lr=0.1, group=run.group)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    counters = {"steps": 0}
    run.register(model=model, optimizer=optimizer, scheduler=scheduler, ema=average, counters=counters)
    for x in run.batches(Samples(20), global_batch=8, steps=STEPS, loader={"num_workers": LOADERS}):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        counters["steps"] += 1
        run.report(loss=loss, steps=counters["steps"])

vectors = optimizer.state_dict()["vectors"]
keep([model.state_dict(), average.state_dict(), scheduler.state_dict(), counters, vectors])
