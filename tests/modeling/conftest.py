import pytest

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


@pytest.fixture(scope="session")
def toy_model(toy_path):
    """toy_model("qwen3", dtype="bfloat16") -> LoadedModel, loaded once per session and set of arguments."""
    loaded = {}

    def load(name: str, **options):
        key = (name, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load_model(toy_path(name), **options)
        return loaded[key]

    return load
