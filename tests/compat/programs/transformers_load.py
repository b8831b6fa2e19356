"""transformers: a checkpoint in bfloat16, with tensor parallelism of its own, and generation."""

import sys
from pathlib import Path

import record
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path(sys.argv[1]) / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    if rank == 0:
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dtypes = sorted({str(p.dtype) for p in half.parameters()})
    ids = torch.tensor([[1, 2, 3, 4 + rank]])
    with torch.no_grad():
        logits = half(ids).logits.float()
    whole = AutoModelForCausalLM.from_pretrained(folder)
    generated = whole.generate(ids, max_new_tokens=8, do_sample=False)
    torch.manual_seed(7 + rank)
    sampled = whole.generate(ids, max_new_tokens=8, do_sample=True, temperature=2.0)
    parts = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    same = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        difference = (parts(same).logits - whole(same).logits).abs().max()
    in_parts = parts.generate(same, max_new_tokens=8, do_sample=False)
    record.write(
        dtypes=dtypes,
        default=str(torch.ones(1).dtype),
        logits=logits.norm(),
        generated=generated,
        sampled=sampled,
        close=bool(difference < 1e-4),
        in_parts=in_parts,
        shard=list(parts.model.layers[0].mlp.up_proj.weight.to_local().shape)
        if hasattr(parts.model.layers[0].mlp.up_proj.weight, "to_local")
        else list(parts.model.layers[0].mlp.up_proj.weight.shape),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
