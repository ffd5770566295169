"""The conversion: an autoregressive (AR) model read as a block-diffusion one, on the same weights.

Paper: "The conversion"; block diffusion: Arriola et al., 2025 (BD3-LM). Everything that is *about* the conversion has
its one home here: the token shift, canvases, who may look at whom, masking schedules, text and canvases, the commit rule,
the loss and replay. Training, sampling and RL all call these.

The shift. An AR model predicts token i at position i - 1. Take its own inputs and targets for a prompt p and output x:

    inputs    u_0 = last prompt token, u_i = x_{i-1}          targets    y_i = x_i          i = 0 ... R - 1

and cut i into blocks of B. To hide target i from its own block, put <mask> at u_{i+1}, unless i + 1 opens a block:
then x_i is not an input of this block at all. So every block opens with a real token and predicts B targets from B
inputs. With B = 1 nothing is ever masked and every line below is plain AR.

                         block 0                 block 1                      B = 4, x = "w e   a r e   o n e"
    inputs   u:   p_last  x0   x1   x2  |  x3   x4   x5   x6
    targets  y:   x0      x1   x2   x3  |  x4   x5   x6   x7
    hide x1, x3:  p_last  x0  <m>   x2  |                            (x3 opens the next block: nothing to mask here)

Who may look at whom. Give every position a block number; prompt tokens are blocks of their own, numbered below 0. Then
one rule serves causal prompts, AR, block diffusion, training, cached decoding and replay:

    q may look at k   <=>   k's block is not later than q's.

Text and canvases. Training and replay score many canvases (partly hidden copies of a block) of one text. BD3-LM packs
text and noisy copies into one long row; here the text goes through the model once and its keys and values are kept,
then every canvas is a row of its own that reads those of the earlier blocks, just as while decoding. The same numbers,
and attention does not pay for pairs of canvases that may not see each other:

    forward 1    prompt | x_0 ... (clean)                                     n rows of P + R - B tokens
    forward 2    canvas of block j of row r, after the blocks < j of row r    m rows of B tokens

Left out: a time embedding (the masks themselves say how noisy a canvas is), the 1/t weight where complementary views
make it unnecessary (each target is hidden exactly once), and a bidirectional prompt (the AR cache stays valid).
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model import Recorded

BLOCK_LEN = 32                      # targets of a block, where nothing else is said (the paper's)
SCHEDULES = ("complementary", "linear", "cosine")


# === 1. Canvases ======================================================================================================

def pad_to_block(output, eos, block_len):
    """An output with its tail: <eos> up to the end of the last block, nothing after that."""
    return output + [eos] * (-len(output) % block_len)


def convert(model, tok):
    """AR weights -> a model that can read canvases: every tensor stays, but for one row of the embedding. AR never
    used <mask>; a new token starts at the mean of the others, so it looks like "some token" and not like noise."""
    with torch.no_grad():
        known = torch.arange(tok.vocab, device=model.embed.weight.device) != tok.mask
        model.embed.weight[tok.mask] = model.embed.weight[known].mean(0)


def shift(prompt_last, outputs):
    """The token shift, in its one place. prompt_last (n,), outputs (n, R) -> inputs u (n, R)."""
    return torch.cat((prompt_last[:, None], outputs[:, :-1]), dim=1)


def canvas(inputs, hidden, mask_id, block_len):
    """Inputs u (..., R) with the hidden targets (..., R) masked out of their own blocks. R is a multiple of B."""
    before = torch.cat((torch.zeros_like(hidden[..., :1]), hidden[..., :-1]), dim=-1)    # was target i - 1 hidden?
    opens = torch.arange(inputs.shape[-1], device=inputs.device) % block_len == 0
    return torch.where(before & ~opens, mask_id, inputs)


def may_look(q_block, k_block):
    """The rule above. (..., q) and (..., k) block numbers -> (..., q, k) booleans."""
    return k_block[..., None, :] <= q_block[..., :, None]


# === 2. Masking schedules =============================================================================================

def draw_hidden(n, length, block_len, generator, schedule="complementary", full=0.0):
    """Which targets to hide. Returns hidden (views, n, length) and weight (views, n, length) of the hidden ones.

    A level t is drawn for each block, stratified over the blocks of the whole batch (evenly spread levels vary less
    than independent ones), and each target of the block is hidden with probability t.

    complementary  two views: what one hides, the other shows. Each target is hidden exactly once, so weight 1 and no
                   division by t (whose 1/t explodes near 0). A share `full` of the blocks has t = 1: everything
                   hidden, which is where decoding starts.
    linear         one view, weight 1/t (MDLM, Sahoo et al., 2024, eq. 10, for alpha_t = 1 - t), with one repair: a
                   block in which chance hides nothing hides one target all the same. So a target of a block of B is
                   hidden with probability p = t + (1 - t)^B / B, and the weight is 1/p: unbiased, and at most B where
                   1/t would explode.
    cosine         the same with t = cos(pi/2 (1 - u)), which hides much more often than little (MaskGIT).
    """
    blocks = -(-length // block_len)
    strata = torch.randperm(n * blocks, generator=generator).view(n, blocks)
    u = (strata + torch.rand(n, blocks, generator=generator)) / (n * blocks)             # (n, blocks) in (0, 1)
    if schedule == "cosine":
        u = torch.cos(torch.pi / 2 * (1 - u))
    elif schedule == "complementary":
        u = torch.where(torch.rand(n, blocks, generator=generator) < full, 1.0, u)
    elif schedule != "linear":
        raise ValueError(f"unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    t = u.repeat_interleave(block_len, dim=1)[:, :length]                                 # (n, length)
    noise = torch.rand(n, length, generator=generator)
    hidden = noise < t
    if schedule == "complementary":
        return torch.stack((hidden, ~hidden)), torch.ones(2, n, length)
    padded = F.pad(noise, (0, blocks * block_len - length), value=2.0).view(n, blocks, block_len)
    least = F.one_hot(padded.argmin(-1), block_len).bool().view(n, -1)[:, :length]       # smallest noise of its block
    size = (padded < 2).sum(-1, keepdim=True).expand_as(padded).reshape(n, -1)[:, :length]   # the last may be shorter
    return (hidden | least)[None], (1 / (t + (1 - t) ** size / size))[None]


# === 3. Text and canvases =============================================================================================

@dataclass
class Text:
    """Prompts and outputs, clean, ready for one forward: [prompt | output inputs u], left-padded so outputs line up.

    tokens, positions, there (n, T): there is False for pads; T = P' + R, with P' = padded prompt length without the last
    prompt token, which is u_0. block (T,): block numbers. mask (T, T) or (n, 1, T, T). target (n, R): y. start: P'.
    """
    tokens: torch.Tensor
    positions: torch.Tensor
    there: torch.Tensor
    block: torch.Tensor
    mask: torch.Tensor
    target: torch.Tensor
    start: int
    block_len: int

    def to(self, device):
        return Text(*(x.to(device) if torch.is_tensor(x) else x for x in vars(self).values()))

    def blocks(self, x):
        """(n, T) -> (n, blocks, B): the output's part, in blocks."""
        return x[:, self.start:].unflatten(1, (-1, self.block_len))


def pad_prompts(prompts, pad_id):
    """Lists of tokens -> (tokens (n, P), there (n, P)): left-padded, with an explicit validity mask (a pad id that
    could also be content is never used to guess it)."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts])
    there = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts])
    return tokens, there


def pack(prompts, outputs, tok, block_len):
    """prompts, outputs: lists of token lists -> Text. R is the longest output in whole blocks; outputs are filled with
    <eos> (their weight decides what counts)."""
    length = max(len(pad_to_block(o, tok.eos, block_len)) for o in outputs)
    prompt, there = pad_prompts(prompts, tok.pad)
    target = torch.tensor([o + [tok.eos] * (length - len(o)) for o in outputs])           # (n, R)
    u = shift(prompt[:, -1], target)                                                      # (n, R)
    prompt, there = prompt[:, :-1], there[:, :-1]                                         # u_0 is the last prompt token
    n, p = prompt.shape
    real = there.sum(1, keepdim=True)                                                     # (n, 1) prompt tokens
    place = (torch.arange(p) - p + real).clamp(min=0)                                     # (n, P') pads sit at 0
    block = torch.cat((torch.arange(p) - p, torch.arange(length) // block_len))           # (T,)
    there = torch.cat((there, torch.ones(n, length, dtype=torch.bool)), dim=1)            # (n, T)
    mask = may_look(block, block)                                                         # (T, T)
    if not there.all():                                                                   # pads: seen only by themselves
        mask = (mask & there[:, None, :] | torch.eye(p + length, dtype=torch.bool))[:, None]        # (n, 1, T, T)
    return Text(tokens=torch.cat((prompt, u), dim=1), positions=torch.cat((place, real + torch.arange(length)), dim=1),
                there=there, block=block, mask=mask, target=target, start=p, block_len=block_len)


def canvas_states(model, text, row, block, hidden, tok):
    """Hidden states (m, B, width) of m canvases: block[i] of row[i], with its hidden targets (m, B) masked."""
    keys = text.tokens.shape[1] - text.block_len                    # nobody reads the last block
    cache = Recorded()
    model(text.tokens[:, :keys], text.positions[:, :keys], text.mask[..., :keys, :keys], cache)
    cache.rows = row
    earlier = (text.block[:keys] < block[:, None]) & text.there[row, :keys]               # (m, keys)
    mask = torch.cat((earlier, torch.ones_like(hidden)), 1)[:, None, None]                # (m, 1, 1, keys + B)
    inputs = canvas(text.blocks(text.tokens)[row, block], hidden, tok.mask, text.block_len)
    return model(inputs, text.blocks(text.positions)[row, block], mask, cache)


def token_weights(outputs, length, tok, reasoning, answer, tail):
    """(n, length) loss weights: reasoning up to <answer>, the answer from <answer> to the first <eos>, the tail that
    fills the last block. Paper: reasoning < answer, values unpublished."""
    w = torch.zeros(len(outputs), length)
    for r, o in enumerate(outputs):
        split = o.index(tok.answer) if tok.answer in o else len(o)
        w[r, :split], w[r, split:len(o)], w[r, len(o):] = reasoning, answer, tail
    return w


def limit_to_blocks(weight, outputs, block_len):
    """Nothing counts after the block that holds the output's end (rows of a batch differ in length). weight (..., n, R)."""
    ends = torch.tensor([len(o) + (-len(o) % block_len) for o in outputs])
    return weight * (torch.arange(weight.shape[-1]) < ends[:, None])


# === 4. Scores and losses =============================================================================================

def output_logits(model, hidden, tok):
    """Logits in fp32 with the two ids that are never a possible output, <mask> and <pad>, at -inf: in every loss and
    in the sampler alike."""
    logits = model.logits(hidden).float()
    logits[..., tok.mask] = float("-inf")
    logits[..., tok.pad] = float("-inf")
    return logits


def score(model, text, supervised, tok):
    """A text's own hidden states -> logits (m, vocab) and targets (m,) at the supervised (n, R) positions, in the order
    of supervised.nonzero(). At block length 1 this is AR."""
    device = model.embed.weight.device
    text, supervised = text.to(device), supervised.to(device)
    hidden = model(text.tokens, text.positions, text.mask)[:, text.start:]                # (n, R, width)
    return output_logits(model, hidden[supervised], tok), text.target[supervised]


def score_canvases(model, text, row, block, hidden, scored, tok):
    """The same for canvases: block[i] of row[i], hidden and scored (m, B)."""
    states = canvas_states(model, text, row, block, hidden, tok)
    target = text.target.unflatten(1, (-1, text.block_len))[row, block]
    return output_logits(model, states[scored], tok), target[scored]


def loss_sum(model, text, weight, tok, hidden=None):
    """Sum over targets of weight * cross-entropy (nats), *not* divided: the caller divides by one denominator over
    all micro-batches, so accumulation changes nothing. Zero weight = not supervised; without any the sum is 0, with
    gradient 0. hidden None: the text itself is scored, weight (n, R). Else its canvases, hidden and weight (views, n, R):
    one for each block of each view that has something to learn (a view in which nothing is hidden has not)."""
    device = model.embed.weight.device
    if hidden is None:
        logits, target = score(model, text, weight > 0, tok)
        weight = weight[weight > 0].to(device)
    else:
        text = text.to(device)
        weight, hidden = (x.to(device).unflatten(-1, (-1, text.block_len)) for x in (weight, hidden))
        view, row, block = (weight > 0).any(-1).nonzero().T         # (m,) each
        if not len(row):
            return model.embed.weight.sum() * 0.0
        weight, hidden = weight[view, row, block], hidden[view, row, block]               # (m, B)
        logits, target = score_canvases(model, text, row, block, hidden, weight > 0, tok)
        weight = weight[weight > 0]
    return (F.cross_entropy(logits, target, reduction="none") * weight).sum()


# === 5. The commit rule and replay ====================================================================================

def commit(confidence, open_, tau):
    """Which open targets of each row to fix now: all with confidence >= tau, and the single most confident one, so
    that progress is certain. confidence, open_ (n, B) -> (n, B) booleans. Rows with nothing open commit nothing."""
    best = torch.where(open_, confidence, -1.0).argmax(dim=1, keepdim=True)
    return open_ & ((confidence >= tau) | torch.zeros_like(open_).scatter_(1, best, True))


def replay(model, prompts, rollouts, tok, block_len):
    """Trajectories (sample.Rollout: tokens, canvas, step), scored again: for each token up to and including the first
    <eos> (what follows it gets no reward, no KL and no gradient) the logits on the canvas on which it was committed.

    Returns logits (m, vocab), target (m,), row (m,), place in the output (m,). What it costs: `replay_tokens`.
    """
    device = model.embed.weight.device
    text = pack(prompts, [r.canvas for r in rollouts], tok, block_len).to(device)
    length = text.target.shape[1]
    ends = torch.tensor([len(r.tokens) for r in rollouts], device=device)
    if block_len == 1:                                              # a canvas of one token is the text itself
        scored = torch.arange(length, device=device) < ends[:, None]                      # (n, R)
        return *score(model, text, scored, tok), *scored.nonzero().T
    step = torch.tensor([r.step + [-1] * (length - len(r.step)) for r in rollouts], device=device)  # -1: no such block
    step = step.unflatten(1, (-1, block_len))                       # (n, blocks, B)
    k = torch.arange(int(step.max()) + 1, device=device)
    row, block, k = (k <= step.amax(-1, keepdim=True)).nonzero().T  # (m,) each: one canvas a step of a block
    step = step[row, block]                                         # (m, B)
    place = block[:, None] * block_len + torch.arange(block_len, device=device)           # (m, B) in the output
    scored = (step == k[:, None]) & (place < ends[row, None])
    return (*score_canvases(model, text, row, block, step >= k[:, None], scored, tok),
            row[:, None].expand_as(place)[scored], place[scored])


def replay_tokens(prompts, rollouts, block_len):
    """Tokens that replay reads for these rows: the text once, and each canvas, P + R + NFE * B a row. One forward a step
    would read the prompt and all blocks up to the active one each time, and with gradients keep them all."""
    canvases = sum(r.nfe for r in rollouts) * block_len * (block_len > 1)
    return sum(len(p) + len(r.canvas) for p, r in zip(prompts, rollouts)) + canvases
