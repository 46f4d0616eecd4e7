"""Find the weights that noise and decay hold, in a run with plain torch.optim.AdamW.

    python examples/diagnose_existing_run.py
    python examples/diagnose_existing_run.py --text book.txt --out run

There are no multipliers here, and training is as it was: two lines are added to the loop, the
monitor and the diagnosis. The end reads the same from a checkpoint on disk, without the run.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaConfig, LlamaForCausalLM

import learnable_multipliers as lrm
from learnable_multipliers.integrations.dcp_checkpoint import read_dcp_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="file to learn (default: Python's library)")
parser.add_argument("--out", type=Path, default=Path("diagnose_existing_run"), help="checkpoint")
parser.add_argument("--steps", type=int, default=700)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--weight-decay", type=float, default=1.0)
args = parser.parse_args()

files = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay
)
monitor = lrm.Monitor(optimizer, model=model)  # before the first step: it notes the start

for step in range(args.steps):
    begin = torch.randint(len(data) - 32, (8, 1))
    tokens = data[begin + torch.arange(32)].long()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 100 == 0:
        numbers = monitor.health().metrics()  # for any logger
        print(
            f"step {step + 1}: loss {loss.item():.3f}, "
            f"{numbers['trapped/matrices']:.0%} of the matrices trapped, "
            f"{numbers['free/matrices']:.0%} free, noise {numbers['noise/matrices']:.2f}"
        )

# The rate is constant here; give a list, one for each step, if it is not.
diagnosis = lrm.diagnose(optimizer, model, lrs=args.lr)
print(diagnosis)
print(diagnosis.summary())
expected = lrm.equilibrium_rms(lr=args.lr, weight_decay=args.weight_decay)
print(f"closed form: noise and decay lead to an rms of {expected:.4f}")

# From disk: here a folder of torch.distributed.checkpoint. `lrm diagnose FOLDER` reads those of
# the Hugging Face Trainer, too.
state = {
    "model": get_model_state_dict(model),
    "optimizer": get_optimizer_state_dict(model, optimizer),
}
save(state, checkpoint_id=args.out, no_dist=True)
with torch.device("meta"):
    skeleton = LlamaForCausalLM(config)  # for the roles of the matrices; weights are on disk
saved = read_dcp_checkpoint(args.out, skeleton)
from_disk = lrm.diagnose(saved.optimizer, saved.model, lrs=args.lr)
print(f"from {args.out}, step {saved.step}: {from_disk.summary()}")
