"""The Trainer of transformers, data parallel, with evaluation and a saved checkpoint."""

import sys
from pathlib import Path

import record
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    rows = [{"input_ids": [i % 60 + 1, 3, 5, 7], "labels": i % 2} for i in range(64)]
    data = Dataset.from_list(rows).with_format("torch")
    args = TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / "out"),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        learning_rate=1e-2,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(data).predictions
    record.write(
        losses=losses,
        evaluated=evaluated,
        predicted=torch.tensor(predicted).double().norm(),
        norms=record.norms(model),
        place=[args.process_index, args.world_size, args.local_process_index],
        saved=sorted(path.name for path in (Path(sys.argv[1]) / "out").glob("*")),
    )


if __name__ == "__main__":
    main()
