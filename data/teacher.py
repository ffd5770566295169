"""The teacher: it judges each candidate by what the prompt shows of it, and by nothing else.

The paper's teacher is a language model of 32 billion parameters. This one fits on a page, and does this one job better,
because it *learns* from purchases which evidence counts. A candidate is the bag of its evidence tokens (score,
popularity, likeness, link, counts, matches), and

    score(c) = MLP( sum of the embeddings of c's tokens ),

trained so that a softmax over the candidates finds the purchase. The range of scores is cut into GRADES equal parts,
and the reasoning states a candidate's part as its *grade*. A token that the student is unsure of costs a forward later,
so grades have to be easy to imitate. The teacher reads tokens, not numbers: a verdict that depends on what the model
cannot see is noise to the model. It judges a candidate from the candidate's own tokens: a grade that also depended on
the others would be ten times as hard to imitate. And one function serves all rows.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.tokenizer import GRADES

WIDTH, EPOCHS, BATCH, LR, DECAY, MEMBERS = 32, 8, 256, 5e-3, 0.3, 4


class Teacher(nn.Module):
    """Evidence (n, k, features) token ids -> scores (n, k), the mean of MEMBERS small networks whose errors differ."""

    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.ModuleList(nn.EmbeddingBag(vocab, WIDTH, mode="sum") for _ in range(MEMBERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
                                 for _ in range(MEMBERS))
        for e in self.embed:
            nn.init.normal_(e.weight, std=0.1)
        self.register_buffer("edges", torch.zeros(GRADES - 1))

    def members(self, evidence):
        bags = evidence.flatten(0, -2)                              # (n * k, features)
        return torch.stack([mlp(e(bags)).view(evidence.shape[:-1]) for e, mlp in zip(self.embed, self.mlp)])

    def forward(self, evidence):
        return self.members(evidence).mean(0)                       # (MEMBERS, n, k) -> (n, k)

    def grade(self, score):
        """Scores -> grades of the same shape, from 0 (worst) to GRADES - 1."""
        return torch.bucketize(score, self.edges)


def fit(evidence, target, vocab, seed=0):
    """Train a Teacher. evidence (n, k, features) token ids; target (n,), the position of the purchase, which every row
    has. Each member minimises a softmax cross-entropy of its own over the k candidates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher = Teacher(vocab)
        opt = torch.optim.AdamW(teacher.parameters(), lr=LR, weight_decay=DECAY)
        steps = EPOCHS * -(-len(target) // BATCH)                   # batches per epoch, rounded up
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
    some = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))[:10**6]
    low, high = torch.quantile(scores[some], torch.tensor([0.02, 0.998])).tolist()
    teacher.edges.copy_(torch.linspace(low, high, GRADES + 1)[1:-1])
    return teacher


def draw_picks(scores, present, temperature, tries, generator):
    """Draw candidates from softmax(score / temperature), for rejection sampling. scores, present (n, k) -> (n, tries).
    The temperature is low: the student learns picks like any token, so wide draws would teach it to be unsure."""
    p = (scores / temperature).masked_fill(~present, float("-inf")).softmax(-1)
    return torch.multinomial(p, tries, replacement=True, generator=generator)
