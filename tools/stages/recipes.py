"""The default recipe of each method: its paper's on ImageNet-1K where there is one."""

from pathlib import Path

from pretrain.common.errors import UserError, suggest_name
from tools import ROOT

_RECIPES = ROOT / "configs" / "pretrain"
_RECIPE_SUFFIX = "_R50_IN1k_200ep.yaml"
_OTHER_RECIPES = {
    "multikey": "jcl_R50_IN1k_200ep.yaml",
    "ressl": "sce_R18_cifar10_200ep.yaml",
    "supcon": "tcl_supervised_R50_cifar10_100ep.yaml",
    "tcl": "tcl_R18_IN100_400ep.yaml",
}
# Overrides that turn another method's recipe into this method's.
_RECIPE_OVERRIDES = {
    "multikey": "METHOD.NAME multikey METHOD.JCL_LAMBDA 1.0 OUTPUT_DIR runs/multikey_R50_IN1k_200ep",
    "ressl": "METHOD.NAME ressl METHOD.TEMPERATURE 0.1 METHOD.KEY_TEMPERATURE 0.04 "
    "OUTPUT_DIR runs/ressl_R18_cifar10_200ep",
    "supcon": "METHOD.NAME supcon METHOD.K1 1.0 OUTPUT_DIR runs/supcon_R50_cifar10_100ep",
}


def find_recipe(method: str) -> Path:
    """Return the default recipe of a method."""
    path = _RECIPES / _OTHER_RECIPES.get(method, f"{method}{_RECIPE_SUFFIX}")
    if not path.is_file():
        available = list_methods()
        remedy = f"choose one of {', '.join(available)}, or pass --config-file FILE{suggest_name(method, available)}"
        raise UserError(f"no default recipe for --method {method}; {remedy}")
    return path


def find_recipe_overrides(method: str) -> list[str]:
    """Return the overrides of a method whose default recipe is another method's, else none."""
    return _RECIPE_OVERRIDES.get(method, "").split()


def list_methods() -> list[str]:
    """List the methods that have a default recipe."""
    return sorted([*_OTHER_RECIPES, *(path.name.split("_")[0] for path in _RECIPES.glob(f"*{_RECIPE_SUFFIX}"))])
