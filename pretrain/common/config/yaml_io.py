"""Both stages' config language: Detectron2's YAML with `_BASE_` and `KEY VALUE` overrides, on fvcore's CfgNode."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from fvcore.common.config import CfgNode
from yaml.representer import SafeRepresenter

from ..errors import UserError, one_line
from ..files import check_file, check_output_path, expand
from .keys import Keys, expected_type, suggest_key

# yacs raises these for a value of the wrong type, and Python's parser for text that only looks like a value.
_WRONG = (ValueError, KeyError, AssertionError, TypeError, AttributeError, SyntaxError)
# Python's error for a file -> what is wrong with the file.
_REASONS = {
    RecursionError: "it refers to itself",
    UnicodeDecodeError: "save it as UTF-8",
    **dict.fromkeys((AttributeError, TypeError), "it is empty or a list, or _BASE_ is not a file's name"),
}
_PLACES = "__places__"  # among a config's attributes, where yacs keeps what it knows of one
# libyaml's, where PyYAML was built with it.
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FAST_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class Setting(NamedTuple):
    """A value that a config file gives to a key, and how errors name the file (or `_BASE_`): " in a.yaml"."""

    value: Any
    where: str


def flatten(cfg: CfgNode | dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a config as ``("SOLVER.BASE_LR", value)``."""
    for key, value in cfg.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_yaml(text: str, loader: Any = _FAST_LOADER, where: str = "") -> Any:
    """Parse YAML text.

    Args:
        where: names the text in errors, as in `` in a.yaml``.

    Raises:
        UserError: a key occurs twice: PyYAML would silently use the last one.
        yaml.YAMLError: it is not YAML.
    """
    reader = loader(text)
    if loader is yaml.SafeLoader:
        reader.name = where.removeprefix(" in ") or reader.name
    try:
        tree = reader.get_single_node()
        _check_repeated_keys(tree, where, {})
        return reader.construct_document(tree) if tree else None
    except yaml.YAMLError:
        if loader is yaml.SafeLoader or loader is not _FAST_LOADER:
            raise
    finally:
        reader.dispose()
    return load_yaml(text, yaml.SafeLoader, where)  # its errors say more, and it reads names that are not UTF-8


def _check_repeated_keys(tree: yaml.Node | None, where: str, lines: dict[str, int], prefix: str = "") -> None:
    """Raise UserError for a key that occurs twice, also if it occurs once in its section and once dotted.

    Args:
        lines: the line of every key before ``tree``; its own are added. The key of an item in a list is its number.
        prefix: the sections that ``tree`` is in, with dots.
    """
    for key, value in tree.value if isinstance(tree, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if name in lines:
            raise UserError(f"{name} occurs twice{where}, on lines {lines[name]} and {line}; remove one")
        lines[name] = line
        _check_repeated_keys(value, where, lines, f"{name}.")
    for number, item in enumerate(tree.value if isinstance(tree, yaml.SequenceNode) else ()):
        if isinstance(item, yaml.MappingNode):
            _check_repeated_keys(item, where, lines, f"{prefix}{number}.")


def parse_yaml(text: str) -> dict[str, Any]:
    """Parse the text of a config; raise ValueError if it does not contain ``KEY: value`` lines of YAML."""
    try:
        loaded = load_yaml(text)
    except (yaml.YAMLError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"is not YAML ({one_line(error)[:100]})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"contains a {type(loaded).__name__}, not KEY: value lines")
    return loaded


class _Dumper(_FAST_DUMPER):
    """Writes configs as dictionaries, and a list that occurs twice as two lists."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_multi_representer(CfgNode, SafeRepresenter.represent_dict)


def dump(cfg: CfgNode) -> str:
    """Return the YAML text that ``cfg.dump()`` returns, in a fifth of the time."""
    try:
        return yaml.dump(cfg, Dumper=_Dumper)
    except UnicodeEncodeError:  # a path that is not UTF-8, which libyaml cannot write
        return cfg.dump()


def get(cfg: CfgNode, key: str) -> Any:
    """Return the value of a dotted key such as ``SOLVER.BASE_LR``, or None if ``cfg`` has no such key."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def merge(cfg: CfgNode, keys: Keys, config_file: str | Path | None, overrides: Sequence[Any] = ()) -> dict[str, str]:
    """Merge a YAML file (and its `_BASE_`), then overrides, into ``cfg`` in place.

    Args:
        keys: every key of ``cfg``.
        overrides: ``["SOLVER.BASE_LR", "0.03", ...]``; a value is text, as on a command line, or Python's or NumPy's.

    Returns:
        How an error names the file that sets each key, `" in a.yaml"`; "" for an override. Other keys are not in it.

    Raises:
        UserError: missing or unreadable file, unknown key (the nearest known one is named), wrong type or value.
    """
    if len(overrides) % 2:
        raise UserError(f"override {overrides[-1]!r} has no value; write KEY VALUE pairs, as in SOLVER.BASE_LR 0.03")
    settings = _read_file(config_file) if config_file else {}
    for key, setting in settings.items():
        _merge_value(cfg, keys, key, setting.value, setting.where)
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        _merge_value(cfg, keys, key, value)
    places = {key: setting.where for key, setting in settings.items()} | dict.fromkeys(overrides[::2], "")
    cfg.__dict__[_PLACES] = places  # clones have it, too
    return places


def list_places(cfg: CfgNode) -> Mapping[str, str]:
    """Return what `merge` has returned for a config or the one that it is a clone of; {} for one that has no files."""
    return cfg.__dict__.get(_PLACES, {})


def copy_places(source: CfgNode, target: CfgNode) -> None:
    """Let errors about ``target``, which has the values of ``source``, name the files that set them."""
    target.__dict__[_PLACES] = list_places(source)


def _read_file(path: str | Path) -> dict[str, Setting]:
    """Read a YAML file over its `_BASE_`: every dotted key and its setting."""
    path = check_file(path, "config file", "*.yaml")
    if path.suffix == ".py":
        raise UserError(f"{path} is Python, such as Detectron2's lazy configs; give a YAML file")
    try:
        return read_settings(path)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot read its _BASE_ {error.filename or ''}: {error.strerror or error}") from error
    except (yaml.YAMLError, AttributeError, RecursionError, TypeError, ValueError) as error:
        reason = _REASONS.get(type(error)) or one_line(error)[:300]
        if ":python/" in reason:  # in Detectron2's Base-RetinaNet.yaml
            sizes = [[x, round(x * 2 ** (1 / 3), 4), round(x * 2 ** (2 / 3), 4)] for x in (32, 64, 128, 256, 512)]
            reason += "; Python expressions in YAML are not evaluated: copy the file and write out their values "
            reason += f"(RetinaNet's SIZES: {sizes})"
        raise UserError(f"{path} or its _BASE_ does not contain KEY: VALUE lines of YAML: {reason}") from error


def read_settings(path: Path, referring: tuple[Path, ...] = ()) -> dict[str, Setting]:
    """Read every dotted key of a file, after those of its `_BASE_`: a file, or a list of them in order.

    Args:
        referring: the files whose `_BASE_` led here.

    Raises:
        UserError: a key occurs twice in one of the files.
        OSError, yaml.YAMLError, AttributeError, TypeError, ValueError: it is not a config.
    """
    path = Path(os.path.normpath(path))
    absolute = Path(os.path.abspath(path))
    if absolute in referring:
        raise ValueError(_REASONS[RecursionError])
    where = f" in {path}"
    content = load_yaml(path.read_text(encoding="utf-8"), where=where)
    bases = content.pop("_BASE_", [])
    settings: dict[str, Setting] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        settings |= read_settings(path.parent / expand(base), (*referring, absolute))
    return settings | {key: Setting(value, where) for key, value in flatten(content)}


def _merge_value(cfg: CfgNode, keys: Keys, key: str, value: Any, where: str = "") -> None:
    default = get(cfg, key)
    if isinstance(default, dict):
        raise UserError(f"{key}{where} is a section, not a value; write {key}.<KEY>")
    if key not in keys:
        hint = "; if your own module has it, --import that module" if key.startswith("METHOD.") else ""
        raise UserError(f"unknown config key {key}{where}{hint}{suggest_key(key, keys)}")
    if key.startswith("DATA.") and isinstance(default, str) and isinstance(value, (list, tuple)):
        # Several data sets, which are one text (see `pretrain.data.names.list_names`).
        value = str([os.fspath(item) if isinstance(item, os.PathLike) else item for item in value])
    try:
        typed: Any = _convert(value, default)
        if isinstance(default, float) and type(typed) is int:
            typed = float(typed)  # yacs would refuse it
        if default == "none" and str(typed).lower() in ("none", "false", "off", "no", "fp32", "float32"):
            typed = default
        cfg.merge_from_list([key, repr(typed) if isinstance(typed, str) else typed])  # yacs evaluates text once more
        fits = default is None or get(cfg, key) is not None  # yacs accepts None for any type
    except _WRONG:
        fits = False
    if not fits:
        hint = "; write text in quotes" if isinstance(default, str) and where else ""
        if isinstance(default, list) and default:
            hint = f"; write it as {default}"
        if key.startswith("DATASETS."):
            names = (name.strip("()[]'\" ") for name in str(value).split(","))
            hint = f'; write "{tuple(filter(None, names))}"'
        raise UserError(f"{key}{where} must be {expected_type(default)}, not {_shorten(repr(value))}{hint}")
    if key == "MODEL.WEIGHTS":
        cfg.MODEL.WEIGHTS = expand(cfg.MODEL.WEIGHTS)
    if key == "OUTPUT_DIR":
        cfg.OUTPUT_DIR = expand(cfg.OUTPUT_DIR)
        check_output_path(cfg.OUTPUT_DIR, key + where)


def _shorten(text: str) -> str:
    text = " ".join(text.split())  # the representation of an array has several lines
    return text if len(text) <= 60 else f"{text[:57]}..."


def _convert(value: Any, default: Any, accepted: Any = object) -> Any:
    """Convert ``value`` to Python's type of ``default`` if it only looks different: 32.0, false, the folder 2024.

    Args:
        accepted: the types that text may stand for; float in a list: YAML 1.1 reads 1e-2 as text, and 2024 may be a
            name.
    """
    if isinstance(value, str):
        parsed = CfgNode._decode_cfg_value(value.capitalize() if isinstance(default, bool) else value)
        value = parsed if isinstance(parsed, (str, type(None)) if isinstance(default, str) else accepted) else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's or torch's
    if accepted is float and isinstance(default, (int, float)) and not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    if isinstance(value, (list, tuple)):
        item_default = default[0] if isinstance(default, list) and default else None
        return [_convert(item, item_default, float) for item in value]
    return int(value) if type(default) is int and isinstance(value, float) and value.is_integer() else value
