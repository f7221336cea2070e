"""DQN: an environment stepped without gradients, a replay buffer of tensors in memory, a target network, no loader."""
import random

import torch
from torch import nn

memory, capacity, batch = [], 5000, 64
policy, target = (nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4)) for _ in range(2))
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-4)
state, step = torch.randn(8), 0
while True:
    with torch.no_grad():
        action = random.randrange(4) if random.random() < 0.1 else int(policy(state[None]).argmax())
    following = torch.roll(state, action) + 0.01 * torch.randn(8)
    memory.append((state, action, float(following.sum() > 0), following))
    if len(memory) > capacity:
        memory.pop(0)
    state = following
    step += 1
    if len(memory) >= batch and step % 4 == 0:
        states, actions, rewards, nexts = zip(*random.sample(memory, batch))
        with torch.no_grad():
            wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(nexts)).amax(1)
        reached = policy(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(reached, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    if step % 1000 == 0:
        target.load_state_dict(policy.state_dict())
