"""Eight micro-batches per step under DistributedDataParallel, and gradients exchanged after each of them.

    torchrun --nproc_per_node 2 train.py

https://github.com/karpathy/nanochat/pull/33
https://github.com/Lightning-AI/pytorch-lightning/issues/4092
https://github.com/pytorch/pytorch/issues/43201
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    args = options("exchange gradients at the last micro-batch only (no_sync)", accumulate=8)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    torch.set_num_threads(1)

    features = torch.randn(6000, 400)
    classes = torch.randint(0, 8, (6000,))
    train_set = TensorDataset(features, classes)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler, drop_last=True)

    net = nn.Sequential(
        nn.Linear(400, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 8)
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    meter = Meter(args.seconds)
    done = False
    epoch = 0
    micro_step = 0
    while not done:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            micro_step += 1
            is_update = micro_step % args.accumulate == 0
            quiet = args.fixed and not is_update
            with model.no_sync() if quiet else nullcontext():
                loss = F.cross_entropy(model(x), y) / args.accumulate
                loss.backward()
            meter.add(len(x) * dist.get_world_size())
            if not is_update:
                continue
            optimizer.step()
            optimizer.zero_grad()
            # All ranks end at the same step.
            over = torch.tensor(float(meter.over()))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            done = over.item() > 0
            if done:
                break

    if rank == 0:
        meter.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
