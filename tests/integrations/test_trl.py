"""TRL's SFTTrainer and DPOTrainer with one more line, two ranks over gloo: they train as under DDP, and send less.

All runs are made once, by two processes, for importing TRL costs more than any of them.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing
from tests.once import once

RUNS = """
import copy, json
from tests.integrations.hugging_face import prepare_environment
prepare_environment(rank, size)
join()
import datasets, peft, trl
from torch.nn.parallel import DistributedDataParallel
from examples.small import answer, evasion, question, small_model, small_tokenizer
from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import Adam, OneBitAdam

datasets.disable_progress_bars()
gc.freeze()  # each train() collects garbage, and would walk through all of these modules
told, TOKENIZER = {}, small_tokenizer()
KEYS = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "rewards/margins", "eval_loss")

def asked(numbers):
    return [{"prompt": question(n), "completion": answer(n)} for n in numbers]

def paired(numbers):
    return [{"prompt": question(n), "chosen": answer(n), "rejected": evasion(n)} for n in numbers]

def arguments(kind, name, given):
    # eps is above the rounding of gradients that are zero, which would be steps of full length, in any direction
    usual = dict(use_cpu=True, per_device_train_batch_size=2, learning_rate=1e-2, max_steps=4, logging_steps=1,
                 max_grad_norm=0.5, adam_epsilon=1e-5, bf16=False, report_to=[], save_strategy="no",
                 disable_tqdm=True, dataloader_pin_memory=False)
    return kind(os.path.join(folder, name), **{**usual, **given})

def sft(name, adapters=None, seed=0, data=None, **given):
    data = datasets.Dataset.from_list(data or asked(range(40)))
    held_out = datasets.Dataset.from_list(asked(range(90, 94)))
    return trl.SFTTrainer(small_model(seed + rank), arguments(trl.SFTConfig, name, given), train_dataset=data,
                          eval_dataset=held_out, processing_class=TOKENIZER, peft_config=adapters)

def dpo(name, adapters=None, **given):
    reference = None if adapters else small_model(9)
    data = datasets.Dataset.from_list(paired(range(40)))
    return trl.DPOTrainer(small_model(rank), reference, arguments(trl.DPOConfig, name, given), train_dataset=data,
                          processing_class=TOKENIZER, peft_config=adapters)

def weights(trained):
    return torch.cat([param.detach().flatten() for param in trained.model.parameters()])

def everywhere(x):
    others = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(others, x)
    return all(torch.equal(x, other) for other in others)

def optimizer_of(trained):
    return trained.optimizer.optimizer

# 1. all of them by AdamW under DDP, and by Adam without. Answers are of 1 to 5 numbers, so no two ranks have as many
# tokens; a rank begins with other weights than rank 0, whose are everybody's
LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
for name, made, given in (
    ("sft", sft, dict(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=4)),
    ("packed", sft, dict(packing=True, max_length=96)),
    ("defaults", sft, dict(bf16=None, average_tokens_across_devices=False)),
    ("dpo", dpo, dict(sync_ref_model=True, ref_model_sync_steps=2)),
    ("lora", dpo, dict(adapters=LORA)),
):
    theirs = made(name, **given)
    ours = with_thinwire(made(name, **given), Adam)
    names = [name for name, param in theirs.model.named_parameters() if param.requires_grad]
    began = [param.detach().clone() for param in made(name, **given).model.parameters() if param.requires_grad]
    theirs.train()
    ours.train()
    both = [torch.cat([one.model.get_parameter(name).detach().flatten() for name in names]) for one in (theirs, ours)]
    moved = (both[0] - torch.cat([param.flatten() for param in began])).norm()
    told[name] = {
        "wrapped": isinstance(theirs.model_wrapped, DistributedDataParallel),
        "ours_wrapped": isinstance(ours.model_wrapped, DistributedDataParallel),
        "apart": ((both[0] - both[1]).norm() / moved).item(),
        "replicas": everywhere(weights(ours)),
        "trained": [len(both[1]), optimizer_of(ours).space.layout.num_live],
        "logs": {key: [[entry[key] for entry in one.state.log_history if key in entry] for one in (theirs, ours)]
                 for key in KEYS},
    }
    if name == "sft":
        by_tokens, far = both[0], moved
other = sft("by ranks", gradient_accumulation_steps=2, average_tokens_across_devices=False)
other.train()
told["tokens_matter"] = ((weights(other) - by_tokens).norm() / far).item()

# 2. one bit a value, a checkpoint of TRL's, and the run that goes on from it
given = dict(max_steps=20, save_strategy="steps", save_steps=12)
sent = {}

class Count(trl.trainer.callbacks.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        sent[state.global_step] = optimizer_of(long).stats()["sent_bytes"]

long = with_thinwire(sft("onebit", **given), OneBitAdam, warmup=8)
long.add_callback(Count())
long.train()
resumed = with_thinwire(sft("onebit", seed=5, **given), OneBitAdam, warmup=8)
resumed.train(resume_from_checkpoint=os.path.join(folder, "onebit", "checkpoint-12"))
told["onebit"] = {
    "bytes": {step: sent[step] - sent[step - 1] for step in (6, 11, 18)},
    "losses": [entry["loss"] for entry in long.state.log_history if "loss" in entry],
    "replicas": everywhere(weights(long)),
    "resumed_equal": torch.equal(weights(long), weights(resumed)),
}
say("told", json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What rank 0 saw of all runs."""
    for library in ("trl", "peft"):
        if importlib.util.find_spec(library) is None:
            missing(f"{library} is not installed: pip install {library}")

    def make(folder):
        ranks = start(RUNS, 2, folder, timeout_s=60)
        assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
        return json.loads(said(folder, 0, "told"))

    return once(tmp_path_factory, "trl", make)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["sft", "packed", "defaults", "dpo", "lora"])
def test_adam_in_trl_is_adamw_under_ddp_to_rounding_with_as_many_tokens_on_no_two_ranks(told, run):
    here = told[run]
    assert here["wrapped"]
    assert not here["ours_wrapped"]
    assert here["replicas"]
    in_bf16 = run == "defaults"  # an ulp of the mean flips roundings to bfloat16, 2^-9 of a value
    assert here["apart"] < (0.1 if in_bf16 else 1e-4)
    for theirs, ours in here["logs"].values():
        assert ours == pytest.approx(theirs, rel=0.02 if in_bf16 else 1e-3, abs=1e-5)
    logged = {"loss", "num_tokens", "mean_token_accuracy", *(["rewards/margins"] if run in ("dpo", "lora") else [])}
    assert all(len(here["logs"][key][1]) == 4 for key in logged)
    trained, exchanged = here["trained"]
    assert exchanged == trained < (40_000 if run == "lora" else 10**6)


@pytest.mark.slow
def test_a_mean_over_all_tokens_is_not_the_mean_of_the_ranks_means(told):
    assert told["tokens_matter"] > 0.003  # what is apart to rounding is below 1e-4


@pytest.mark.slow
def test_onebit_adam_sends_a_twentieth_and_goes_on_from_trls_checkpoint_bit_for_bit(told):
    here = told["onebit"]
    assert here["replicas"]
    assert here["resumed_equal"]
    warmup, compressed, later = (here["bytes"][step] for step in ("6", "11", "18"))
    assert compressed == pytest.approx(later, rel=1e-3)
    assert warmup / compressed > 20
    assert sum(here["losses"][-4:]) < 0.8 * sum(here["losses"][:4])
