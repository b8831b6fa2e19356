"""Lightning's Trainer: data parallel, with validation, checkpoints, a resume and predictions."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import record
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


class Model(lp.LightningModule):
    """A regression that notes what it has seen."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
        )
        self.mean = MeanMetric()
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen.append([loss.item(), batch[1].flatten().tolist()])
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.mean(self.loss(batch))
        self.log("val", self.mean)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def loader(size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(size, 4, generator=generator), torch.arange(size)[:, None] / size
    return DataLoader(TensorDataset(x, y), 4, shuffle=shuffle)


def trainer(folder: Path, **options: Any) -> lp.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lp.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        default_root_dir=str(folder),
        log_every_n_steps=1,
        **{**quiet, "enable_checkpointing": False, **options},
    )


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    lp.seed_everything(3, workers=True, verbose=False)
    model, data = Model(), loader(20)
    saver = ModelCheckpoint(str(folder / "saved"), monitor="val", save_last=True)
    first = trainer(
        folder,
        max_epochs=2,
        callbacks=[saver],
        enable_checkpointing=True,
        logger=CSVLogger(str(folder), name="log", version=0),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    first.fit(model, loader(48, shuffle=True), data)
    validated = trainer(folder).validate(model, loader(22), verbose=False)
    tested = trainer(folder).test(model, data, verbose=False)
    predicted = trainer(folder).predict(model, data)
    best = Model.load_from_checkpoint(saver.best_model_path)
    resumed = Model()
    again = trainer(folder, max_epochs=3)
    again.fit(resumed, loader(48, shuffle=True), ckpt_path=str(folder / "saved" / "last.ckpt"))
    again.strategy.barrier()
    record.write(
        seen=model.seen,
        metrics={name: float(value) for name, value in first.callback_metrics.items()},
        place=[first.global_rank, first.world_size, first.is_global_zero],
        validated=validated,
        tested=tested,
        predicted=predicted,
        best=record.norms(best),
        resumed=resumed.seen,
        steps=again.global_step,
        logs=[path.read_text().count("\n") for path in folder.rglob("metrics.csv")],
        norms=record.norms(resumed),
    )


if __name__ == "__main__":
    main()
