"""Words become character features in `forward`, by Python, each time a batch passes: the main process is busy.

https://github.com/flairNLP/flair/issues/889
https://github.com/stanford-oval/genienlp/pull/47
https://github.com/starVLA/starVLA/pull/453
"""

import random
import string

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.utils.data import DataLoader, Dataset

BUCKETS = 2000
WORDS = 12


def make_sentences(count):
    rng = random.Random(9)
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 11))) for _ in range(900)]
    return [" ".join(rng.choices(vocabulary, k=WORDS)) for _ in range(count)]


def trigrams(sentence):
    """Return a bucket for each trigram of characters, padded."""
    ids = []
    for word in sentence.split():
        word = f"<{word}>"
        for k in range(len(word) - 2):
            bucket = 0
            for char in word[k : k + 3]:
                bucket = (bucket * 31 + ord(char)) % BUCKETS
            ids.append(bucket)
    return (ids + [0] * 160)[:160]


class Sentences(Dataset):
    def __init__(self, count=4000):
        self.sentences = make_sentences(count)

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return self.sentences[i], i % 6


class PreparedSentences(Sentences):
    """Trigrams are looked up once, when the dataset is made."""

    def __init__(self):
        super().__init__()
        self.ids = torch.tensor([trigrams(s) for s in self.sentences])

    def __getitem__(self, i):
        return self.ids[i], i % 6


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(BUCKETS, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 6))

    def forward(self, batch):
        if not torch.is_tensor(batch):
            batch = torch.tensor([trigrams(sentence) for sentence in batch])
        return self.layers(self.embed(batch))


def main():
    args = options("look the trigrams up once, in the dataset")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    dataset = PreparedSentences() if args.fixed else Sentences()
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    meter = Meter(args.seconds)
    while not meter.over():
        for batch, y in loader:
            loss = F.cross_entropy(model(batch), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(len(y)):
                break
    meter.report()


if __name__ == "__main__":
    main()
