"""Sentences of 4 to 384 tokens in batches drawn at random: most of each batch is padding.

https://github.com/Lightning-AI/lit-llama/issues/396
https://github.com/kyutai-labs/pocket-tts/pull/309
https://github.com/stanford-oval/genienlp/pull/38
"""

import random

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD = 0
BATCH = 32


class Corpus(Dataset):
    def __init__(self, count=5000):
        rng = random.Random(3)
        lengths = [min(384, max(4, int(rng.lognormvariate(3.3, 0.9)))) for _ in range(count)]
        self.sentences = [torch.randint(1, 900, (n,)) for n in lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return self.sentences[i], i % 3


class SortedChunks:
    """Batches of sentences that are about as long: shuffle, sort chunks of 50 batches, cut."""

    def __init__(self, corpus):
        self.lengths = [len(s) for s in corpus.sentences]

    def __len__(self):
        return -(-len(self.lengths) // BATCH)

    def __iter__(self):
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        batches = []
        for start in range(0, len(order), 50 * BATCH):
            chunk = sorted(order[start : start + 50 * BATCH], key=lambda i: self.lengths[i])
            batches += [chunk[k : k + BATCH] for k in range(0, len(chunk), BATCH)]
        random.shuffle(batches)
        return iter(batches)


def collate(samples):
    sentences, labels = zip(*samples)
    return pad_sequence(sentences, batch_first=True, padding_value=PAD), torch.tensor(labels)


class SentenceClassifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(900, width, padding_idx=PAD)
        block = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=128, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 3)

    def forward(self, ids):
        x = self.blocks(self.embed(ids), src_key_padding_mask=ids.eq(PAD))
        return self.out(x[:, 0])


def main():
    args = options("batches of sentences of about the same length")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    corpus = Corpus()
    if args.fixed:
        loader = DataLoader(corpus, batch_sampler=SortedChunks(corpus), collate_fn=collate)
    else:
        loader = DataLoader(corpus, batch_size=BATCH, shuffle=True, collate_fn=collate)
    model = SentenceClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    meter = Meter(args.seconds)
    places = 0
    while not meter.over():
        for ids, labels in loader:
            loss = F.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            places += ids.numel()
            if meter.add(int(ids.ne(PAD).sum())):
                break
    meter.report("tokens")
    print(f"padding: {1 - meter.samples / places:.0%}")


if __name__ == "__main__":
    main()
