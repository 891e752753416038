"""Trains the demo model from a seed: `python -m penstock.engine.demo.train --out FOLDER`.

Takes an hour and a half on two CPU cores. It generates all training text itself.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from penstock.engine.demo.checkpoint import save_checkpoint
from penstock.engine.demo.corpus import (
    EARLY,
    END,
    FIFTH_ROUND,
    FOURTH_ROUND,
    LAST,
    LATE,
    SECOND_ROUND,
    SIXTH_ROUND,
    THIRD_ROUND,
    Encoder,
    Mixture,
    converse,
    texts,
    token_id,
)
from penstock.engine.demo.network import Network, NetworkConfig
from penstock.engine.demo.optimiser import Optimiser
from penstock.engine.demo.vocabulary import train_tokenizer

CHARACTERS_PER_TOKEN = 2.75  # generously: a row is filled, and its overhang cut off
TOKENS_PER_STEP = 6144
LENGTHS = (192, 512, 1024, 2048)
LENGTH_WEIGHTS = (0.22, 0.48, 0.16, 0.14)
TOKENIZER_CONVERSATIONS = 2500
LATE_STEP = 1151  # from here on the late mixture
LAST_STEP = 1851  # and from here on the last
FIRST_ROUND_STEPS = 2350
SECOND_ROUND_STEPS = 2670  # the first round's included
THIRD_ROUND_STEPS = 2850
FOURTH_ROUND_STEPS = 3550
FIFTH_ROUND_STEPS = 4750
FALL_STEPS = 2400  # where the fall of the first round would have ended
SAVE_EVERY_STEPS = 200
SAVE_STATE_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True)
class Rows:
    """Token ids [rows, length + 1] and whether each is to be learned."""

    token_ids: Tensor
    is_learned: Tensor


def sample_rows(
    rng: random.Random, encoder: Encoder, *, length: int, padding: int, mixture: Mixture
) -> Rows:
    """Return conversations cut or padded to one length, a step's worth of tokens."""
    token_rows, learned_rows = [], []
    for _ in range(TOKENS_PER_STEP // length):
        token_ids, is_learned = encoder.encode(
            converse(rng, int(length * CHARACTERS_PER_TOKEN), mixture=mixture)
        )
        missing = max(0, length + 1 - len(token_ids))
        token_rows.append((token_ids + [padding] * missing)[: length + 1])
        learned_rows.append((is_learned + [False] * missing)[: length + 1])
    return Rows(torch.tensor(token_rows), torch.tensor(learned_rows))


def loss_of(network: Network, rows: Rows) -> Tensor:
    """Return the mean cross entropy of the tokens to learn."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(rows.token_ids[:, :-1])
        # The head runs only where there is something to learn.
        is_target = rows.is_learned[:, 1:]
        logits = network.logits(hidden[is_target])
    return F.cross_entropy(logits.float(), rows.token_ids[:, 1:][is_target])


def save_state(
    path: Path, step: int, rng: random.Random, network: Network, optimiser: Optimiser
) -> None:
    """Write everything that the steps after `step` depend on."""
    unfinished = path.with_suffix(".part")
    state = {"step": step, "rng": rng.getstate(), "optimiser": optimiser.state()}
    torch.save({**state, "network": network.state_dict()}, unfinished)
    unfinished.replace(path)


def restore_state(path: Path, rng: random.Random, network: Network, optimiser: Optimiser) -> int:
    """Read a state, if there is one, and return the step to begin with."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=False)
    rng.setstate(state["rng"])
    optimiser.restore(state["optimiser"])
    network.load_state_dict(state["network"])
    return int(state["step"]) + 1


def mixture_at(step: int) -> Mixture:
    """Return the mixture of subjects at a step."""
    if step >= FIFTH_ROUND_STEPS:
        return SIXTH_ROUND
    if step >= FOURTH_ROUND_STEPS:
        return FIFTH_ROUND
    if step >= THIRD_ROUND_STEPS:
        return FOURTH_ROUND
    if step >= SECOND_ROUND_STEPS:
        return THIRD_ROUND
    if step > FIRST_ROUND_STEPS:
        return SECOND_ROUND
    return LAST if step >= LAST_STEP else LATE if step >= LATE_STEP else EARLY


def train(
    out: Path,
    *,
    seed: int,
    num_steps: int,
    state_path: Path | None = None,
    weights: Path | None = None,
) -> None:
    """Make tokenizer and network from the seed and save them, also now and then on the way.

    With a state file, an interrupted training resumes and ends with the same weights. With a
    checkpoint of five rounds as `weights`, only the sixth is done.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(2)  # the order of sums, and so the result, depends on it
    rng = random.Random(seed)
    if weights is None:
        tokenizer = train_tokenizer(texts(seed, TOKENIZER_CONVERSATIONS))
    else:
        tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    padding = token_id(tokenizer, END)
    config = NetworkConfig(vocab_size=tokenizer.get_vocab_size())
    network = Network(config)
    optimiser = Optimiser(
        network,
        num_steps=FALL_STEPS,
        later_rounds=(
            (FIRST_ROUND_STEPS, SECOND_ROUND_STEPS),
            (SECOND_ROUND_STEPS - 1, THIRD_ROUND_STEPS),
            (THIRD_ROUND_STEPS - 1, FOURTH_ROUND_STEPS),
            (FOURTH_ROUND_STEPS - 1, FIFTH_ROUND_STEPS),
            (FIFTH_ROUND_STEPS - 1, num_steps),
        ),
    )
    began = time.monotonic()
    first_step = restore_state(state_path, rng, network, optimiser) if state_path else 0
    if weights is not None and not first_step:
        network.load_state_dict(load_file(weights / "model.safetensors"), strict=False)
        first_step = FIFTH_ROUND_STEPS
    for step in range(first_step, num_steps):
        length = rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
        mixture = mixture_at(step)
        rows = sample_rows(rng, encoder, length=length, padding=padding, mixture=mixture)
        loss = loss_of(network, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(step)
        if step % 10 == 0:
            seconds = time.monotonic() - began
            print(f"step {step} length {length} loss {loss.item():.4f} {seconds:.0f} s", flush=True)
        if step and step % SAVE_EVERY_STEPS == 0:
            save_checkpoint(out, network, config, tokenizer)
        if state_path and step and step % SAVE_STATE_EVERY_STEPS == 0:
            save_state(state_path, step, rng, network, optimiser)
    save_checkpoint(out, network, config, tokenizer)
    print(f"trained {num_steps} steps in {time.monotonic() - began:.0f} s")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5350)
    parser.add_argument("--state", type=Path, help="file to resume from after an interruption")
    parser.add_argument("--weights", type=Path, help="checkpoint to do only the last round with")
    arguments = parser.parse_args()
    train(
        arguments.out,
        seed=arguments.seed,
        num_steps=arguments.steps,
        state_path=arguments.state,
        weights=arguments.weights,
    )


if __name__ == "__main__":
    main()
