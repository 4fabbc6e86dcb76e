"""A Llama made from a config and a byte-level tokenizer with a real chat template: nothing is downloaded.

For your own model: return what `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` give.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, without merges, so that every machine makes the same one."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, START, END, *alphabet])}
    made = Tokenizer(BPE(vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    made.add_special_tokens([AddedToken(each, special=True) for each in (PAD, START, END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, padding_side="right", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat.jinja").read_text()
    return tokenizer


def make_model(seed: int, hidden_size: int = 64, layers: int = 2) -> LlamaForCausalLM:
    """A small Llama with the weights of this seed."""
    config = LlamaConfig(
        vocab_size=3 + 256,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
