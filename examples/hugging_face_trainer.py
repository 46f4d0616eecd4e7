"""Train a small Llama from scratch with Hugging Face's Trainer and learnable multipliers.

    python examples/hugging_face_trainer.py
    python examples/hugging_face_trainer.py --text book.txt --out llama --steps 2000

What is saved is an ordinary Llama: transformers loads it without this library, with the same loss.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from learnable_multipliers.integrations.transformers import MultiplierCallback, OptimizerFactory

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="file to learn (default: Python's library)")
parser.add_argument("--out", type=Path, default=Path("hugging_face_trainer"), help="folder")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
options = parser.parse_args()

files = [options.text] if options.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
sequences = data.split(options.length)[:-1]


class Sequences(Dataset):
    """Pieces of the text, a token for each byte."""

    def __init__(self, pieces: Sequence[Tensor]):
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


num_train = len(sequences) * 9 // 10
train_dataset = Sequences(sequences[:num_train])
eval_dataset = Sequences(sequences[num_train:][:200])

set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=options.length,
        bos_token_id=None,
        eos_token_id=None,
    )
)
arguments = TrainingArguments(
    str(options.out),
    max_steps=options.steps,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=50,
    learning_rate=4e-3,
    weight_decay=1.0,
    adam_beta2=0.95,
    lr_scheduler_type="cosine",
    warmup_steps=options.steps // 20,
    max_grad_norm=0,  # the optimizer clips, by the norm of the raw gradients
    bf16=torch.cuda.is_available(),
    dataloader_pin_memory=torch.cuda.is_available(),
    logging_steps=max(options.steps // 5, 1),
    save_strategy="no",
    report_to="none",
)
# The optimizer and the callback are all that differs from training without multipliers.
settings = {"training_args": arguments, "placement": "full", "max_grad_norm": 1.0}
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    # Trainer takes factories here, though its type names optimizers alone.
    optimizer_cls_and_kwargs=(OptimizerFactory, settings),  # pyright: ignore[reportArgumentType]
)
MultiplierCallback().attach(trainer)
trainer.train()

for log in trainer.state.log_history:
    if "multipliers/largest" in log:
        spread = f"{log['multipliers/smallest']:.2f} to {log['multipliers/largest']:.2f}"
        print(f"step {log['step']}: loss {log['loss']:.3f}, multipliers {spread}")

trainer.save_model()
reloaded = AutoModelForCausalLM.from_pretrained(options.out)
again = Trainer(model=reloaded, args=arguments, eval_dataset=eval_dataset)
print(f"validation loss, trained:  {trainer.evaluate()['eval_loss']:.6f}")
print(f"validation loss, reloaded: {again.evaluate()['eval_loss']:.6f}")
