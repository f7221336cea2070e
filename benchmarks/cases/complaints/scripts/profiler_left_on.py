"""torch.profiler records every step of the run, with stacks and shapes, and exports a trace now and then.

https://github.com/facebookresearch/dlrm/issues/197
https://github.com/pytorch/pytorch/pull/181043
"""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from meter import Meter, options
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

TRACE = Path(__file__).resolve().parent / "data" / "trace.json"


def export(profiler):
    TRACE.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(TRACE))


def main():
    args = options("train without the profiler")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [nn.Linear(64, 64)]
    for _ in range(12):
        layers += [nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)]
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = TensorDataset(torch.randn(6400, 64), torch.randint(0, 3, (6400,)))
    loader = DataLoader(samples, batch_size=64, shuffle=True)

    profiler = profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=0, active=50),
        on_trace_ready=export,
        record_shapes=True,
        with_stack=True,
    )
    meter = Meter(args.seconds)
    with nullcontext() if args.fixed else profiler:
        while not meter.over():
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not args.fixed:
                    profiler.step()
                if meter.add(len(x)):
                    break
        meter.report()


if __name__ == "__main__":
    main()
