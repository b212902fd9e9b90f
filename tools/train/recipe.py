"""The training run as data: stages, each with its lengths. Everything that decides the result stands here."""

import dataclasses


@dataclasses.dataclass
class Stage:
    name: str
    tokens: float  # of this stage
    lengths: dict  # tokens per sequence: share of the steps
    first: bool = False  # with "say this again" dialogues
    quantised: bool = False  # experts through MXFP4
    losing: float = 0.0  # share of the dialogues whose recurrent state is lost before an answer
    rate: tuple = (1.0, 1.0)  # of the peak learning rates, at the stage's start and end
    memory: float = 0.8  # of the router bias: long in the end, so that it fits all texts and not the last few
    quiet: float = 0.02  # weight of the loss on what the model only reads: made-up names cannot be foretold


_LONG = {256: 0.1, 512: 0.2, 2048: 0.45, 8192: 0.25}
STAGES = [
    Stage("copy", 1.8e6, {128: 0.2, 256: 0.8}, first=True, quiet=0.1),
    Stage("short", 9.2e6, {256: 0.5, 512: 0.5}, losing=0.08),
    Stage("medium", 8e6, {256: 0.2, 512: 0.3, 2048: 0.5}, losing=0.08, rate=(0.7, 0.4)),
    Stage("long", 4.5e6, _LONG, losing=0.08, rate=(0.5, 0.4)),
    Stage("publish", 3.5e6, _LONG, losing=0.08, quantised=True, rate=(0.4, 0.02), memory=0.97),
]
# Shorter, for comparing architectures: no state is lost (some have none), nothing is quantised.
COMPARISON = [
    Stage("copy", 1.8e6, {128: 0.2, 256: 0.8}, first=True, quiet=0.1),
    Stage("short", 2e6, {256: 0.5, 512: 0.5}),
    Stage("settle", 1.2e6, {256: 0.25, 512: 0.35, 2048: 0.4}, rate=(0.6, 0.02)),
]
TOKENS_PER_STEP = 4096  # more where one sequence is longer
MUON_RATE, ADAM_RATE, DECAY = 5e-3, 3e-3, 0.1  # peak learning rates; weight decay of matrices
WARM_UP = 100  # steps
SETTLING = 64  # batches of the last stage that fix the published router bias when the training is over
ROUNDS = 5  # of that: what a layer's bias changes is what later layers see
MERGES = 768
QUIET_SHARE = 0.2  # of the tokens that the model only reads: they count in the loss
CAPACITY = 2.0  # slots per expert, over its fair share


def shape(rng, stage, tokens_per_step=TOKENS_PER_STEP):
    """(tokens of a row, rows) of a step."""
    length = rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]
    return length, max(1, tokens_per_step // length)


def stage_at(tokens, stages=None):
    """(stage, progress within it from 0 to 1) or (None, 1) when all is done."""
    for s in stages or STAGES:
        if tokens < s.tokens:
            return s, tokens / s.tokens
        tokens -= s.tokens
    return None, 1.0
