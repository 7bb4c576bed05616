import pytest
import torch

from specpaged.modeling import linear, numerics
from specpaged.modeling.loading import load_model
from tests.modeling.families import save_toy


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory):
    """toy_path("qwen3") -> directory of that family's toy checkpoint, made once per session."""
    directory = tmp_path_factory.mktemp("families")
    made = {}

    def path(name: str) -> str:
        if name not in made:
            made[name] = save_toy(name, directory)
        return made[name]

    return path


@pytest.fixture(scope="module")
def without_bfloat16_units():
    """A CPU that has none, as oneDNN's units for bfloat16 would come before our own kernel."""
    can_pack = linear.can_pack

    def can_pack_float32(dtype, device):
        return dtype == torch.float32 and can_pack(dtype, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "can_pack", can_pack_float32)
        patch.setattr(numerics, "can_pack", can_pack_float32)
        for probe in (numerics._choose_linear_scheme, numerics._choose_attention_scheme):
            probe.cache_clear()
        yield
    for probe in (numerics._choose_linear_scheme, numerics._choose_attention_scheme):
        probe.cache_clear()


@pytest.fixture(scope="session")
def toy_model(toy_path):
    """toy_model("qwen3", dtype="bfloat16") -> LoadedModel, loaded once per session and set of arguments."""
    loaded = {}

    def load(name: str, **options):
        key = (name, linear.can_pack, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load_model(toy_path(name), **options)
        return loaded[key]

    return load
