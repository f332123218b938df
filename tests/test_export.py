from pathlib import Path

import pytest

from llamarl_jax.config_files import load_config


def _config(tmp_path):
    from llamarl_jax.config import Config

    path = min((Path(__file__).parents[1] / "configs").glob("*.py"))
    return load_config(path, Config)


def test_an_existing_folder_is_not_overwritten(tmp_path):
    from llamarl_jax.export import export_checkpoint

    with pytest.raises(FileExistsError, match="exists already; choose a folder that does not"):
        export_checkpoint(_config(tmp_path), tmp_path)
