"""Trainers of transformers and TRL over tiny models made from a config: nothing is downloaded."""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WORDS = 24  # w0 … w23
ITEMS = 16  # held-out
KINDS = ("trainer", "sft", "dpo", "grpo")


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(WORDS)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **settings,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


def sentence(seed: int, length: int = 12) -> list[int]:
    """Token ids that mostly count upwards."""
    generator = torch.Generator().manual_seed(seed)
    word = int(torch.randint(WORDS, (), generator=generator))
    ids = []
    for _ in range(length):
        ids.append(3 + word)
        word = (word + 1 + int(torch.rand((), generator=generator) < 0.1)) % WORDS
    return ids


def text(seed: int, length: int = 12) -> str:
    return " ".join(f"w{i - 3}" for i in sentence(seed, length))


def heldout(model: torch.nn.Module, items: Sequence[int]) -> list[float]:
    """Mean nats per token of unseen sentences."""
    losses = []
    for item in items:
        ids = torch.tensor([sentence(1_000_000 + item)])
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    return losses


def p_of(word: str, model: torch.nn.Module) -> float:
    """Probability of one word after another one, mean over the first."""
    ids = torch.arange(3, 3 + WORDS).reshape(-1, 1)
    return float(model(input_ids=ids).logits[:, -1].softmax(-1)[:, 3 + int(word[1:])].mean())


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map dataset of sentences for a plain Trainer."""

    def __init__(self, count: int = 37) -> None:
        self.count, self.asked = count, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        ids = torch.tensor(sentence(index))
        return {"input_ids": ids, "labels": ids}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The same as an iterable dataset."""

    def __init__(self, count: int = 37) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


def settings(folder: Path | str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }


def plain(folder: Path | str, model: Any = None, dataset: Any = None, evaluated: Any = None, **changes: Any) -> Trainer:
    if isinstance(dataset, Stream):
        changes = {"max_steps": 1, **changes}  # the Trainer asks for it; a replica's is the run's
    args = TrainingArguments(**settings(folder, **changes))
    rows = Rows() if dataset is None else dataset
    return Trainer(model or llama(), args, train_dataset=rows, eval_dataset=evaluated)


def sft(folder: Path | str, model: Any = None, dataset: Any = None, peft_config: Any = None, **changes: Any) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"text": [text(i) for i in range(37)]}) if dataset is None else dataset
    args = SFTConfig(**settings(folder, max_length=16, **changes))
    return SFTTrainer(model or llama(), args, train_dataset=rows, processing_class=tokenizer(), peft_config=peft_config)


def dpo(folder: Path | str, model: Any = None, **changes: Any) -> Trainer:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = {
        "prompt": [text(i, 4) for i in range(21)],
        "chosen": [" " + text(i, 4) for i in range(21)],
        "rejected": [" " + text(i + 500, 4) for i in range(21)],
    }
    args, data = DPOConfig(**settings(folder, **changes)), Dataset.from_dict(rows)
    return DPOTrainer(model or llama(), ref_model=llama(), args=args, train_dataset=data, processing_class=tokenizer())


def share_of(word: str) -> Any:
    """A reward function: the share of one word in a completion."""

    def share(completions: list[str], **_: Any) -> list[float]:
        return [each.split().count(word) / max(1, len(each.split())) for each in completions]

    return share


def grpo(folder: Path | str, model: Any = None, reward: Any = None, **changes: Any) -> Trainer:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    changes = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 2e-2,
        "beta": 0.0,
        **changes,
    }
    args = GRPOConfig(**settings(folder, **changes))
    return GRPOTrainer(
        model or llama(),
        reward_funcs=reward or share_of("w3"),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [text(i, 3) for i in range(40)]}),
        processing_class=tokenizer(),
    )


def prompts(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [text(i, 4) for i in range(21)], **columns})


def kto(folder: Path | str, **changes: Any) -> Trainer:
    from trl import KTOConfig, KTOTrainer

    rows = prompts(
        completion=[" " + text(i + 500 * (i % 2), 4) for i in range(21)], label=[i % 2 == 0 for i in range(21)]
    )
    args = KTOConfig(**settings(folder, **changes))
    return KTOTrainer(llama(), ref_model=llama(), args=args, train_dataset=rows, processing_class=tokenizer())


def orpo(folder: Path | str, **changes: Any) -> Trainer:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = prompts(chosen=[" " + text(i, 4) for i in range(21)], rejected=[" " + text(i + 500, 4) for i in range(21)])
    args = ORPOConfig(**settings(folder, max_length=16, **changes))
    return ORPOTrainer(llama(), args=args, train_dataset=rows, processing_class=tokenizer())


def gkd(folder: Path | str, **changes: Any) -> Trainer:
    """Half of its batches are completions of the student's own."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    talks = [
        [{"role": "user", "content": text(i, 3)}, {"role": "assistant", "content": text(i + 300, 3)}] for i in range(21)
    ]
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    args = GKDConfig(**settings(folder, max_length=16, max_new_tokens=4, lmbda=0.5, **changes))
    rows = Dataset.from_dict({"messages": talks})
    return GKDTrainer(llama(), teacher_model=llama(seed=1), args=args, train_dataset=rows, processing_class=made)


def online_dpo(folder: Path | str, **changes: Any) -> Trainer:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(**settings(folder, max_new_tokens=6, max_length=32, **changes))
    return OnlineDPOTrainer(
        llama(),
        ref_model=llama(),
        reward_funcs=share_of("w3"),
        args=args,
        train_dataset=prompts(),
        processing_class=tokenizer(),
    )


def whisper(folder: Path | str, **changes: Any) -> Trainer:
    """Speech to text: features of noise, and labels."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 20}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=WORDS + 3, max_target_positions=32, dropout=0.1, **sizes, **heads, **tokens)
    )

    class Speech(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            noise = torch.randn(8, 40, generator=torch.Generator().manual_seed(index))
            return {"input_features": noise, "labels": torch.tensor(sentence(index, 6))}

    args = Seq2SeqTrainingArguments(**settings(folder, **changes))
    return Seq2SeqTrainer(model, args, train_dataset=Speech(21))


def streamed(folder: Path | str, **changes: Any) -> Trainer:
    """A streamed data set of `datasets`, shuffled through a buffer."""
    from datasets import Dataset

    rows = [{"input_ids": sentence(i), "labels": sentence(i)} for i in range(21)]
    data = Dataset.from_list(rows).to_iterable_dataset(num_shards=3).shuffle(seed=7, buffer_size=5)
    args = TrainingArguments(**settings(folder, max_steps=1, **changes))
    return Trainer(llama(), args, train_dataset=data)


MAKERS: dict[str, Any] = {
    "trainer": plain,
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "kto": kto,
    "orpo": orpo,
    "gkd": gkd,
    "online_dpo": online_dpo,
    "whisper": whisper,
    "streamed": streamed,
}


def train(ctx: Any) -> None:
    """An entrypoint: `args["kind"]` of trainer with `args["settings"]`. Replica 1 may kill itself once."""
    from diloco_orchestrator import train_as_replica

    folder, kind = Path(ctx.args["folder"]), ctx.args["kind"]
    changes = {**ctx.args.get("settings", {}), **(sharded() if ctx.args.get("sharded") and ctx.ranks > 1 else {})}
    trainer = MAKERS[kind](folder / f"trainer-{ctx.replica_id}", **changes)
    step = ctx.args.get("killed_after")
    if step and ctx.replica_id == 1 and ctx.rank == ctx.ranks - 1 and not (folder / "killed").exists():
        trainer.add_callback(KillsItself(step, folder / "killed"))
    scored = {"heldout": heldout, "heldout_items": list(range(ITEMS))} if kind != "whisper" else {}
    train_as_replica(trainer, ctx, **scored)
    kinds = {type(parameter.data).__name__ for parameter in trainer.model.parameters()}
    (folder / f"kinds-{ctx.replica_id}.{ctx.rank}").write_text(" ".join(sorted(kinds)))


def sharded() -> dict[str, Any]:
    """The settings of a trainer that shards its model over this replica's ranks, on the CPU.

    accelerate shards on GPUs only. Told that this CPU is one, it makes the same calls of `fully_shard`, over gloo.
    Without TRL's bf16, which transformers refuses on a GPU that is none.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_USE_CPU"], os.environ["ACCELERATE_TORCH_DEVICE"] = "false", "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    return {
        "use_cpu": False,
        "bf16": False,
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    }


class Marked(Rows):
    """Sentences that begin with a word of their own."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)  # ends the iteration of a sampler that asks for every length
        ids = torch.tensor([3 + index, *sentence(index, 7)])
        return {"input_ids": ids, "labels": ids}


class Shuffled(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The same as a stream, in an order drawn from Python's random numbers."""

    def __iter__(self) -> Any:
        rows = Marked(WORDS)
        return (rows[index] for index in random.sample(range(WORDS), WORDS))


class Remembers(Trainer):
    """A Trainer that writes down the items of every step, and may have a loader of its own."""

    trained: Path
    own_loader: Any = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        with self.trained.open("a") as file:
            file.write("".join(f"{first - 3}\n" for first in inputs["input_ids"][:, 0].tolist()))
        return super().compute_loss(model, inputs, *args, **named)

    def get_train_dataloader(self) -> Any:
        return self.own_loader or super().get_train_dataloader()


UNSEEDED = {"accelerator_config": {"use_seedable_sampler": False}}
ORDERS: dict[str, dict[str, Any]] = {  # settings of the trainer, beside its dataset
    "seedable": {},
    "unseeded": UNSEEDED,
    "by length": {"train_sampling_strategy": "group_by_length"},
    "own loader": {},
    "weighted": {},
    "stream": {"max_steps": 1},
    "seeded by replica": {},
}


def train_dealt(ctx: Any) -> None:
    """An entrypoint: 24 items, dealt in an order of `args["kind"]`. Replica 1 kills itself once."""
    from diloco_orchestrator import train_as_replica

    kind, folder = ctx.args["kind"], Path(ctx.args["folder"])
    changes = {**ORDERS[kind], **({"seed": 42 + ctx.replica_id} if kind == "seeded by replica" else {})}
    rows = Shuffled() if kind == "stream" else Marked(WORDS)
    trainer = Remembers(llama(), TrainingArguments(**settings(folder / "trainer", **changes)), train_dataset=rows)
    trainer.trained = folder / f"items-{ctx.replica_id}.txt"
    if kind == "own loader":
        trainer.own_loader = DataLoader(rows, batch_size=2, shuffle=True)
    if kind == "weighted":
        sampler = WeightedRandomSampler([1.0 + i for i in range(WORDS)], WORDS, replacement=False)
        trainer.own_loader = DataLoader(rows, batch_size=2, sampler=sampler)
    if ctx.replica_id == 1 and (step := ctx.args.get("killed_after")) and not (folder / "killed").exists():
        trainer.add_callback(KillsItself(step, folder / "killed"))
    train_as_replica(trainer, ctx)


class KillsItself(TrainerCallback):
    def __init__(self, step: int, marker: Path) -> None:
        self.step, self.marker = step, marker

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train_grpo(ctx: Any) -> None:
    """An entrypoint: the reward is the share of w3; what is wanted is `args["wanted"]`."""
    from diloco_orchestrator import train_as_replica

    wanted = ctx.args["wanted"]
    trainer = grpo(Path(ctx.args["folder"]) / f"trainer-{ctx.replica_id}", reward=share_of("w3"))

    def score(model: torch.nn.Module, items: Sequence[int]) -> list[float]:
        return [p_of(wanted, model)] * len(items)

    train_as_replica(trainer, ctx, heldout=score, heldout_items=list(range(ITEMS)))


def train_prompt(ctx: Any) -> None:
    """An entrypoint: learns a prompt of four tokens before a model that `args["sharded"]` shards."""
    from peft import PromptTuningConfig

    from diloco_orchestrator import train_as_replica

    prompt = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    changes = sharded() if ctx.args.get("sharded") and ctx.ranks > 1 else {}
    trainer = sft(Path(ctx.args["folder"]) / f"trainer-{ctx.replica_id}", peft_config=prompt, **changes)
    train_as_replica(trainer, ctx, heldout=heldout, heldout_items=list(range(ITEMS)))


def train_lora(ctx: Any) -> None:
    from peft import LoraConfig

    from diloco_orchestrator import train_as_replica

    own = {"r": 2, "lora_alpha": 4, **ctx.args.get("adapter", {})}
    own |= ctx.args.get("adapter_of_replica_1", {}) if ctx.replica_id == 1 else {}
    adapter = LoraConfig(**own, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    changes = sharded() if ctx.args.get("sharded") and ctx.ranks > 1 else {}
    trainer = sft(Path(ctx.args["folder"]) / f"trainer-{ctx.replica_id}", peft_config=adapter, **changes)
    train_as_replica(trainer, ctx, heldout=heldout, heldout_items=list(range(ITEMS)))
