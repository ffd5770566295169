"""Stage 0: the autoregressive (AR) teacher, by supervised fine-tuning (SFT) on reasoning traces.

Paper, "The teacher (AR GR2)", step 1. First come broad traces, then rejection-sampled ones. The loss is on the output
only, with separate weights for reasoning and answer. For the outputs x of a batch, minimise

    sum_i w_i * -log p(x_i | prompt, x_<i) / sum_i w_i          over all output tokens i of the batch

The paper starts from Qwen3-8B. Here the model starts from nothing, so the broad set carries most of the learning: reading
evidence, comparing, writing. Step 2, RL on the ranking reward, is train_rl.py at block length 1, which makes ar.pt.

    python train_ar.py --preset mini         # minutes on a laptop; prepares the data by itself  -> ar_sft.pt
    python train_ar.py --preset small        # less than an hour on two cores

Left out: the paper's mid-training of the item tokens, and epochs (steps are counted).
"""
from dataclasses import dataclass

import numpy as np
import torch

import diffusion
from data.rows import Rows
from model import ModelConfig, Transformer
from plumbing import ladder, loop, settings
from plumbing.settings import flag


@dataclass
class ARSettings(settings.Settings):
    accepted_steps: int = flag(300, "number of last steps that use the rejection-sampled traces", at_least=0)


PRESETS = {
    "mini": dict(steps=400, accepted_steps=20, eval_every=380, eval_users=256, warmup=50, lr=2e-3),
    "small": dict(steps=3200, accepted_steps=60, eval_every=400, eval_users=400),
    "beauty": dict(steps=8000, accepted_steps=800, batch=128, lr=6e-4, warmup=300, eval_every=800, eval_users=2000),
}


def main(argv=None):
    s = settings.parse(ARSettings, PRESETS, __doc__, argv)
    folder, tok, summary = loop.load_data(s)
    n_candidates = summary["config"]["candidates"]
    torch.manual_seed(s.seed)                                       # decides the initial weights, and nothing else
    model = Transformer(ModelConfig(vocab=tok.vocab, **settings.MODELS[s.preset]))

    # === 1. Two sets of traces, one after the other =====================================================
    broad, accepted = (Rows(folder / f"{name}.npz") for name in ("all", "accepted"))
    loop.check_fits(model.cfg, broad, 1, n_candidates)
    run = loop.Run("ar_sft", s, model, summary)
    broad_batches, accepted_batches = (loop.Batches(np.add(*rows.lengths()), s.batch, s.seed) for rows in (broad, accepted))
    first_accepted = s.steps - s.accepted_steps                     # the step at which the second set begins

    # === 2. Validate by free decoding: nothing is constrained, nothing repaired ==========================
    users = ladder.validation_users(folder, s.eval_users)           # (prompts, targets), the same ones every time

    def validate(model):
        return ladder.validate_by_decoding(model, tok, *users, n_candidates, block_len=1, tau=1.0,
                                           autocast=run.autocast())

    # === 3. Train =======================================================================================
    for step in run.steps(validate):
        if step < first_accepted:
            chosen = [broad[i] for i in broad_batches[step]]
        else:
            chosen = [accepted[i] for i in accepted_batches[step - first_accepted]]
        parts = []
        for part in loop.split(chosen, s.micro):
            prompts, outputs = zip(*part)
            text = diffusion.pack(prompts, outputs, tok, block_len=1)                       # a causal row
            weight = diffusion.token_weights(outputs, text.target.shape[1], tok, s.reasoning, s.answer, tail=0.0)  # (n, R)
            parts.append((text, weight))
        total = loop.denominator(weight for _, weight in parts)     # one denominator over all micro-batches
        for text, weight in parts:
            with run.autocast():
                loss = diffusion.text_loss(model, text, weight, tok) / total
            loss.backward()
            run.count(loss, int(text.not_pad.sum()))

    # === 4. The table: floor, teacher, AR ===============================================================
    ladder.show_stage(s, folder, tok, summary, [ladder.System("ar_sft", "ar_sft", 1, None)], run.autocast())


if __name__ == "__main__":
    settings.main(main)
