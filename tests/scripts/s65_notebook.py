#!/usr/bin/env python
# coding: utf-8

# # A notebook, as `jupyter nbconvert --to script` exports it: magics, cells that were run twice, no main guard

# In[1]:


get_ipython().run_line_magic('load_ext', 'autoreload')
get_ipython().run_line_magic('autoreload', '2')
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# In[4]:


data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 4, (3200,)))
train_loader = DataLoader(data, batch_size=32, shuffle=True)
next(iter(train_loader))[0].shape


# In[5]:


train_loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
model


# In[9]:


optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
losses = []
for epoch in range(100000):
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# In[ ]:




