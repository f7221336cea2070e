"""LoRA by peft over a transformers model: most weights are frozen, the adapter is saved at each epoch."""
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2))
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True))
model.print_trainable_parameters()
loader = DataLoader(TensorDataset(torch.randint(0, 100, (256, 16))), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
for epoch in range(100000):
    for (tokens,) in loader:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained("s73_adapter")
