"""Which family reads which checkpoint: one line per family."""

from collections.abc import Mapping
from typing import Any

from tpu_vl.errors import ConfigError
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import Family

FAMILIES: tuple[Family, ...] = (qwen3_vl.FAMILY,)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that reads a config.json, by its `model_type`.

    Raises:
        ConfigError: the type is missing or unknown; the message lists the known ones.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(t for family in FAMILIES for t in family.model_types))
    raise ConfigError(
        f"config.json: model_type {model_type!r} is not supported; known types: {known}"
    )
