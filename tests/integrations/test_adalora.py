"""peft's AdaLoRA, which reads p.grad after each step and masks adapters by it, in Trainer over two processes."""

import importlib.util
import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing

for library in ("transformers", "peft"):
    if importlib.util.find_spec(library) is None:
        missing(f"{library} is not installed: pip install {library}")

TRAINED = """
import json
from tests.integrations.hugging_face import prepare_environment, sequences, small_gpt
prepare_environment(rank, size)
join()
import peft, transformers
from thinwire.integrations.accelerate import own_optimizer
from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import OneBitAdam

STEPS = 16

class Allocates(transformers.TrainerCallback):  # as peft's documentation has it
    scores = {}
    def on_optimizer_step(self, args, state, control, model, **_):
        model.base_model.update_and_allocate(state.global_step + 1)
        self.scores = dict(model.base_model.rankallocator.exp_avg_ipt) or self.scores  # forgotten at the end

def trained(**settings):
    torch.manual_seed(0)
    config = peft.AdaLoraConfig(
        init_r=6, target_r=2, tinit=2, tfinal=2, deltaT=1, total_step=STEPS, target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(small_gpt(0), config)
    args = transformers.TrainingArguments(
        os.path.join(folder, "out"), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
    trainer = transformers.Trainer(model, args, train_dataset=sequences(64), callbacks=[Allocates()])
    with_thinwire(trainer, OneBitAdam, warmup=4, **settings).train()
    return trainer

def everywhere(x):
    others = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(others, x.contiguous())
    return all(torch.equal(x, other) for other in others)

try:
    trained()
    refused = "was not"
except RuntimeError as error:
    refused = str(error)
trainer = trained(gradients="mean")
scores = next(one.scores for one in trainer.callback_handler.callbacks if isinstance(one, Allocates))
say("told", json.dumps({
    "refused": refused,
    "phase": str(own_optimizer(trainer.optimizer).phase),
    "parameters": all(everywhere(param.detach()) for param in trainer.model.parameters()),
    "scores": len(scores) > 0 and all(everywhere(score) for score in scores.values()),
    "masked": sum(int((p == 0).sum()) for name, p in trainer.model.named_parameters() if "lora_E" in name),
}))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_adalora_is_refused_until_gradients_are_the_mean_and_then_ranks_decide_alike(tmp_path):
    ranks = start(TRAINED, 2, tmp_path)
    assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    for rank in range(2):
        told = json.loads(said(tmp_path, rank, "told"))
        assert "AdaLoraModel, which reads p.grad after step()" in told["refused"]
        assert told["phase"] == "compressed"
        assert told["parameters"]
        assert told["scores"]
        assert told["masked"] > 0
