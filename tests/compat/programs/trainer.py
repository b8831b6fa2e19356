"""The Trainer of transformers, data parallel, with evaluation, checkpoints and a resume."""

import sys
from pathlib import Path
from typing import Any

import record
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def arguments(folder: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / folder),
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        learning_rate=1e-2,
        **options,
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
    args = arguments("out", save_steps=2, gradient_accumulation_steps=2)
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = losses_of(trainer)
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(data).predictions
    again = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments("again", save_strategy="no", gradient_accumulation_steps=2),
        train_dataset=data,
    )
    again.train(resume_from_checkpoint=str(Path(sys.argv[1]) / "out" / "checkpoint-2"))
    saving = arguments("half", bf16=True, gradient_checkpointing=True, save_strategy="no")
    half = Trainer(model=BertForSequenceClassification(config), args=saving, train_dataset=data)
    half.train()
    record.write(
        losses=losses,
        resumed=losses_of(again),
        half=losses_of(half),
        evaluated=evaluated,
        predicted=torch.tensor(predicted).double().norm(),
        norms=record.norms(model),
        place=[args.process_index, args.world_size, args.local_process_index],
        saved=sorted(path.name for path in (Path(sys.argv[1]) / "out").glob("*")),
    )


if __name__ == "__main__":
    main()
