"""In place of a download, for the examples of fine-tuning: a model of 0.8 million weights, and a tokenizer of bytes.

With a model of your own write instead, as always:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and a chat template whose turns end with the token that ends a text."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT,
    )


def small_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of four layers that knows nothing yet."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 256,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )


def question(number: int) -> list[dict[str, str]]:
    """What a user asks, as a chat."""
    return [{"role": "user", "content": f"Which numbers follow {number}?"}]


def answer(number: int) -> list[dict[str, str]]:
    """What is to be answered: one to five numbers."""
    return [{"role": "assistant", "content": ", ".join(str(number + i) for i in range(1, 2 + number % 5))}]


def evasion(number: int) -> list[dict[str, str]]:
    """What is not."""
    return [{"role": "assistant", "content": "Who could say what follows " + "so large a number" * (number % 3)}]
