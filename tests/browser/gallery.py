"""Every view and widget, each in a cell of one notebook: what test_widths.py measures.

An entry is a name and the cells that show it; only the last one's output is looked at. A new view
is a new entry here. `WIDE` is what has long words and many columns, as models have them.
"""

from __future__ import annotations

SETUP = (
    "%load_ext discolab\n%disco_session 4",
    """\
import os, tempfile, torch
import discolab, discolab.notebook
from torch.distributed.tensor import Partial, Replicate, Shard
folder = tempfile.mkdtemp()""",
    """\
%%disco
from torch import nn
torch.manual_seed(0)
whole = torch.randn(10, 256)
same = torch.randn(48, 64)
rows = torch.sin(torch.arange(rank * 16, rank * 16 + 16.0)[:, None] / 8) * torch.arange(96.0).cos()
columns = whole.chunk(4, 1)[rank].clone()
uneven = whole[:, : 40 + 30 * rank].clone()
odd = same.clone()
odd[20, 5] += (rank == 2)
mine = torch.randn(16, 48) * (rank + 1)
loud = mine.clone()
loud[rank, 3] = float('nan')
deep = torch.randn(2, 3, 16, 24) + rank
large = torch.zeros(1200, 1200) + rank
scalar = torch.tensor(rank / 3)
ones = torch.arange(7) + rank
half = torch.randn(64, 64).bfloat16() + rank
some = same if rank < 2 else None
long = f"the settings of worker {rank} of {world_size} " * 3
plain = {"learning_rate": 3e-4, "rank": rank, "name": long}
class Config:
    def __repr__(self):
        return "Config(" + ", ".join(f"option_{i}={i * rank}" for i in range(12)) + ")"
config = Config()
tensors = {f"layers.{i}.attention.query_key_value.weight": torch.randn(8, 8) for i in range(4)}
torch.manual_seed(rank)
block = nn.TransformerEncoderLayer(64, 4, 128)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if rank == 1:
    with torch.no_grad():
        model[2].bias[3] += 1""",
    """\
def failing(rank):
    if rank == 1:
        raise ValueError('a message that is long enough to need several lines: ' + 'word ' * 40)
    return torch.ones(4, 4)""",
)


LONG_NAME = "a_name_of_sixty_five_letters_that_somebody_has_given_to_a_variabl"


def _placed(name: str, placements: str) -> tuple[str, ...]:
    return (f"x = sess['{name}']\nx.placements = {placements}\nx",)


GALLERY: dict[str, tuple[str, ...]] = {
    "session": ("sess",),
    # values
    "replicated": ("sess['same']",),
    "shard_rows": _placed("rows", "[Shard(0)]"),
    "shard_columns": _placed("columns", "[Shard(1)]"),
    "shard_inferred": ("sess['uneven']",),
    "partial": _placed("mine", "[Partial()]"),
    "different": ("sess['mine']",),
    "one_odd": ("sess['odd']",),
    "replicas_differ": _placed("odd", "[Replicate()]"),
    "not_finite": ("sess['loud']",),
    "four_dims": ("sess['deep']",),
    "large": ("sess['large']",),
    "large_asked": ("discolab.view(sess['large'], stats=True)",),
    "scalars": ("sess['scalar']",),
    "vector": ("sess['ones']",),
    "bfloat16": ("sess['half']",),
    "some_none": ("sess['some']",),
    "dict": ("sess['plain']",),
    "object": ("sess['config']",),
    "tensors": ("sess['tensors']",),
    "module": ("sess['model']",),
    "module_differs": ("sess['block']",),
    "module_equal": (
        "%%disco\ntorch.manual_seed(1)\nequal = nn.TransformerEncoderLayer(64, 4, 128)",
        "sess['equal']",
    ),
    "failed": ("%%disco\nimport torch\nf = 1", "sess.call_packed(failing, sess['rank'])"),
    "busy": (
        "%%disco -a\nimport time\nif rank == 3:\n    time.sleep(3)\nslow = torch.ones(3, 3)",
        "sess['same']",
    ),
    "dtensor": (
        "%%disco\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "dt = distribute_tensor(whole, init_device_mesh('cpu', (4,)), [Shard(1)])",
        "sess['dt']",
    ),
    "compare_values": ("sess.compare(sess['same'], sess['odd'])",),
    "before_after": (
        "%%disco\nbefore = torch.tensor([10.0**rank] * 4)\nafter = ccl.all_reduce(before)",
        "from discolab.views import before_after\nbefore_after(sess['before'], sess['after'])",
    ),
    "text_view": ("print(discolab.view(sess['columns']))",),
    # widgets
    "plot": ("x = sess['columns']\nx.placements = [Shard(1)]\ndiscolab.plot(x)",),
    "registers": ("parts = [torch.relu(sess['mine'] * i) for i in range(4)]", "%disco_registers"),
    "devices": ("%disco_devices",),
    "timeline_traced": (
        "%disco_timeline --on",
        "%%disco\nfrom discolab.trace import span\nfor i in range(4):\n"
        "    with span('forward'):\n        y = mine @ mine.T\n    ccl.all_reduce(y)",
        "%disco_timeline",
    ),
    # magics
    "status": ("%disco_status",),
    "doctor": ("%disco_doctor",),
    "whos": ("%disco_whos",),
    "checkpoint": (
        "from safetensors.torch import save_file\n"
        "names = [f'model.layers.{i}.self_attn.{k}.weight' for i in range(3) "
        "for k in ('q_proj', 'o_proj')]\n"
        "path = os.path.join(folder, 'model.safetensors')\n"
        "save_file({name: torch.randn(64, 64) for name in names}, path)\n"
        "discolab.loader.show(path)",
    ),
    "load_plan": (
        "plan = {'*.q_proj.weight': 'shard(0)', '*.o_proj.weight': 'shard(1)'}\n"
        "loaded = sess.load(path, plan)\n"
        "loaded",
    ),
    "snapshot": ("%disco_snapshot {folder}/one",),
    "compare": (
        "torch.manual_seed(0)\nreference = torch.nn.Sequential("
        "torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))",
        "batch = torch.randn(8, 64)\n%disco_compare reference batch --module model",
    ),
    "mesh": ("%disco_mesh dp=2,tp=2",),
    "mesh_shards": (
        "%%disco\ntorch.manual_seed(rank % 2)\nmixed = torch.randn(24, 32)",
        "x = sess['mixed']\nx.placements = [Replicate(), Shard(1)]\nx",
    ),
    "mesh_pattern": ("sess['mixed']",),
    # the debugger; the last: they leave a program that is paused
    "debugger_stop": (
        """\
%%disco --step
def attention(query, key_states, attention_mask_for_padding):
    scores = query @ key_states.T / query.shape[-1] ** 0.5
    return scores.masked_fill(attention_mask_for_padding, float('-inf')).softmax(-1)

torch.manual_seed(rank)
hidden_states = torch.randn(4, 16, 256)
settings = {f'option_{i}': i * rank for i in range(12)}
mask = torch.zeros(16, 16, dtype=torch.bool)
weights = attention(hidden_states[0], hidden_states[1], mask)
total = ccl.all_reduce(weights)""",
        "%disco_break 3",
        "%disco_continue",
    ),
    "debugger": ("%disco_debugger",),
    "where": ("%disco_where",),
    "eval": ("%disco_eval query.mean(-1)",),
    "breaks": ("%disco_break",),
    "diverged": ("%disco_next -r 0",),
    "post_mortem": (
        "%disco_abort",
        "%%disco\nimport math\ndef divide(numerator, denominator):\n"
        f"    {LONG_NAME} = numerator / denominator\n    return {LONG_NAME} + [][rank]\n"
        "divide(hidden_states.sum(), 0)",
        "%disco_pm",
    ),
    "explain": ("%disco_explain",),
    "history": (
        "%%disco --trace\ntotal = 0\nfor step in range(4):\n    total = total + step * rank",
        "%disco_history total",
    ),
    "restart": (
        "%disco_session 2 --name pair",
        "kept = pair.broadcast(torch.ones(4))\nlost = pair.call_packed(torch.randn, 3, 5)",
        "%disco_restart pair -t 1",
    ),
}
