"""Lightning's command line with a config file, a data module, validation, checkpoints and CSVLogger."""
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, width: int = 128, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 32, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train, self.val = (TensorDataset(torch.randn(n, 64), torch.randint(0, 4, (n,))) for n in (3200, 320))

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size, num_workers=self.hparams.num_workers)


if __name__ == "__main__":
    LightningCLI(Net, Data, seed_everything_default=1)
