"""The teacher: judges each candidate by what the prompt shows of it, and nothing else.

The paper's teacher is a 32-billion-parameter language model. This one fits on a page, and is better at the job it has:
it *learns* from purchases which evidence counts. A candidate is the bag of its evidence tokens (score, popularity,
likeness, link, counts, matches):

    score(c) = MLP( sum of embeddings of c's tokens ),    trained so that softmax over the candidates finds the purchase

and the score cut into equal widths is the *grade* that the reasoning states. Three things are deliberate. It reads
tokens, not numbers: a verdict that depends on what the model cannot see is noise to the model. It judges a candidate
from its own tokens alone: a softmax over the others would be ten times as hard to imitate. And one function serves
all rows. Every token the student is unsure of costs a forward later on.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.tokenizer import GRADES

WIDTH, EPOCHS, BATCH, LR, DECAY, MEMBERS = 32, 8, 256, 5e-3, 0.3, 4


class Teacher(nn.Module):
    """(rows, k, evidence) token ids -> (rows, k) scores: the mean of MEMBERS small networks, whose errors differ."""

    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.ModuleList(nn.EmbeddingBag(vocab, WIDTH, mode="sum") for _ in range(MEMBERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
                                 for _ in range(MEMBERS))
        for e in self.embed:
            nn.init.normal_(e.weight, std=0.1)
        self.register_buffer("edges", torch.zeros(GRADES - 1))

    def members(self, evidence):
        bags = evidence.flatten(0, -2)                              # (rows * k, evidence)
        return torch.stack([mlp(e(bags)).view(evidence.shape[:-1]) for e, mlp in zip(self.embed, self.mlp)])

    def forward(self, evidence):
        return self.members(evidence).mean(0)

    def grade(self, score):
        """(…) scores -> (…) grades 0 (worst) … GRADES - 1."""
        return torch.bucketize(score, self.edges)


def fit(evidence, target, vocab, seed=0):
    """evidence (rows, k, features) token ids, target (rows,) position of the purchase; rows without one are not
    given. Each member minimises its own softmax cross-entropy over the k candidates. Returns a Teacher."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher = Teacher(vocab)
        opt = torch.optim.AdamW(teacher.parameters(), lr=LR, weight_decay=DECAY)
        steps = EPOCHS * -(-len(target) // BATCH)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / steps)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(target)).split(BATCH):
                scores = teacher.members(evidence[rows])                                # (MEMBERS, batch, k)
                loss = F.cross_entropy(scores.flatten(0, 1), target[rows].repeat(MEMBERS))
                opt.zero_grad()
                loss.backward()
                opt.step()
                schedule.step()
    teacher.requires_grad_(False)
    scores = teacher(evidence).flatten()
    low, high = torch.quantile(scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))[:10**6]],
                               torch.tensor([0.02, 0.998])).tolist()
    teacher.edges.copy_(torch.linspace(low, high, GRADES + 1)[1:-1])
    return teacher


def draw_picks(scores, there, temperature, tries, generator):
    """Rejection sampling needs draws: (rows, tries) candidates from softmax(score / temperature), for each row its own.

    The temperature is low because the student learns the picks as it learns any token: draws spread wide would teach
    it to be unsure, and to need a forward for each."""
    p = (scores / temperature).masked_fill(~there, float("-inf")).softmax(-1)
    return torch.multinomial(p, tries, replacement=True, generator=generator)
