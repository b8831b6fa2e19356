"""State that single libraries keep for the process is each worker's own."""

import contextlib
import importlib
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discolab import (
    Session,
    SessionError,
    ThreadedSession,
    WorkerError,
    ccl,
    current_worker,
    make_session,
)
from discolab.isolation.imports import import_turn
from discolab.notebook.script import run_script


@pytest.fixture
def four() -> Iterator[Session]:
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        yield sess


@pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS")
def test_each_worker_of_accelerate_is_its_own_rank(four: Session) -> None:
    pytest.importorskip("accelerate")

    def program() -> Any:
        import torch
        from accelerate import Accelerator
        from accelerate.state import PartialState

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        seen: list[int] = []
        helper = threading.Thread(target=lambda: seen.append(PartialState().process_index))
        helper.start()
        helper.join()
        total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]))
        gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        return accelerator.process_index, accelerator.num_processes, seen, total.item(), gathered

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(rank, 4, [rank], 6.0, [0, 1, 2, 3]) for rank in range(4)]


def test_each_worker_makes_empty_weights_for_itself(four: Session) -> None:
    pytest.importorskip("accelerate")
    plain = torch.nn.Module.register_parameter

    def program() -> tuple[str, str, bool]:
        from accelerate import init_empty_weights

        from discolab import ccl, current_worker

        rank = current_worker().rank
        ccl.barrier()
        with init_empty_weights() if rank else contextlib.nullcontext():
            ccl.barrier()
            within = torch.nn.Linear(2, 2).weight
            ccl.barrier()
        after = torch.nn.Linear(2, 2).weight.device.type
        return within.device.type, after, within.requires_grad

    values = four.call_packed(program).debug_get_from_all()
    assert values == [("cpu", "cpu", True), *[("meta", "cpu", True)] * 3]
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.nn.Module.register_parameter is plain


def test_each_worker_composes_with_a_hydra_of_its_own(four: Session, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    tmp_path.joinpath("config.yaml").write_text("lr: 1\nrank: ${rank:}\n")
    folder = str(tmp_path)

    def program() -> Any:
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        rank = current_worker().worker_id
        OmegaConf.register_new_resolver("rank", lambda: rank)
        with initialize_config_dir(config_dir=folder, version_base=None):
            config = compose("config", overrides=[f"lr={rank}"])
            found = config.lr, config.rank
        OmegaConf.clear_resolvers()
        return *found, OmegaConf.has_resolver("rank"), OmegaConf.has_resolver("oc.env")

    for _ in range(2):
        values = four.call_packed(program).debug_get_from_all()
        assert values == [(rank, rank, False, True) for rank in range(4)]


def test_each_worker_stores_its_own_configurations(four: Session, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    folder = str(tmp_path)

    def program() -> Any:
        import dataclasses

        from hydra import compose, initialize_config_dir
        from hydra.core.config_store import ConfigStore
        from omegaconf import OmegaConf

        rank = current_worker().worker_id

        @dataclasses.dataclass
        class Config:
            lr: int = rank
            db: str = "?"

        store = ConfigStore.instance()
        store.store(name="base", node=Config)
        store.store(group="db", name="mine", node={"db": f"of {rank}"}, package="_global_")
        ccl.barrier()
        with initialize_config_dir(config_dir=folder, version_base=None):
            config = compose("base", overrides=["+db=mine"])
        return isinstance(OmegaConf.to_object(config), Config), config.lr, config.db

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(True, rank, f"of {rank}") for rank in range(4)]
    from hydra.core.config_store import ConfigStore

    assert not {"base.yaml", "db"} & set(ConfigStore.instance().repo)
    assert "hydra" in ConfigStore.instance().repo  # what its modules have stored


def test_a_model_is_whole_though_others_load_theirs(four: Session, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    folder = str(tmp_path)

    def program() -> list[bool]:
        import torch
        from transformers import AutoModelForCausalLM

        rank, found = current_worker().worker_id, []
        for turn in range(6):
            if (rank + turn) % 2:
                dtype = torch.bfloat16 if rank == 1 else torch.float32
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
                found.append({p.dtype for p in model.parameters()} == {dtype})
            else:
                model = AutoModelForCausalLM.from_config(config)
                found.append(model.dtype is torch.float32)
                linear = torch.nn.Linear(4, 4)
                found.append(bool(linear.weight.abs().sum() > 0) and linear.weight.dim() == 2)
            found.append(model.lm_head.weight is model.model.embed_tokens.weight)
        found.append(str(torch.linspace(0, 1, 2).device) == "cpu")
        return found

    for values in four.call_packed(program).debug_get_from_all():
        assert all(values), values
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_lightning_on_a_worker_is_not_interactive(
    four: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    from lightning.fabric import connector

    monkeypatch.setattr(connector._IS_INTERACTIVE, "_found", True)
    assert connector._IS_INTERACTIVE

    def program() -> Any:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp")
        fabric.launch()
        return fabric.global_rank, fabric.world_size

    assert four.call_packed(program).debug_get_from_all() == [(rank, 4) for rank in range(4)]


def test_each_worker_has_settings_of_matplotlib(four: Session) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.rcParams["lines.linewidth"]

    def program() -> Any:
        import matplotlib

        rank = current_worker().worker_id
        matplotlib.rcParams["lines.linewidth"] = 10.0 + rank
        ccl.barrier()
        with matplotlib.rc_context({"lines.markersize": 20.0 + rank}):
            ccl.barrier()
            found = matplotlib.rcParams["lines.linewidth"], matplotlib.rcParams["lines.markersize"]
        return found

    found = four.call_packed(program).debug_get_from_all()
    assert found == [(10.0 + rank, 20.0 + rank) for rank in range(4)]
    assert matplotlib.rcParams["lines.linewidth"] == before


def test_each_worker_has_figures_of_its_own(four: Session) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("svg")

    def program() -> Any:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt

        ccl.barrier()
        figure = plt.figure()
        ccl.barrier()
        plt.plot([1, current_worker().worker_id])
        found = plt.gcf() is figure, plt.get_fignums(), len(figure.axes)
        ccl.barrier()
        plt.close("all")
        return found

    assert four.call_packed(program).debug_get_from_all() == [(True, [1], 1)] * 4
    assert matplotlib.get_backend() == "svg"


def test_matplotlib_is_not_told_its_backend_while_a_worker_imports(four: Session) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    done, imports = [], threading.Event()

    def program() -> None:
        if current_worker().worker_id:
            imports.wait()
            matplotlib.use("agg")  # looks for pyplot, which may be half made
            done.append("told")
            return
        with import_turn.taken("matplotlib.pyplot"):
            imports.set()
            time.sleep(0.2)
            done.append("imported")

    four.call_packed(program)
    four.sync_all()
    assert done == ["imported", "told", "told", "told"]


def test_rank_zero_of_lightning_is_one_worker(four: Session) -> None:
    pytest.importorskip("lightning")

    def program() -> Any:
        from lightning.fabric import Fabric
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp")
        fabric.launch()
        ccl.barrier()
        calls: list[int] = []
        rank_zero_only(calls.append)(fabric.global_rank)
        return rank_zero_only.rank, calls

    with contextlib.suppress(AttributeError):
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        assert rank_zero_only.rank == 0
    values = four.call_packed(program).debug_get_from_all()
    assert values == [(0, [0]), (1, []), (2, []), (3, [])]


def test_lightning_makes_own_loaders_distributed(four: Session) -> None:
    pytest.importorskip("lightning")

    def program() -> list[int]:
        from lightning.fabric.utilities.data import _replace_dunder_methods, _update_dataloader
        from torch.utils.data import DataLoader, SequentialSampler

        class Loader(DataLoader[int]):
            def __init__(self, size: int, **kwargs: Any) -> None:
                super().__init__(range(size), **kwargs)  # type: ignore[arg-type]

        rank = current_worker().rank
        for _ in range(rank + 1):  # workers leave one after the other
            ccl.barrier()
            with _replace_dunder_methods(DataLoader, "dataset"):
                ccl.barrier()
                loader = Loader(3 + rank)
        for _ in range(3 - rank):
            ccl.barrier()
            ccl.barrier()
        outside = Loader(9)
        again = _update_dataloader(loader, SequentialSampler(range(2)))
        return [len(again.dataset), len(again), int(hasattr(outside, "__pl_saved_args"))]  # type: ignore[arg-type]

    values = four.call_packed(program).debug_get_from_all()
    assert values == [[3 + rank, 2, 0] for rank in range(4)]


def test_each_worker_registers_its_own_model(four: Session) -> None:
    transformers = pytest.importorskip("transformers")

    def program() -> Any:
        from transformers import (
            AttentionInterface,
            AutoConfig,
            AutoModel,
            PretrainedConfig,
            PreTrainedModel,
        )

        class Config(PretrainedConfig):
            model_type = "discolab-test"

        class Model(PreTrainedModel):
            config_class = Config

        rank = current_worker().rank
        AutoConfig.register("discolab-test", Config)
        AutoModel.register(Config, Model)
        AttentionInterface.register("discolab-test", lambda: rank)
        ccl.barrier()
        config = AutoConfig.for_model("discolab-test")
        return (
            type(config) is Config,
            type(AutoModel.from_config(config)) is Model,
            AttentionInterface()["discolab-test"](),
        )

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(True, True, rank) for rank in range(4)]
    with pytest.raises(ValueError, match="discolab-test"):
        transformers.AutoConfig.for_model("discolab-test")


def test_each_worker_registers_a_colormap(four: Session) -> None:
    matplotlib = pytest.importorskip("matplotlib")

    def program() -> Any:
        import matplotlib
        from matplotlib.colors import ListedColormap

        rank = current_worker().rank
        matplotlib.colormaps.register(ListedColormap([(rank / 4, 0, 0)]), name="of_rank")
        ccl.barrier()
        return float(matplotlib.colormaps["of_rank"](0)[0]), "viridis" in matplotlib.colormaps

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(rank / 4, True) for rank in range(4)]
    assert "of_rank" not in matplotlib.colormaps


def test_each_worker_switches_datasets(four: Session) -> None:
    datasets = pytest.importorskip("datasets")

    def program() -> tuple[bool, bool]:
        rank = current_worker().worker_id
        datasets.disable_caching() if rank % 2 else datasets.enable_caching()
        datasets.enable_progress_bars() if rank % 2 else datasets.disable_progress_bars()
        ccl.barrier()
        return datasets.is_caching_enabled(), datasets.are_progress_bars_disabled()

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(rank % 2 == 0, rank % 2 == 0) for rank in range(4)]
    assert datasets.is_caching_enabled()
    assert not datasets.are_progress_bars_disabled()


def test_each_worker_has_options_of_pandas(four: Session) -> None:
    pandas = pytest.importorskip("pandas")
    precision, rows = pandas.get_option("display.precision"), pandas.options.display.max_rows

    def program() -> tuple[str, int, int]:
        rank = current_worker().worker_id
        pandas.options.display.max_rows = 10 + rank
        with contextlib.ExitStack() as stack:
            for _ in range(rank + 1):  # workers leave one after the other
                stack.enter_context(pandas.option_context("display.precision", 1 + rank))
                ccl.barrier()
            text = repr(pandas.Series([1 / 3]))
            for _ in range(3 - rank):
                ccl.barrier()
        return (
            text.split()[1],
            pandas.get_option("display.precision"),
            pandas.options.display.max_rows,
        )

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(f"0.{'3' * (1 + r)}", precision, 10 + r) for r in range(4)]
    assert pandas.get_option("display.precision") == precision
    assert pandas.options.display.max_rows == rows


def _torchvision() -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as exc:  # its wheel may be of another build than torch's
        pytest.skip(f"torchvision: {exc}")


def test_each_worker_has_a_return_type_of_torchvision(four: Session) -> None:
    _torchvision()

    def program() -> tuple[list[str], str]:
        from torchvision import tv_tensors

        rank, names = current_worker().rank, []
        image = tv_tensors.Image(torch.rand(3, 2, 2))
        with contextlib.ExitStack() as stack:
            for turn in range(4):  # workers leave one after the other
                if turn <= rank:
                    kind = "TVTensor" if (rank + turn) % 2 else "Tensor"
                    stack.enter_context(tv_tensors.set_return_type(kind))
                ccl.barrier()
                names.append(type(image + 1).__name__)
                ccl.barrier()
        ccl.barrier()
        return names, type(image + 1).__name__

    image, tensor = "Image", "Tensor"
    values = four.call_packed(program).debug_get_from_all()
    assert values == [
        ([tensor] * 4, tensor),
        ([image, tensor, tensor, tensor], tensor),
        ([tensor, image, tensor, tensor], tensor),
        ([image, tensor, image, tensor], tensor),
    ]


def test_each_worker_switches_timm(four: Session) -> None:
    _torchvision()
    pytest.importorskip("timm")

    def program() -> list[bool]:
        from timm import layers
        from timm.data.readers import img_extensions

        rank = current_worker().rank
        layers.set_fused_attn(bool(rank % 2))
        layers.set_fast_norm(bool(rank % 2))
        img_extensions.set_img_extensions([f".of{rank}"])
        with contextlib.ExitStack() as stack:
            for _ in range(rank + 1):  # workers leave one after the other
                stack.enter_context(layers.set_layer_config(scriptable=bool(rank % 2)))
                ccl.barrier()
            found = [layers.use_fused_attn(), layers.is_scriptable()]
            for _ in range(3 - rank):
                ccl.barrier()
        norm, read = layers.is_fast_norm(), img_extensions.is_img_extension(f".of{rank}")
        return [*found, layers.is_scriptable(), norm, read]

    values = four.call_packed(program).debug_get_from_all()
    odd = [bool(rank % 2) for rank in range(4)]
    assert values == [[is_odd, is_odd, False, is_odd, True] for is_odd in odd]
    from timm import layers

    assert layers.use_fused_attn()


def test_each_worker_registers_a_model_of_timm(four: Session) -> None:
    _torchvision()
    pytest.importorskip("timm")

    def program() -> int:
        from timm.models import model_entrypoint, register_model

        rank = current_worker().rank

        def of_rank() -> int:
            return rank

        register_model(of_rank)
        ccl.barrier()
        return int(model_entrypoint("of_rank")())

    assert four.call_packed(program).debug_get_from_all() == [0, 1, 2, 3]
    from timm.models import is_model

    assert not is_model("of_rank")
    assert is_model("resnet18")


def test_each_worker_has_a_pool_of_joblib(four: Session) -> None:
    pytest.importorskip("joblib")

    def program() -> set[str]:
        import os

        from joblib import Parallel, delayed
        from joblib.externals.loky import get_reusable_executor

        def rank() -> str:
            return os.environ["RANK"]

        found = set(Parallel(2)(delayed(rank)() for _ in range(4)))
        get_reusable_executor().shutdown()
        return found

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert sess.call_packed(program).debug_get_from_all() == [{"0"}, {"1"}]


def test_each_worker_has_a_precision_of_mpmath(four: Session) -> None:
    mpmath: Any = pytest.importorskip("mpmath")

    def program() -> Any:
        import sympy

        rank = current_worker().rank
        mpmath.mp.dps = 10 + rank
        ccl.barrier()
        third = str(mpmath.mpf(1) / 3)
        with contextlib.ExitStack() as stack:
            for _ in range(rank + 1):  # workers leave one after the other
                stack.enter_context(mpmath.workdps(20 + rank))
                ccl.barrier()
            root = str(mpmath.sqrt(3))
            for _ in range(3 - rank):
                ccl.barrier()
        clone = mpmath.mp.clone()
        clone.dps = 5
        circle = str(sympy.N(sympy.zeta(3) * sympy.pi, 30 + rank))
        return third, root, circle, mpmath.mp.dps, clone.dps, str(clone.pi * 1)

    before = mpmath.mp.dps
    values = four.call_packed(program).debug_get_from_all()
    import sympy

    with mpmath.workdps(40):
        root = str(mpmath.sqrt(3))
    for rank, found in enumerate(values):
        assert found[0] == f"0.{'3' * (10 + rank)}"
        assert found[1][: 19 + rank] == root[: 19 + rank]
        assert len(found[1]) == 21 + rank
        assert found[2] == str(sympy.N(sympy.zeta(3) * sympy.pi, 30 + rank))
        assert found[3:] == (10 + rank, 5, "3.1416")
    assert mpmath.mp.dps == before


def test_constants_of_mpmath_are_computed_on_all_workers_at_once(four: Session) -> None:
    mpmath: Any = pytest.importorskip("mpmath")

    def program() -> set[bool]:
        ccl.barrier()
        found = set()
        for bits in range(60, 6000, 60):
            pi = mpmath.libmp.pi_fixed(bits)
            found.add(pi >> (bits - 40) == 0x3243F6A8885)
        return found

    assert four.call_packed(program).debug_get_from_all() == [{True}] * 4


def test_each_worker_registers_with_yaml(four: Session) -> None:
    yaml: Any = pytest.importorskip("yaml")

    def program() -> Any:
        import re

        rank = current_worker().rank
        yaml.SafeLoader.add_constructor("!rank", lambda loader, node: rank)
        yaml.add_representer(
            complex, lambda dumper, value: dumper.represent_scalar("!c", str(rank))
        )
        resolver = "tag:yaml.org,2002:float" if rank % 2 else "tag:yaml.org,2002:str"
        yaml.SafeLoader.add_implicit_resolver(resolver, re.compile("^[0-9]+e-[0-9]+$"), list("123"))

        class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
            pass

        Loader.add_constructor("!own", lambda loader, node: -rank)

        class Point(yaml.YAMLObject):  # type: ignore[misc, name-defined]
            yaml_tag = "!point"
            yaml_loader = yaml.SafeLoader

        ccl.barrier()
        loaded = yaml.safe_load("[!rank x, 1e-4, {a: 2}]")
        point = yaml.safe_load("!point {x: 1}")
        return loaded, yaml.load("[!own x, !rank y]", Loader), yaml.dump(1j), type(point) is Point

    values = four.call_packed(program).debug_get_from_all()
    for rank, found in enumerate(values):
        assert found[0] == [rank, 1e-4 if rank % 2 else "1e-4", {"a": 2}]
        assert found[1:] == ([-rank, rank], f"!c '{rank}'\n", True)
    with pytest.raises(yaml.constructor.ConstructorError):
        yaml.safe_load("!rank x")


def test_each_worker_has_options_of_xarray(four: Session) -> None:
    pytest.importorskip("xarray")

    def program() -> Any:
        import xarray as xr

        rank = current_worker().worker_id
        xr.set_options(arithmetic_join=["inner", "outer", "left", "right"][rank])
        ccl.barrier()
        a = xr.DataArray([1.0, 2.0], dims="x", coords={"x": [0, 1]}, attrs={"unit": "m"})
        b = xr.DataArray([1.0, 2.0], dims="x", coords={"x": [1, 2]})
        joined, kept = (a + b).x.values.tolist(), []
        for step in range(3):
            with xr.set_options(keep_attrs=bool((rank + step) % 2)):
                ccl.barrier()
                kept.append(bool((a * 2).attrs))
                ccl.barrier()
        return joined, kept

    values = four.call_packed(program).debug_get_from_all()
    joins = [[1], [0, 1, 2], [0, 1], [1, 2]]
    assert values == [(joins[r], [bool((r + s) % 2) for s in range(3)]) for r in range(4)]
    import xarray

    assert xarray.get_options()["arithmetic_join"] == "inner"


def test_each_worker_has_a_configuration_of_dask(four: Session) -> None:
    pytest.importorskip("dask")

    def program() -> Any:
        import dask

        rank, found = current_worker().worker_id, []
        dask.config.set({"array.chunk-size": f"{rank + 1}MiB"})
        for step in range(3):
            with dask.config.set({"mine.key": rank + step}):
                ccl.barrier()
                found.append(dask.config.get("mine.key"))
                ccl.barrier()
        return dask.config.get("array.chunk-size"), found, dask.config.get("mine.key", None)

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(f"{r + 1}MiB", [r, r + 1, r + 2], None) for r in range(4)]


def test_each_worker_has_settings_of_botorch(four: Session) -> None:
    pytest.importorskip("botorch")

    def program() -> Any:
        from botorch import settings

        rank, found = current_worker().worker_id, []
        for _ in range(3):
            with settings.propagate_grads(rank % 2 == 1):
                ccl.barrier()
                found.append(settings.propagate_grads.on())
                ccl.barrier()
        return found, settings.propagate_grads.on()

    values = four.call_packed(program).debug_get_from_all()
    assert values == [([rank % 2 == 1] * 3, False) for rank in range(4)]


def test_each_worker_has_a_configuration_of_zarr(four: Session) -> None:
    """Also on the thread of zarr's event loop, which the first worker starts."""
    pytest.importorskip("zarr")

    def program() -> Any:
        import zarr

        rank, found = current_worker().worker_id, []
        zarr.config.set({"mine": rank})
        for _ in range(3):
            with zarr.config.set({"array.order": "F" if rank % 2 else "C"}):
                ccl.barrier()
                store = zarr.storage.MemoryStore()
                made = zarr.create_array(store=store, shape=(4, 4), dtype="f4")
                found.append(made[:].flags["F_CONTIGUOUS"])
                ccl.barrier()
        return zarr.config.get("mine"), found

    values = four.call_packed(program).debug_get_from_all()
    assert values == [(rank, [rank % 2 == 1] * 3) for rank in range(4)]


def test_each_worker_orders_the_keys_of_h5py(four: Session, tmp_path: Path) -> None:
    pytest.importorskip("h5py")

    def program() -> Any:
        import h5py

        rank = current_worker().worker_id
        h5py.get_config().track_order = rank % 2 == 0
        ccl.barrier()
        with h5py.File(tmp_path / f"{rank}.h5", "w") as file:
            for name in "zyx":
                file[name] = rank
            names = "".join(file)
        h5py.get_config().complex_names = h5py.get_config().complex_names
        with pytest.raises(SessionError, match=r"complex_names.*Set it in the notebook"):
            h5py.get_config().complex_names = "real", "imag"
        return names

    assert four.call_packed(program).debug_get_from_all() == ["zyx", "xyz"] * 2


def test_a_worker_may_not_seed_polars(four: Session) -> None:
    polars = pytest.importorskip("polars")

    def program() -> Any:
        rank = current_worker().worker_id
        drawn = polars.Series(range(100)).sample(3, seed=rank).to_list()
        with pytest.raises(SessionError, match=r"give `seed=`.*--engine processes"):
            polars.set_random_seed(rank)
        return drawn

    values = four.call_packed(program).debug_get_from_all()
    assert values == [polars.Series(range(100)).sample(3, seed=r).to_list() for r in range(4)]


def test_a_worker_may_not_set_scipys_backend_for_all(four: Session) -> None:
    pytest.importorskip("scipy")

    def program() -> Any:
        import numpy
        from scipy import fft

        class Mine:
            __ua_domain__ = "numpy.scipy.fft"

            @staticmethod
            def __ua_function__(method: Any, args: Any, kwargs: Any) -> Any:
                return rank

        rank = current_worker().worker_id
        with pytest.raises(SessionError, match=r"set_backend.*--engine processes"):
            fft.set_global_backend(Mine)
        with fft.set_backend(Mine):
            ccl.barrier()
            within = fft.fft(numpy.ones(2))
            ccl.barrier()
        return within, fft.fft(numpy.ones(2)).tolist()

    assert four.call_packed(program).debug_get_from_all() == [(r, [2, 0]) for r in range(4)]


def test_each_worker_of_sympy_evaluates_for_itself(four: Session) -> None:
    sympy = pytest.importorskip("sympy")

    def program() -> list[str]:
        rank, x, found = current_worker().worker_id, sympy.Symbol("x"), []
        for step in range(20):
            with sympy.evaluate((rank + step) % 2 == 0):
                ccl.barrier()
                found.append(str(x + x))
                ccl.barrier()
                found.append(str(x * x))
        return found

    values = four.call_packed(program).debug_get_from_all()
    pairs = [["2*x", "x**2"], ["x + x", "x*x"]]
    assert values == [[t for s in range(20) for t in pairs[(r + s) % 2]] for r in range(4)]


def test_each_worker_of_sympy_assumes_for_itself(four: Session) -> None:
    sympy = pytest.importorskip("sympy")
    from sympy.core import random as sympy_random

    def program() -> Any:
        rank, x, found = current_worker().worker_id, sympy.Symbol("x"), []
        for step in range(4):
            with sympy.assuming(*[sympy.Q.positive(x)] * ((rank + step) % 2)):
                ccl.barrier()
                found.append(sympy.ask(sympy.Q.positive(x)))
                ccl.barrier()
        sympy_random.seed(rank)
        ccl.barrier()
        return found, [sympy_random.random(), sympy_random.rng.random()]

    values = four.call_packed(program).debug_get_from_all()
    for rank, (found, drawn) in enumerate(values):
        assert found == [[None, True][(rank + step) % 2] for step in range(4)]
        stream = random.Random(rank)
        assert drawn == [stream.random(), stream.random()]
    assert not sympy.assumptions.global_assumptions


def test_two_workers_ask_for_a_constant_of_sympy(four: Session) -> None:
    singleton = pytest.importorskip("sympy.core.singleton")
    all_ask = threading.Barrier(4)

    class OfATest:
        def __init__(self) -> None:
            all_ask.wait(20)

    singleton.S.register(OfATest)
    try:
        for ask in four.call_packed(lambda: type(singleton.S.OfATest)).debug_get_from_all():
            assert ask.__name__ == "OfATest"
        with pytest.raises(AttributeError, match="was not installed"):
            _ = singleton.S.OfNoTest
    finally:
        delattr(singleton.S, "OfATest")


def test_each_worker_of_pyro_infers_for_itself(four: Session) -> None:
    pytest.importorskip("pyro")

    def infer(rank: int) -> Any:
        import pyro
        from pyro import distributions, infer, optim

        pyro.set_rng_seed(rank)
        pyro.clear_param_store()
        data = torch.randn(20) + rank

        def model() -> None:
            mean = pyro.sample("mean", distributions.Normal(0.0, 5.0))
            with pyro.plate("data", len(data)):
                pyro.sample("x", distributions.Normal(mean, 1.0), obs=data)

        def guide() -> None:
            place = pyro.param("place", torch.tensor(0.0))
            pyro.sample("mean", distributions.Normal(place, 0.5))

        svi = infer.SVI(model, guide, optim.Adam({"lr": 0.1}), infer.Trace_ELBO())
        losses = [svi.step() for _ in range(20)]
        return losses, pyro.param("place").item(), list(pyro.get_param_store())

    values = four.call_packed(lambda: infer(current_worker().worker_id)).debug_get_from_all()
    assert values == [infer(rank) for rank in range(4)]


def test_each_worker_has_an_attention_of_diffusers(four: Session) -> None:
    pytest.importorskip("diffusers")

    def program() -> list[str]:
        from diffusers.models import attention_dispatch

        rank, found = current_worker().worker_id, []
        for step in range(3):
            kernel = ["_native_math", "native"][(rank + step) % 2]
            with attention_dispatch.attention_backend(kernel):
                ccl.barrier()
                active = attention_dispatch._AttentionBackendRegistry.get_active_backend()
                found.append(active[0].value)
                ccl.barrier()
        return found

    values = four.call_packed(program).debug_get_from_all()
    names = ["_native_math", "native"]
    assert values == [[names[(r + s) % 2] for s in range(3)] for r in range(4)]


def test_each_worker_has_settings_of_gpytorch(four: Session) -> None:
    gpytorch = pytest.importorskip("gpytorch")

    def program() -> Any:
        rank, found = current_worker().worker_id, []
        settings = gpytorch.settings
        for step in range(3):
            flag = bool((rank + step) % 2)
            few, jitter = settings.max_cg_iterations, settings.cholesky_jitter
            with settings.fast_pred_var(flag), few(10 + rank), jitter(float_value=0.5 + rank):
                ccl.barrier()
                found.append(settings.fast_pred_var.on() is flag)
                found.append(few.value() == 10 + rank)
                found.append(jitter.value(torch.float) == 0.5 + rank)
                ccl.barrier()
            with settings.deterministic_probes(flag):
                ccl.barrier()
                found.append(settings.deterministic_probes.on() is flag)
                ccl.barrier()
        return found, settings.max_cg_iterations.value(), settings.fast_pred_var.is_default()

    before = gpytorch.settings.max_cg_iterations.value()
    values = four.call_packed(program).debug_get_from_all()
    assert values == [([True] * 12, before, True)] * 4
    with gpytorch.settings.max_cg_iterations(7):
        assert gpytorch.settings.max_cg_iterations.value() == 7
    assert gpytorch.settings.max_cg_iterations.value() == before


def draw_from_distributions() -> Any:
    """Long draws, in which another worker's generator would be put in place."""
    from scipy import stats

    rank = current_worker().rank
    ccl.barrier()
    given = [float(stats.norm.rvs(size=20_000, random_state=rank).sum()) for _ in range(20)]
    stats.gamma.random_state = rank
    ccl.barrier()
    own = float(stats.gamma.rvs(2, size=5).sum())
    np.random.seed(rank)
    ccl.barrier()
    legacy = float(stats.uniform.rvs(size=5).sum())
    frozen = stats.norm(loc=1.0)
    frozen.random_state = rank
    return given, own, legacy, pickle.loads(pickle.dumps(frozen)).rvs(size=2).tolist()


def test_each_worker_draws_from_scipys_distributions() -> None:
    stats = pytest.importorskip("scipy.stats")  # before the session, and so numpy's state is in it
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        seen = sess.call_packed(draw_from_distributions).debug_get_from_all()
    for rank, (given, own, legacy, frozen) in enumerate(seen):
        state = np.random.RandomState
        assert given == [float(state(rank).normal(size=20_000).sum())] * 20
        assert own == float(state(rank).standard_gamma(2, size=5).sum())
        assert legacy == float(state(rank).uniform(size=5).sum())
        assert frozen == (1 + state(rank).normal(size=2)).tolist()
    np.random.seed(7)  # the notebook's state is what it was, wherever scipy was first imported
    assert float(stats.gamma.rvs(2)) == float(np.random.RandomState(7).standard_gamma(2))


def test_each_worker_has_modes_of_tensordict(four: Session) -> None:
    pytest.importorskip("tensordict")

    def program() -> Any:
        import tensordict
        from tensordict import nn

        rank = current_worker().rank
        wish = [nn.InteractionType.RANDOM, nn.InteractionType.MODE][rank % 2]
        ccl.barrier()
        with contextlib.ExitStack() as stack:
            if rank:
                stack.enter_context(nn.set_interaction_type(wish))
                stack.enter_context(nn.set_composite_lp_aggregate(rank % 2 == 0))
                stack.enter_context(tensordict.set_list_to_stack(True))
            ccl.barrier()
            within = nn.interaction_type(), nn.composite_lp_aggregate()
            if rank == 1:
                stack.close()
            ccl.barrier()
            later = nn.interaction_type()
        compiled = torch.compile(lambda x: x + (nn.interaction_type() is wish), backend="eager")
        with nn.set_interaction_type(wish):
            graph = float(compiled(torch.zeros(())))
        return str(within[0]), within[1], str(later), str(nn.interaction_type()), graph

    seen = four.call_packed(program).debug_get_from_all()
    names = ["None", "mode", "random", "mode"]
    assert seen == [
        (names[r], r == 2, "None" if r == 1 else names[r], "None", 1.0) for r in range(4)
    ]


def test_each_worker_of_ignite_is_its_own_rank(four: Session) -> None:
    pytest.importorskip("ignite")

    def program() -> Any:
        import ignite.distributed as idist
        from ignite.metrics import Accuracy

        rank = current_worker().rank
        idist.sync()
        ccl.barrier()
        who = idist.get_rank(), idist.get_local_rank(), idist.get_world_size(), idist.backend()
        total = idist.all_reduce(torch.tensor([float(rank)])).item()
        metric = Accuracy()
        metric.update((torch.eye(2), torch.tensor([0, int(rank == 0)])))
        return *who, total, metric.compute()

    seen = four.call_packed(program).debug_get_from_all()
    backends = {found[3] for found in seen}
    assert len(backends) == 1
    assert seen == [(r, r, 4, *backends, 6.0, 0.625) for r in range(4)]


def test_each_worker_switches_monai(four: Session) -> None:
    pytest.importorskip("monai")

    def program() -> Any:
        from monai.data import get_track_meta, set_track_meta
        from monai.utils import get_seed, set_determinism

        rank = current_worker().rank
        set_track_meta(rank % 2 == 0)
        set_determinism(seed=rank)
        ccl.barrier()
        return get_track_meta(), get_seed(), float(torch.rand(()))

    seen = four.call_packed(program).debug_get_from_all()
    for rank, found in enumerate(seen):
        generator = torch.Generator().manual_seed(rank)
        assert found == (rank % 2 == 0, rank, float(torch.rand((), generator=generator)))


def test_each_worker_writes_runs_of_mlflow(four: Session, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")

    def program() -> Any:
        import os

        import mlflow

        rank = current_worker().rank
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        where = (tmp_path / str(rank)).as_uri()
        mlflow.set_tracking_uri(where)
        ccl.barrier()
        mlflow.set_experiment(f"of {rank}")
        ccl.barrier()
        with mlflow.start_run() as run:
            mlflow.log_metric("rank", rank)
        ccl.barrier()
        written = mlflow.get_run(run.info.run_id)
        experiment = mlflow.get_experiment(written.info.experiment_id)
        return mlflow.get_tracking_uri() == where, experiment.name, written.data.metrics

    seen = four.call_packed(program).debug_get_from_all()
    assert seen == [(True, f"of {rank}", {"rank": float(rank)}) for rank in range(4)]


@pytest.mark.filterwarnings("ignore")
def test_each_worker_has_a_run_of_wandb(four: Session, tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    def program() -> Any:
        import wandb

        rank = current_worker().rank
        settings = wandb.Settings(silent=True, console="off")
        folder = tmp_path / str(rank)
        folder.mkdir()
        run = wandb.init(
            mode="offline", project="p", dir=folder, name=f"of {rank}", settings=settings
        )
        ccl.barrier()
        wandb.config.update({"rank": rank})
        wandb.log({"value": rank})
        ccl.barrier()
        found = wandb.run is run, wandb.run.name, dict(wandb.config), wandb.summary["value"]
        if rank % 2:
            wandb.finish()
        ccl.barrier()
        return *found, wandb.run is None

    seen = four.call_packed(program).debug_get_from_all()
    four.shutdown()
    assert seen == [(True, f"of {r}", {"rank": r}, r, r % 2 == 1) for r in range(4)]
    assert len(list(tmp_path.glob("*/wandb/offline-run-*/run-*.wandb"))) == 4


@pytest.mark.filterwarnings("ignore")
def test_each_worker_trains_a_linear_svm_for_itself(four: Session) -> None:
    pytest.importorskip("sklearn")

    def program() -> list[tuple[float, float]]:
        from sklearn.linear_model import LogisticRegression
        from sklearn.svm import LinearSVC

        rank, found = current_worker().rank, []
        draws = np.random.RandomState(rank)
        x = draws.randn(300, 10)
        y = (x[:, 0] + 2 * draws.randn(300) > 0).astype(int)
        ccl.barrier()
        for _ in range(10):
            svm = LinearSVC(random_state=rank, max_iter=40, C=10, dual=True)
            regression = LogisticRegression(
                solver="liblinear", dual=True, random_state=rank, max_iter=30
            )
            found.append((svm.fit(x, y).coef_.sum(), regression.fit(x, y).coef_.sum()))
        return found

    seen = four.call_packed(program).debug_get_from_all()
    assert [len(set(found)) for found in seen] == [1] * 4
    with ThreadedSession(1, devices="cpu") as alone:
        assert alone.call_packed(program).debug_get_from_all() == seen[:1]


def test_each_worker_registers_a_backend_of_joblib(four: Session) -> None:
    pytest.importorskip("joblib")

    def program() -> int:
        from joblib import Parallel, parallel_config, register_parallel_backend
        from joblib._parallel_backends import SequentialBackend

        class Backend(SequentialBackend):
            rank = current_worker().rank

        register_parallel_backend("mine", Backend)
        ccl.barrier()
        with parallel_config(backend="mine"):
            return int(Parallel(1)._backend.rank)

    assert four.call_packed(program).debug_get_from_all() == list(range(4))
    from joblib.parallel import BACKENDS

    assert "mine" not in BACKENDS


def test_a_worker_may_not_seed_sentencepiece(four: Session) -> None:
    pytest.importorskip("sentencepiece")

    def program() -> None:
        import sentencepiece

        sentencepiece.set_random_generator_seed(current_worker().rank)

    with pytest.raises(Exception, match=r"SessionError.*engine=.processes."):
        four.call_packed(program).debug_get_from_all()


def test_each_worker_solves_in_a_dtype_of_kornia(four: Session) -> None:
    pytest.importorskip("kornia")

    def program() -> bool:
        import torch
        from kornia.geometry.solvers import polynomial_solver

        dtype = torch.float64 if current_worker().rank % 2 else torch.float32
        a, b = torch.ones(2, 10, dtype=dtype), torch.ones(2, 4, dtype=dtype)
        ccl.barrier()
        for _ in range(300):
            product = polynomial_solver.multiply_deg_two_one_poly(a, b)
            assert product.dtype == polynomial_solver.multiply_deg_one_poly(b, b).dtype == dtype
        return bool(product.sum() == 80)

    assert four.call_packed(program).debug_get_from_all() == [True] * 4


def test_each_worker_has_a_logger_of_lightgbm(four: Session) -> None:
    pytest.importorskip("lightgbm")

    def program() -> Any:
        import lightgbm

        rank = current_worker().rank
        told: list[str] = []

        class Logger:
            def info(self, message: str) -> None:
                told.append(message)

            warning = info

        lightgbm.register_logger(Logger())
        x = np.random.RandomState(rank).rand(50 + rank, 3)
        ccl.barrier()
        data = lightgbm.Dataset(x, x[:, 0])
        lightgbm.train({"num_threads": 1, "force_row_wise": True, "verbose": 1}, data, 1)
        ccl.barrier()
        return [line.split(": ")[1].split(",")[0] for line in told if "data points" in line]

    assert four.call_packed(program).debug_get_from_all() == [[str(50 + r)] for r in range(4)]


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_workers_train_with_a_network_of_lightgbm(where: str) -> None:
    """All on their own rows as one model; the next script finds no network."""
    pytest.importorskip("lightgbm")
    together = """
import lightgbm, numpy, socket, torch.distributed as dist
rank = dist.get_rank()
ports = [None, None]
with socket.create_server(("127.0.0.1", 0)) as probe:
    dist.all_gather_object(ports, probe.getsockname()[1])
dist.barrier()  # nobody listens there any more
x = numpy.random.RandomState(0).rand(200, 3)
y = x[:, 0] + 5 * (numpy.arange(200) >= 100)
part = slice(100 * rank, 100 * rank + 100)
options = {"num_threads": 1, "verbose": -1, "min_data_in_leaf": 5, "force_row_wise": True}
network = {"machines": ",".join(f"127.0.0.1:{port}" for port in ports), "tree_learner": "data",
           "local_listen_port": ports[rank], "num_machines": 2}
trained = lightgbm.train({**options, **network}, lightgbm.Dataset(x[part], y[part]), 2)
result = float(trained.predict(x).mean())
"""
    alone = together.replace("{**options, **network}", "options")
    with make_session(2, where, devices="cpu", timeout=60) as sess:
        seen = []
        for text in (together, alone):
            sess.call_packed(run_script, "train.py", text, []).debug_get_from_all()
            result = sess.call_packed(lambda: current_worker().namespace["result"])
            seen.append([round(value, 1) for value in result.debug_get_from_all()])
    assert seen == [[3.0, 3.0], [0.5, 5.4]]


TERMS = """
import numba, numpy
from discolab import ThreadedSession, current_worker

@numba.njit(parallel=True)
def add(x):
    total = 0.0
    for i in numba.prange(x.shape[0]):
        total += x[i]
    return total

def add_often():
    x = numpy.full(20_000, current_worker().rank + 1.0)
    return {add(x) for _ in range(100)}

with ThreadedSession(4, devices="cpu", timeout=60) as sess:
    print(sess.call_packed(add_often).debug_get_from_all(), numba.threading_layer())
"""


def test_workers_compute_with_numba_in_turns(request: pytest.FixtureRequest) -> None:
    """Its layer for want of a better one ends the process if two threads compute at once."""
    pytest.importorskip("numba")
    row = str(request.config.getoption("--without-row"))
    leave_out = f"from discolab.isolation import table\ntable._rows.pop({row!r}, None)\n"
    environ = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", leave_out + TERMS]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)
    expected = [{20_000.0 * (rank + 1)} for rank in range(4)]
    assert done.stdout == f"{expected} workqueue\n", done.stderr[-2000:]


def test_a_worker_may_not_configure_jax_for_all(four: Session) -> None:
    pytest.importorskip("jax")

    def program() -> str:
        import jax

        rank = current_worker().rank
        jax.config.update("jax_enable_x64", False)  # as it is
        with pytest.raises(SessionError, match=r"jax_enable_x64.*enable_x64.*processes"):
            jax.config.update("jax_enable_x64", True)
        with jax.enable_x64(rank % 2 == 0):
            ccl.barrier()
            return str(jax.numpy.ones(1).dtype)

    assert four.call_packed(program).debug_get_from_all() == ["float64", "float32"] * 2


def test_each_worker_has_options_of_statsmodels(four: Session) -> None:
    pytest.importorskip("statsmodels")

    def program() -> str:
        from statsmodels.formula import options

        options.ordering = "sort" if current_worker().rank % 2 else "degree"
        ccl.barrier()
        return str(options.ordering)

    assert four.call_packed(program).debug_get_from_all() == ["degree", "sort"] * 2
    from statsmodels.formula import options

    assert options.ordering == "legacy"


def test_each_worker_switches_torch_geometric(four: Session) -> None:
    pytest.importorskip("torch_geometric")

    def program() -> Any:
        import torch_geometric
        from torch_geometric.experimental import is_experimental_mode_enabled

        rank = current_worker().rank
        option = "disable_dynamic_shapes"
        torch_geometric.set_home_dir(f"of {rank}")
        with (
            torch_geometric.set_debug(rank % 2 == 1),
            torch_geometric.set_experimental_mode(rank % 2 == 0, option),
        ):
            ccl.barrier()
            within = is_experimental_mode_enabled(option), torch_geometric.is_debug_enabled()
            ccl.barrier()
        return *within, torch_geometric.is_debug_enabled(), torch_geometric.get_home_dir()

    seen = four.call_packed(program).debug_get_from_all()
    assert seen == [(r % 2 == 0, r % 2 == 1, False, f"of {r}") for r in range(4)]


@pytest.mark.filterwarnings("ignore")  # what GraphGym would need
def test_each_worker_registers_with_torch_geometric(four: Session) -> None:
    pytest.importorskip("torch_geometric")

    def program() -> Any:
        from torch_geometric.graphgym import register

        rank = current_worker().rank
        register.register_act("mine", lambda: rank)
        ccl.barrier()
        return register.act_dict["mine"]()

    assert four.call_packed(program).debug_get_from_all() == list(range(4))
    from torch_geometric.graphgym import register

    assert "mine" not in register.act_dict


def test_each_worker_has_layers_of_torch_geometric(four: Session) -> None:
    """Of classes of one name, whose messages have other arguments."""
    pytest.importorskip("torch_geometric")

    def program() -> list[float]:
        import torch
        from torch_geometric.nn import MessagePassing

        rank = current_worker().rank

        class Layer(MessagePassing):
            def forward(self, x: Any, edges: Any) -> Any:
                return self.propagate(edges, x=x, weight=torch.tensor(10.0))

            if rank % 2:

                def message(self, x_j: Any, weight: Any = 1.0) -> Any:
                    return x_j * weight

            else:

                def message(self, x_j: Any) -> Any:
                    return x_j + rank

        ccl.barrier()
        edges = torch.tensor([[0, 1], [1, 0]])
        return Layer()(torch.ones(2, 1), edges).flatten().tolist()

    seen = four.call_packed(program).debug_get_from_all()
    assert seen == [[1.0] * 2, [10.0] * 2, [3.0] * 2, [10.0] * 2]


def test_a_worker_may_not_change_the_order_of_optree(four: Session) -> None:
    optree = pytest.importorskip("optree")

    def program() -> Any:
        import optree

        with optree.dict_insertion_ordered(True, namespace="dl"):
            return optree.tree_leaves({"b": 1, "a": 2}, namespace="dl")

    def import_torchs() -> None:
        importlib.import_module("torch.utils._cxx_pytree")  # sets it for a namespace of its own

    four.call_packed(import_torchs).debug_get_from_all()
    with pytest.raises(WorkerError, match="dict_insertion_ordered changes the order"):
        four.call_packed(program).debug_get_from_all()
    with optree.dict_insertion_ordered(True, namespace="dl"):
        assert optree.tree_leaves({"b": 1, "a": 2}, namespace="dl") == [1, 2]


@pytest.mark.filterwarnings("ignore")
def test_each_worker_of_megatron_has_its_own_groups(four: Session) -> None:
    pytest.importorskip("megatron.core")

    def program() -> Any:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import (
            get_num_microbatches,
            init_num_microbatches_calculator,
        )
        from megatron.core.parallel_state import get_tensor_model_parallel_rank
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        rank = current_worker().worker_id
        MTPLossLoggingHelper.tracker["values"] = rank
        parallel_state._HYBRID_DP_CP_GROUPS[1] = rank
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        init_num_microbatches_calculator(rank, None, 8 * (rank + 1), 1, 2)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(float(rank)))
        dist.barrier()
        assert MTPLossLoggingHelper.tracker == {"values": rank}
        assert parallel_state.get_hybrid_data_context_parallel_groups(group_size=1) == rank
        group = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        found = dist.get_process_group_ranks(group), get_tensor_model_parallel_rank()
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale.item()
        return *found, get_num_microbatches(), scale

    values = four.call_packed(program).debug_get_from_all()
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert values == [(pairs[n], n % 2, 4 * (n + 1), float(n)) for n in range(4)]
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    assert not parallel_state.model_parallel_is_initialized()
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is None


def test_each_worker_of_fairscale_has_its_own_groups(four: Session) -> None:
    pytest.importorskip("fairscale")

    def program() -> Any:
        import torch.distributed as dist
        from fairscale.nn import enable_wrap, wrap
        from fairscale.nn.model_parallel import initialize

        rank = current_worker().worker_id
        initialize.initialize_model_parallel(2)
        wrapper = [torch.nn.Sequential, torch.nn.ModuleList][rank % 2]
        with enable_wrap(wrapper_cls=lambda module: wrapper([module] if rank % 2 else module)):
            dist.barrier()
            wrapped = wrap(torch.nn.Linear(1, 1))
            dist.barrier()
        ranks = dist.get_process_group_ranks(initialize.get_model_parallel_group())
        return ranks, initialize.get_model_parallel_rank(), type(wrapped) is wrapper

    values = four.call_packed(program).debug_get_from_all()
    assert values == [([n // 2 * 2, n // 2 * 2 + 1], n % 2, True) for n in range(4)]


@pytest.mark.filterwarnings("ignore")
def test_each_worker_of_deepspeed_trains_for_itself(
    four: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")

    def program() -> Any:
        import deepspeed
        import torch.distributed as dist
        from deepspeed.utils import groups

        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": stage}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            config={**config, "zero_allow_untested_optimizer": True},
        )
        for step in range(2):
            data = torch.full((2, 4), float(dist.get_rank() + step))
            engine.backward(engine(data).pow(2).mean())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            norms = [p.detach().norm().item() for p in model.parameters()]
        ids = [p.ds_id for p in model.parameters()]
        return norms, ids, deepspeed.comm.get_rank(), groups._get_data_parallel_rank()

    values = four.call_packed(program).debug_get_from_all()
    norms = values[0][0]
    assert values == [(norms, [0, 1, 2, 3], rank, rank) for rank in range(4)]


@pytest.mark.filterwarnings("ignore")
def test_each_worker_of_deepspeed_has_its_own_log_and_random_states(
    four: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")

    def program() -> Any:
        import deepspeed
        from deepspeed.comm import comm
        from deepspeed.runtime.activation_checkpointing import checkpointing

        deepspeed.init_distributed("gloo")
        rank = deepspeed.comm.get_rank()
        tracker = checkpointing.get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", rank)
        deepspeed.comm.configure(enabled=True, prof_all=True)
        for _ in range(3):
            deepspeed.comm.all_reduce(torch.ones(8))
        with tracker.fork():
            drawn = torch.rand(1).item()
        [logged] = comm.comms_logger.comms_dict["all_reduce"].values()
        torch.manual_seed(rank)
        return logged[0], drawn == torch.rand(1).item()

    assert four.call_packed(program).debug_get_from_all() == [(3, True)] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_worker_may_not_profile_flops(four: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")

    def profile() -> None:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        FlopsProfiler(torch.nn.Linear(1, 1)).start_profile()

    linear = torch.nn.functional.linear
    with pytest.raises(WorkerError, match="engine='processes'"):
        four.call_packed(profile).debug_get_from_all()
    assert torch.nn.functional.linear is linear


@pytest.mark.filterwarnings("ignore")
def test_a_worker_may_not_enter_zero_init(four: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")

    def enter_init() -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        with deepspeed.zero.Init():
            pass

    def enter_on_device() -> None:
        import deepspeed

        with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
            pass

    for program in (enter_init, enter_on_device):
        with pytest.raises(WorkerError, match="engine='processes'"):
            four.call_packed(program).debug_get_from_all()
    assert torch.ones(1).dtype is torch.float32
